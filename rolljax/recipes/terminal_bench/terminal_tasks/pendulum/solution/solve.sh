cat > /work/period.py <<'END'
import math
import sys

angle, length = map(float, sys.argv[1:])
a, b = 1.0, math.cos(math.radians(angle) / 2)
for _ in range(40):
    a, b = (a + b) / 2, math.sqrt(a * b)
print(2 * math.pi * math.sqrt(length / 9.81) / a)
END
