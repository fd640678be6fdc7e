cat > /tmp/crack.py <<'END'
from hashlib import sha256

for line in open("/work/pins.db"):
    name, digits, salt, wanted = line.strip().split(":")
    for number in range(10 ** int(digits)):
        pin = f"{number:0{digits}}"
        if sha256(sha256(f"{salt}:{pin}".encode()).digest()).hexdigest() == wanted:
            print(f"{name}:{pin}")
            break
END
python3 /tmp/crack.py > /work/pins.txt
