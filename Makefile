# Each target does the set-up it needs. Needs python3 (>= 3.11), pip and make, nothing else; tests of the sandbox also
# bubblewrap, which is installed for root on Debian and its kin.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# the sandbox; only where this is root's machine and Debian's
INSTALL_BWRAP := { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && echo "installing bubblewrap" && \
	{ apt-get install -qq -y bubblewrap > /dev/null || { apt-get update -qq && apt-get install -qq -y bubblewrap > /dev/null; }; }; }

.PHONY: setup setup-test quickstart test test-all check bench clean

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rolljax needs Python 3.11 or newer; \
	$(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps google-jetstream==0.2.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
		--target $(VENV)/transformers4 transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2
	@command -v bwrap > /dev/null || $(INSTALL_BWRAP) || echo "no bubblewrap here: the tests of the sandbox will be skipped"
	@touch $@

quickstart: setup
	$(BIN)/python -m rolljax.train --gin configs/quickstart.gin

test: setup-test
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

# also the suites whose full size takes too long for every change
test-all: setup-test
	$(BIN)/python -m pytest tests -n 2 --dist loadfile -m 'sweep or not sweep'

check: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_docs.py

bench: setup-test
	$(BIN)/python benchmarks/quickstart.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
