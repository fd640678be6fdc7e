cat > /tmp/fit.py <<'END'
import csv
import math

rows = list(csv.DictReader(open("/work/counts.csv")))
background = [float(r["counts"]) for r in rows if r["kind"] == "background"]
sample = [(float(r["time_s"]), float(r["counts"])) for r in rows if r["kind"] == "sample"]
base = sum(background) / len(background)


def misfit(half_life):
    """Weighted squares of what is left after the best amplitude."""
    shape = [(math.exp(-t * math.log(2) / half_life), c - base, 1 / max(c, 1)) for t, c in sample]
    amplitude = sum(w * s * y for s, y, w in shape) / sum(w * s * s for s, y, w in shape)
    return sum(w * (y - amplitude * s) ** 2 for s, y, w in shape)


print(min((misfit(k / 1000), k / 1000) for k in range(1000, 30000, 5))[1])
END
python3 /tmp/fit.py > /work/half_life.txt
