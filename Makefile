# Every target makes .venv and installs what it needs first. Choose the interpreter with `make PYTHON=python3.12 ...`.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2# test processes; one needs 2 to 3 GiB

BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
TYPES  := build/types

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-float32 lint types format bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed-docs ## the library's main job on a real quantum system
	$(BIN)/python docs/examples/demo.py

test: lint types test-float32 ## everything: lint, types, all tests with x64 off and on
	$(PYTEST) -n $(WORKERS) --dist worksteal --benchmark-disable

test-fast: $(VENV)/installed-dev ## the tests that are not slow
	$(PYTEST) -n $(WORKERS) --dist worksteal --benchmark-disable -m "not slow"

test-float32: $(VENV)/installed-dev ## the tests that are not slow, with x64 off as most users run
	KRYLOV_TEST_X64=0 $(PYTEST) -n $(WORKERS) --dist worksteal --benchmark-disable -m "not slow and not x64_only"

lint: $(VENV)/installed-dev ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The type checker knows nothing of setuptools' package-dir: show it the packages in their installed shape.
types: $(VENV)/installed-dev ## mypy
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/krylov
	@ln -s "$(CURDIR)"/krylov/* "$(CURDIR)/operators" $(TYPES)/krylov/
	cd $(TYPES) && "$(abspath $(BIN))/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" -p krylov

format: $(VENV)/installed-dev ## apply ruff's fixes and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/installed-bench ## the benchmarks; also writes .benchmarks/latest.json
	@mkdir -p .benchmarks
	$(PYTEST) benchmarks --benchmark-json=.benchmarks/latest.json

# One stamp for each extra, so that an unchanged pyproject.toml installs nothing.
$(VENV)/installed-%: pyproject.toml $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "krylov needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
