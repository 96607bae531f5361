# `make pipeline` and `make test` install what they need into .venv, once, and then do their work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONFIG ?= configs/support
BENCH ?= artifacts/bench
# A test computes on one thread; at most four of them run at once, those of a file one after the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: pipeline test test-slow bench lint install install-dev status clean help

help:
	@echo "make pipeline   run SFT, RM and PPO of $(CONFIG) (CONFIG=configs/... for others)"
	@echo "make test       run the tests; make test-slow runs the slow ones; make lint checks style and types"
	@echo "make bench      speed against TRL, to benchmarks/RESULTS.md; about 25 minutes (BENCH=where its files go)"
	@echo "make status     what is finished in artifacts/; make clean removes .venv (artifacts stay)"

pipeline: $(VENV)/.installed
	$(BIN)/rlhf pipeline $(CONFIG)

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py --work $(BENCH) $(BENCH_OPTIONS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

status: $(VENV)/.installed
	$(BIN)/rlhf status artifacts/$(notdir $(CONFIG))

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# A venv that was made only in part is removed, so that the next try starts anew.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "Python 3.11 to 3.13 is needed, $(PYTHON) is not: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
