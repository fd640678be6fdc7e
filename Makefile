# Each target does the set-up it needs. Needs python3 (>= 3.11), pip and make, nothing else; tests of the sandbox also
# bubblewrap and Podman, which are installed for root on Debian and its kin.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest tests -n 2 --dist loadfile
# what takes most of a machine's memory, and therefore runs by itself
ALONE  := $(BIN)/python -m pytest tests/e2e -m alone $(if $(START_BEFORE),--start_before $(START_BEFORE))
# `make test-newest`: a newer Python (3.13 or 3.12, from pyenv or the PATH), and the tests that run there
PYENV  := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
NEWEST ?= $(firstword $(wildcard $(PYENV)/3.13*/bin/python3.13 $(PYENV)/3.12*/bin/python3.12) \
	$(shell command -v python3.13 || command -v python3.12))
NEWEST_TESTS ?= tests/e2e/test_sampler.py $(addprefix tests/unit/,$(addsuffix .py,model/test_attention \
	trainer/test_batch model/test_decoder storage/test_durable sampler/test_engine_worker sampler/test_kernels \
	trainer/test_kl trainer/test_masked run/test_memory model/test_moe trainer/test_objectives \
	trainer/test_optimizer trainer/test_publish trainer/test_update))
# the sandbox; only where this is root's machine and Debian's
SANDBOX := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bubblewrap podman runc > /dev/null 2>&1
INSTALL_SANDBOX := { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && echo "installing bubblewrap and Podman" && \
	{ $(SANDBOX) || { apt-get update -qq && $(SANDBOX); }; }; }

.PHONY: setup setup-test quickstart test test-slow test-all test-newest durations mutants check docs bench accelerator clean

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt \
		aim aim-ui aimrocks aimrecords RestrictedPython watchdog pytz
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
		--target $(VENV)/transformers4 transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2
	@{ command -v bwrap && command -v podman; } > /dev/null || $(INSTALL_SANDBOX) || \
		echo "no bubblewrap or no Podman here: tests of the sandbox will be skipped"
	@touch $@

quickstart: setup
	$(BIN)/python -m rolljax.train --gin configs/quickstart.gin

# every invariant of BUILD.md at least once: at most ten minutes on two cores
test: setup-test
	$(PYTEST)

# the rest: programs at full size for TPUs, eight devices, several processes, every family and every setting for itself.
# START_BEFORE=SECONDS (since 1970): what has not started then is skipped
test-slow: setup-test
	$(PYTEST) -m 'slow and not sweep' $(if $(START_BEFORE),--start_before $(START_BEFORE))
	$(ALONE)

# suites whose full size takes hours (every kill point, every hack), and all the others
test-all: setup-test
	$(PYTEST) -m 'not alone'
	$(ALONE)

# model, sampler, trainer, kernels, a dry run of benchmarks/accelerator and a short quickstart with a newer Python and the
# newest jax, flax and orbax that pip installs there. `make test-newest NEWEST_TESTS="tests/unit tests/contract"` runs more.
test-newest:
	@if [ -z "$(NEWEST)" ]; then echo "no Python 3.12 or 3.13 found: skipped (name one: make test-newest NEWEST=PYTHON)"; \
	else $(MAKE) --no-print-directory $(VENV)-newest/.installed && \
	$(VENV)-newest/bin/python -c 'import sys, jax; print("Python", sys.version.split()[0], "jax", jax.__version__)' && \
	$(VENV)-newest/bin/python -m pytest $(NEWEST_TESTS) -n 2 --dist loadfile && \
	$(VENV)-newest/bin/python -m pytest tests/e2e/test_accelerator.py -m sweep && \
	folder=$$(mktemp -d) && JAX_PLATFORMS=cpu $(VENV)-newest/bin/python -m rolljax.train --gin quickstart \
	--run_dir $$folder/quickstart --set 'warm_start/Phase.steps = 8' --set 'rl/Phase.steps = 4' && rm -r $$folder; fi

$(VENV)-newest/.installed: pyproject.toml
	$(NEWEST) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check --editable . pytest pytest-xdist hypothesis
	@touch $@

# what every test costs, by which they are handed out: run it alone on a machine, and commit tests/durations.json
durations: setup-test
	rm -f tests/durations.json
	$(PYTEST) -m 'not alone' --write_durations

# faults put into a copy of the source, each of which `make test` must catch
mutants: setup-test
	$(BIN)/python tests/mutations.py

check: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/repository/test_docs.py

# the site, into build/site: needs no network, and neither does who reads it (open build/site/index.html)
docs: setup-test
	$(BIN)/python docs/make_site.py

bench: setup-test
	$(BIN)/python benchmarks/quickstart.py

# everything that a GPU or TPU can tell us, in pieces of at most eight minutes (docs/accelerators.md). PYTHON: one whose jax
# sees the device; nothing is installed
accelerator:
	$(PYTHON) benchmarks/accelerator/run.py

clean:
	rm -rf $(VENV) $(VENV)-newest .pytest_cache .mypy_cache .ruff_cache .hypothesis
