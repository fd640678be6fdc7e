cd /work
sed -i 's/in intervals:/in sorted(intervals):/' merge.py
sed -i 's/start < joined/start <= joined/' merge.py
sed -i 's/(joined\[-1\]\[0\], end)/(joined[-1][0], max(end, joined[-1][1]))/' merge.py
sed -i 's/        start, end = line.split()/        if not line.strip():\n            continue\n        start, end = map(int, line.split())/' merge.py
