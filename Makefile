# make env         a virtual environment in .venv with everything installed (skipped when done)
# make test        lint, types and the fast tests: every step runs, one summary, non-zero on any failure
# make unit        the unit tests alone, under a minute
# make test-slow   the long tests, and those of speed
# make test-repeat the fast tests twenty times, every other time on busy cores: no verdict may change
# make quickstart  the whole chain with little training (a few minutes)
# make reproduce   the whole chain for the default recipe
# make reproduce-all  and EcoSpec's tables for targets carved to the geometries of its three models (two hours more)
# make clean       caches and build products; make distclean also removes .venv
#
# PYTHON=python3.12 chooses the interpreter. PIP_ARGS="--find-links DIR" shows pip a folder of wheels, for example one
# that holds a CPU build of torch.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.moexp-installed

# A CUDA build of torch is several GB: hold it off where there is no NVIDIA GPU to use it, and never where there is one.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
CONSTRAINT := $(if $(filter-out 0,$(HAS_GPU)),,-c constraints-cpu.txt)

.PHONY: env test unit test-slow test-repeat quickstart reproduce reproduce-all clean distclean
.DEFAULT_GOAL := test

env: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "moexp needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) $(CONSTRAINT) (several minutes the first time)"
	@$(BIN)/python -m pip install --quiet $(CONSTRAINT) $(PIP_ARGS) -e '.[dev]'
	@touch $@

test: env
	@failed=0; checks=""; \
	check() { \
	  name="$$1"; shift; echo "== $$name"; \
	  if "$$@"; then checks="$$checks$$name ok, "; else checks="$$checks$$name FAILED, "; failed=1; fi; \
	}; \
	check "ruff check" $(BIN)/ruff check .; \
	check "ruff format" $(BIN)/ruff format --check .; \
	check "mypy" $(BIN)/mypy; \
	echo "== pytest"; \
	MOEXP_CHECKS="$${checks%, }" $(BIN)/python -m pytest -n auto || failed=1; \
	exit $$failed

unit: env
	@$(BIN)/python -m pytest -n auto -m "not slow and not gpu and not e2e"

test-slow: env
	@$(BIN)/python -m pytest -m slow

test-repeat: env
	@$(BIN)/python tests/repeat.py

quickstart: env
	@$(BIN)/moexp reproduce --recipe pocket-quick

reproduce: env
	@$(BIN)/moexp reproduce --recipe pocket

reproduce-all: reproduce
	@for recipe in pocket-qwen3 pocket-qwen3-wide pocket-gpt-oss pocket-deepseek-v3; do \
	  $(BIN)/moexp reproduce --recipe $$recipe || exit 1; \
	done
	@$(BIN)/moexp compare pocket pocket-qwen3 pocket-qwen3-wide pocket-gpt-oss pocket-deepseek-v3

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find moexp tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
