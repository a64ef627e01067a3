# Everything runs in .venv, made on first use from PYTHON (3.11 or newer) with pip alone.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_MODEL ?= sample_models/t2b_train.mlirbc.zst
DEMO_MESH ?= v4-32
FUZZ_INPUTS ?= 10000
FUZZ_SEED ?= 0

# No accelerator is needed, and none of this machine's is to be claimed.
export JAX_PLATFORMS ?= cpu
# Hundreds of processes of Python start: that each compiles what it imports would be a sixth of the time of all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick packages walk pages docs lint types format format-check check check-all readme clean fuzz faults

help:
	@echo "make demo     partition a sample model for $(DEMO_MESH) and show the report"
	@echo "make test     run the tests, as many at once as there are cores"
	@echo "make quick    run those that take less than a minute together on two cores"
	@echo "make fuzz     run $(FUZZ_INPUTS) hostile inputs (a quarter of an hour on idle cores); findings go to build/fuzz"
	@echo "make faults   kill commands at 100 random moments, and look at what is left"
	@echo "make packages build wheel and sdist, install and run them with the oldest and newest jax supported"
	@echo "make walk     a new user's walk: wheel, model, partition, run, in several frameworks"
	@echo "make pages    look at the HTML pages in headless Chromium"
	@echo "make docs     build the documentation as a site in build/docs"
	@echo "make check    format-check, lint, types, test"
	@echo "make check-all  the same, the tests that 'make test' leaves out, and new random programs"
	@echo "make format   format the code"
	@echo "make readme   bring the README's first run up to date"
	@echo "make clean    remove what was made"

# Made again when the dependencies change.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "toast needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing toast and its tools into $(VENV), once; this takes some minutes"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev,docs]'
	touch $(READY)

demo: $(READY)
	mkdir -p build/demo
	$(BIN)/toast partition $(DEMO_MODEL) --mesh $(DEMO_MESH) -o build/demo/sharded.mlir

# Each worker takes its share of the tests in order, so that what a file prepares is prepared once; who ends early takes over.
PARALLEL := --numprocesses logical --dist worksteal

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL)

check-all: $(READY) check
	$(BIN)/python -m pytest $(PARALLEL) -m 'thorough or hypothesis' --hypothesis-profile random

quick: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not thorough'

fuzz: $(READY)
	cd tests && PYTHONPATH=.:.. $(abspath $(BIN))/python -m fuzz --inputs $(FUZZ_INPUTS) --seed $(FUZZ_SEED)

faults: $(READY)
	cd tests && PYTHONPATH=.:.. $(abspath $(BIN))/python -m fuzz.faults --kills 100

packages: $(READY)
	.ci/packages $(BIN)/python

walk: $(READY)
	.ci/walk $(BIN)/python

pages: $(READY)
	.ci/pages $(BIN)/python

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .

format-check: $(READY)
	$(BIN)/ruff format --check .

check: format-check lint types test

readme: $(READY)
	$(BIN)/python docs/make_readme.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
