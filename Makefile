# Everything here works on a fresh machine: the first target that needs .venv makes it.
#
#   make demo      real data, a trained checkpoint, a recipe, an A/B on Ray, a report
#   make test      the whole test suite, with coverage
#   make results   serve-int8 on every reference model, for README's table (half an hour, quiet machine)
#   make compat    the third-party models through one recipe, for docs/compatibility.md (90 minutes)
#   make sanitize  the kernels' parity grid under AddressSanitizer and UndefinedBehaviorSanitizer
#   make peers     the other engines that `rankopt bench` times, into .venv
#   make bench     the peer suite, for the tables of README and docs/peers.md (an hour, quiet machine)
#   make kernels   int8 layers and lookups against this machine's peaks, for docs/kernels.md
#   make training  training recipes against plain PyTorch, for docs/training.md (15 minutes, quiet machine)
#   make lint      ruff and mypy
#   make format    ruff, writing
#   make lock      hashes of every pin in locks/*.in, after one was changed
#   make doctor    what this machine has and lacks
#   make clean     what building and testing left, .venv kept

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.rankopt-installed
export VENV PYTHON

DEMO_CARD ?= models/din-movielens.yaml
DEMO_RECIPE ?= recipes/launch-int8.yaml
DEMO_OUT ?= runs/demo
COVERAGE ?= 85
# Processes that share the tests, file by file. Threads that wait for work give their core away: with
# two processes on two cores they would hold up the other's.
TEST_PROCESSES ?= 2

.PHONY: help setup demo test results compat sanitize peers bench kernels training lint format lock doctor clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(INSTALLED)

# The stamp is what keeps a second `make test` from installing again.
$(INSTALLED): locks/cpu.txt locks/cuda.txt locks/dev.txt locks/torch.txt pyproject.toml setup.py scripts/setup.sh scripts/prerequisites.sh
	@bash scripts/setup.sh
	@touch $@

# --overwrite: the demo replaces its own earlier run, and only after the new one is complete.
demo: $(INSTALLED)
	@$(BIN)/rankopt train $(DEMO_CARD) --out $(DEMO_OUT)/training --overwrite
	@$(BIN)/rankopt run $(DEMO_RECIPE) --model $(DEMO_OUT)/training/card.yaml --out $(DEMO_OUT) --overwrite

test: $(INSTALLED)
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile \
	    --cov=rankopt --cov-report=term --cov-fail-under=$(COVERAGE) $(ARGS)

results: $(INSTALLED)
	@$(BIN)/python scripts/results.py measure $(ARGS)

compat: $(INSTALLED)
	@$(BIN)/python scripts/compatibility.py measure $(ARGS)

sanitize: $(INSTALLED)
	@$(BIN)/python scripts/sanitize.py $(ARGS)

# They change nothing of what is installed: their versions are pinned beside the other locks.
peers: $(INSTALLED)
	@$(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps \
	    --require-hashes -r locks/peers.txt

bench: $(INSTALLED)
	@$(BIN)/python scripts/peers.py measure

kernels: $(INSTALLED)
	@$(BIN)/python scripts/kernels.py measure $(ARGS)

training: $(INSTALLED)
	@$(BIN)/python scripts/training.py measure $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: $(INSTALLED)
	@UV=$(BIN)/uv bash scripts/lock.sh

doctor: $(INSTALLED)
	@$(BIN)/rankopt doctor

clean:
	rm -rf build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
