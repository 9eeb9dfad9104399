# make train: set up and run the demo.  make test: set up and run the default suite; test-fast: two minutes of it.
# make test-rig: the rig, see docs/reliability.md.  make test-gpu: the tests of a GPU, on it.  make docs: the site, in outputs/site.
PYTHON ?= python3
BIN := .venv/bin
# What depends on the kind of processor, seconds long; the other kind is the one that this machine is not.
QUICK := tests/plan tests/test_train.py tests/test_open_checkpoint.py tests/promises/test_dry_run.py
# Tests compute with one thread each (tests/__init__.py): make test WORKERS=8 uses eight cores.
WORKERS ?= 2
# Which of the allowed versions are installed: make setup-test CONSTRAINTS=.github/constraints/newest.txt takes the newest.
CONSTRAINTS ?= constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
.PHONY: train test test-fast test-gpu test-slow test-all test-rig mutations tiers lint docs setup setup-test clean

train: .venv/.installed
	$(BIN)/python train.py --backend auto

test: .venv/.installed-test
	$(PYTEST)
	$(PYTEST) --processor other $(QUICK)

test-fast: .venv/.installed-test
	$(PYTEST) -m fast

# What depends on the device, on the card itself: make test-gpu DEVICE=xpu, or DEVICE=emulated for its stand-in.
DEVICE ?= cuda
test-gpu: .venv/.installed-test
	$(BIN)/python -m pytest --device $(DEVICE)

test-slow: .venv/.installed-test
	$(PYTEST) -m "slow and not rig"
	$(PYTEST) --processor other

test-all: .venv/.installed-test
	$(PYTEST) -m "not rig"
	$(PYTEST) --processor other
	$(BIN)/python -m pytest -m rig

# Measures which tests of the default suite are fast and writes tests/support/tiers.txt.
tiers: .venv/.installed-test
	$(PYTEST) --write-tiers

# make test-rig RIG="--rig-kills 1000 --rig-scale full": kills, faults and damaged files, as often as the options say.
test-rig: .venv/.installed-test
	mkdir -p outputs
	$(BIN)/python -m pytest -m rig --rig-json outputs/rig.json --rig-report outputs/rig-failures.jsonl $(RIG)

# Breaks each promise of the guides and shows that a test of it fails; make mutations MUTATIONS="BM-09 --workers 1".
mutations: .venv/.installed-test
	$(BIN)/python -m tests.mutations.run --baseline --write $(MUTATIONS)

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds the site of docs/; a link or an anchor that leads nowhere ends it.
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: .venv/.installed
setup-test: .venv/.installed-test

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12 " + "train")'
	$(PYTHON) -m venv .venv

# pip compiles no module: that took a minute, and Python compiles those that are imported.
.venv/.installed: requirements.txt $(CONSTRAINTS) | .venv/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements.txt -c $(CONSTRAINTS)
	touch $@

.venv/.installed-test: requirements-test.txt .venv/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements-test.txt -c $(CONSTRAINTS)
	touch $@

.venv/.installed-docs: requirements-docs.txt | .venv/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements-docs.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
