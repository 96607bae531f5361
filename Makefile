# `make pipeline` and `make test` install what they need into .venv once, and then do their work.
# The CPU build of PyTorch: make pipeline TORCH_INDEX=URL, with the URL that pytorch.org/get-started shows for "CPU".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LLAMA_CPP := $(VENV)/llama.cpp
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONFIG ?= configs/support
BENCH ?= artifacts/bench
TORCH_INDEX ?=
# Every test computes on one thread. At most four run at the same time; those of one file run one after the other.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: pipeline test test-slow bench lint docs release install install-dev status clean help

help:
	@echo "make pipeline   run SFT, RM and PPO of $(CONFIG); CONFIG=configs/... for another folder"
	@echo "make test       run the tests; make test-slow runs the slow ones; make lint checks style, types, spelling and links"
	@echo "make docs       build the site from docs/ in build/site"
	@echo "make bench      measure speed against TRL, about 25 minutes; the report and all files go to $(BENCH) (BENCH=DIR)"
	@echo "make release    build wheel and sdist in dist/, check them, and run the wheel in an environment of its own"
	@echo "make status     show the stages of $(CONFIG); make clean removes .venv and keeps artifacts/"
	@echo "Each installs into .venv first. TORCH_INDEX=URL takes PyTorch from there, PYTHON=python3.12 another Python."

pipeline: $(VENV)/.installed
	$(BIN)/rlhf pipeline $(CONFIG)

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# In the order of the folders: by number of tests, the longest file, which has one test, would start last.
test-slow: $(VENV)/.installed-slow
	$(PYTEST) -m slow --no-loadscope-reorder $$(grep -rl mark.slow --include='test_*.py' tests | sort)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py --work $(BENCH) $(BENCH_OPTIONS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m pytest -q tests/docs/test_docs.py -k every_link

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/build_site.py build/site

# The wheel runs away from the checkout, in an environment that has nothing else: `rlhf init`, then a few steps of it.
RELEASE := $(VENV)/release
release: $(VENV)/.installed-dev
	rm -rf dist $(RELEASE)
	$(PIP) install --quiet build twine
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(RELEASE)
	$(if $(TORCH_INDEX),$(RELEASE)/bin/pip install --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(RELEASE)/bin/pip install --quiet -c constraints.txt dist/*.whl
	cd $(RELEASE) && bin/rlhf init mine && bin/rlhf pipeline mine --quiet --set sft:training.num_steps=3 \
		--set rm:training.num_steps=3 --set rm:evaluation.num_normalization_samples=4 \
		--set ppo:ppo.num_iterations=1 --set ppo:evaluation.num_prompts=4

status: $(VENV)/.installed
	$(BIN)/rlhf status artifacts/$(notdir $(CONFIG))

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# An incomplete venv is removed, so that the next try starts over.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
		|| { echo "$(PYTHON) is not Python 3.11 to 3.14. Name one that is: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Prints size and time before they are spent.
define install_torch
	@echo "Installing into $(VENV), once. Download: 0.3 GB with PyTorch's CPU build, 2.9 GB with the CUDA build, which is"
	@echo "the default on Linux x86-64 (TORCH_INDEX=URL takes the CPU build, see README.md). Disk: 1.4 GB with the CPU"
	@echo "build. Time: one minute and the download."
	$(if $(TORCH_INDEX),$(PIP) install --quiet --no-deps --constraint constraints.txt --index-url $(TORCH_INDEX) torch)
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(install_torch)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(install_torch)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(install_torch)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@ $(VENV)/.installed

# Only the slow tests use these: torchao, what llama.cpp's converter imports, and TRL, whose DPO trains from our SFT model.
$(VENV)/.installed-slow: $(VENV)/.installed-dev $(LLAMA_CPP)/convert_hf_to_gguf.py
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,torchao,gguf]' trl
	touch $@

# llama.cpp's converter. Of the package indexes only the source package of llama-cpp-python (77 MB) has it.
$(LLAMA_CPP)/convert_hf_to_gguf.py: | $(BIN)/python
	mkdir -p $(LLAMA_CPP)
	$(PIP) download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP) llama-cpp-python==0.3.36
	cd $(LLAMA_CPP) && tar -xzf llama_cpp_python-0.3.36.tar.gz --strip-components 3 $(addprefix \
		llama_cpp_python-0.3.36/vendor/llama.cpp/,convert_hf_to_gguf.py conversion gguf-py)
	rm $(LLAMA_CPP)/llama_cpp_python-0.3.36.tar.gz
	touch $@

clean:
	rm -rf $(VENV)
