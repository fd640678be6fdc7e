"""Commands whose names are functions of the package: `rolljax/train.py` and `rolljax/export.py` only run them."""
