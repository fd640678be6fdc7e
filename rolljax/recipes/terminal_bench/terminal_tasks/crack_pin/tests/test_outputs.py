"""Each PIN must give the hash that was stored."""

import hashlib
from pathlib import Path

LOCKS = [['door', 4, '248174e5', 'b8c2cad65272171a279fe14738d30c0caf4471260a9546a0defac4b6ac7f40a8'], ['gate', 4, '462804db', '0554630ebe7835fa88a7310377a881d22ae1d979bda2c4c1d99a5b93e6c84bca'], ['safe', 5, 'a94c56b9', 'd0d9c2f9154bcdf1528e4f9eab9b5acf6749e39d5e0371041c6119fd205bdaaf'], ['vault', 5, '56f547ab', '15da8a1644685471875eeda445c49ef734088252ccf516bc48c931c162bbd794']]


def pins():
    return [line.split(":") for line in Path("/work/pins.txt").read_text().split()]


def test_every_lock_in_order():
    assert [pin[0] for pin in pins()] == [lock[0] for lock in LOCKS]


def test_pins_give_the_hashes():
    for (_, pin), (_, digits, salt, wanted) in zip(pins(), LOCKS, strict=True):
        assert len(pin) == digits and pin.isdecimal()
        assert hashlib.sha256(hashlib.sha256(f"{salt}:{pin}".encode()).digest()).hexdigest() == wanted
