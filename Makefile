# Every target makes .venv and installs what it needs first. Another interpreter:
# `make PYTHON=python3.12 test`. More test processes, each of 2 to 3 GiB: `make WORKERS=4 test`.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2

# JAX's factorizations of small matrices: where cores are shared, threads of OpenBLAS only wait for each other.
export OPENBLAS_NUM_THREADS ?= 1

# Most of the time goes into compiling thousands of small programs; so it takes a third. Where a jaxlib does not know
# one of the flags: `make QUICK_XLA= test`. What a user runs first is compiled as it is there.
QUICK_XLA ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
             --xla_cpu_parallel_codegen_split_count=1
AS_USED   := tests/test_docs.py tests/test_examples.py

BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --benchmark-disable
QUICKLY = XLA_FLAGS="$$XLA_FLAGS $(QUICK_XLA)"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-fast test-float32 lint types format bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed-docs ## the library's main job on a real quantum system
	$(BIN)/python docs/examples/demo.py

test: lint types test-float32 ## everything: lint, types, tests with x64 off, then the others with x64 on
	$(PYTEST) $(AS_USED)
	$(QUICKLY) $(PYTEST) --second-pass $(AS_USED:%=--ignore=%)

test-fast: $(VENV)/installed-dev ## a first look: of each test that is not slow, its first case
	$(QUICKLY) $(PYTEST) -m "not slow" --first-case

test-float32: $(VENV)/installed-dev ## the tests that are not slow, with x64 off as most users run
	$(QUICKLY) KRYLOV_TEST_X64=0 $(PYTEST) -m "not slow"

lint: $(VENV)/installed-dev ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed-dev ## pyright, on links to the sources in their installed shape
	@rm -rf build/types && find krylov operators -name '*.py' | while read -r source; do \
	    link=build/types/krylov/$${source#krylov/}; \
	    mkdir -p "$${link%/*}" && ln -s "$(CURDIR)/$$source" "$$link" || exit 1; \
	done
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed-dev ## apply ruff's fixes and format
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

bench: $(VENV)/installed-bench ## the benchmarks; also writes .benchmarks/latest.json
	@mkdir -p .benchmarks
	$(BIN)/python -m pytest benchmarks --benchmark-json=.benchmarks/latest.json

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
