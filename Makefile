# Everything that a fresh machine with Python 3.11 or newer needs: each goal does its own set-up.
# Options of the script behind a goal go into ARGS: make bert ARGS="--epochs 2"

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
NEWEST_VENV ?= .venv-newest
BUILD_VENV ?= .venv-build
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
NPROC ?= 4
WORKERS ?= 3
ARGS ?=

.PHONY: help setup bert convergence test test-all test-fast test-newest test-cuda gpu campaigns docs lint format bench wheel clean

help:
	@echo "make bert         fine-tune a pretrained BERT on 4 ranks (tp 2 x pp 2)"
	@echo "make test         the tests with a sample of the slow ones; make test-fast leaves out all that take long, test-all nothing"
	@echo "make test-newest  the same tests with what pip installs today, in a virtual environment of its own"
	@echo "make test-cuda    tests on a CUDA device that is simulated in host memory; needs a C++ compiler"
	@echo "make gpu          on a machine with a GPU: tests and measures it in stages of 8 minutes, which write runs/gpu.md"
	@echo "make campaigns    what takes an hour: every mutant, every plan, kills and faults, of which the suite has samples"
	@echo "make convergence  the loss curves of five layouts against the unsharded one"
	@echo "make docs         the documentation site, in build/site; open build/site/index.html, without a server"
	@echo "make bench        the figures of the README, as ratios"
	@echo "make lint | format | wheel | setup | clean"

setup: $(READY)

# torch comes first: what is installed after it then finds the pinned one, and asks for no other.
$(READY): pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer was found; name one with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples,test]'
	@touch $@

bert: setup
	$(BIN)/booster run --nproc-per-node $(NPROC) examples/bert/finetune.py --tp 2 --pp 2 $(ARGS)

convergence: setup
	$(BIN)/python examples/bert/convergence.py $(ARGS)

# Three processes share the tests: while ranks of the one wait for each other or for a disk, those of another work.
SUITE := -m pytest zoo_tests --numprocesses $(WORKERS) --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(SUITE)

test: setup
	$(PYTEST) --sample $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

test-fast: setup
	$(PYTEST) -m "not slow" --quick $(ARGS)

# Without constraints, those of pip's configuration included; each run upgrades what has a new release.
test-newest:
	test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	PIP_CONSTRAINT= PIP_CONFIG_FILE=/dev/null $(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade \
		--upgrade-strategy eager --editable '.[examples,test]'
	$(NEWEST_VENV)/bin/python -m pip list | grep -E '^(torch|transformers|accelerate|peft|trl|lightning) '
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python $(SUITE) --sample $(ARGS)

ON_CUDA := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --device simcuda --numprocesses $(WORKERS)

# Of the tests beside plain training, those of what a device can get wrong; the others repeat them for other models.
CUDA_PARITY := adapters context_parallel deferred_logits dropout expert_parallel features out_of_vocabulary plain_loops \
	precision schedules sequence_modes

test-cuda: setup
	$(ON_CUDA) zoo_tests/simcuda --sample $(ARGS)
	$(ON_CUDA) $(CUDA_PARITY:%=zoo_tests/parity/test_%.py) -m "not slow" $(ARGS)

gpu: setup
	$(BIN)/python -m zoo_tests.gpu $(ARGS)

campaigns: setup
	$(BIN)/python -m pytest zoo_tests --campaigns -m campaign $(ARGS)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

# With ruff on the path, signatures in the reference are wrapped.
docs: $(DOCS_READY)
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/proselint check README.md docs/*.md docs/migrate/*.md

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# To pack the library takes neither what it needs nor what its tests need.
wheel:
	test -x $(BUILD_VENV)/bin/python || $(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_VENV)/bin/python -m pip install --quiet --constraint constraints.txt build
	rm -rf build dist
	$(BUILD_VENV)/bin/python -m build --quiet --wheel

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(BUILD_VENV) build dist *.egg-info .pytest_cache .ruff_cache
