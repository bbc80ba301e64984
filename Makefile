# Every target does its own set-up: the virtual environment, the dependencies, the models.
# PYTHON=python3.12 chooses the interpreter, VENV=dir the environment, DEVICE=cpu|cuda the torch build.

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= auto

BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINKS := .cache/types/paceline
FOLDERS := protos kernels worker cluster
# Ours is paceline.kernels; the folder `kernels` must never be found as a top-level package.
export PYTHONSAFEPATH := 1
# One thread per process: tests run several ranks on few cores. A benchmark sets its own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup links models protos fmt lint types arch check test test-full test-kernels \
	test-dist test-chaos test-gpu golden golden-gpu bench-cpu bench-spec bench-flips \
	demo clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup models ## Serve the built-in model with a draft, ask it twice, show the receipts
	$(BIN)/paceline demo

test: setup models links ## What CI runs: all tests but the exhaustive matrix
	$(PYTEST)

test-full: setup models links ## The exhaustive matrix too
	$(PYTEST) -m ""

test-kernels: setup ## Each kernel set against the torch reference
	$(PYTEST) -m "kernels and not full"

test-dist: setup models ## Real Ray and real gRPC
	$(PYTEST) -m "dist and not full"

test-chaos: setup models ## Processes and messages that die, stall or repeat
	$(PYTEST) -m "chaos and not full"

test-gpu: setup models ## What needs a CUDA device
	$(PYTEST) -m gpu

bench-cpu: setup models ## Speed on this CPU, as ratios; writes results/
	$(BIN)/paceline bench cpu

bench-spec: setup models ## What speculation gains on this CPU, as ratios; writes results/
	$(BIN)/paceline bench spec

bench-flips: setup models ## How often rounding changes a token, and never with --deterministic
	$(BIN)/paceline bench flips

check: lint types arch ## Lint, types and import rules

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: setup ## Format, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup links ## mypy --strict
	$(BIN)/mypy

arch: setup links ## import-linter: layers, and the pure modules
	PYTHONPATH=.cache/types $(BIN)/lint-imports

protos: setup ## Regenerate the protocol code
	PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh protos

golden: setup ## What was worked out by hand: trees, links, messages
	$(PYTEST) tests/golden

golden-gpu: setup ## Tree kernels on a GPU against the reference; writes tests/golden/gpu_record.json
	$(BIN)/python tests/golden/gpu_record.py

setup: $(READY) ## The environment in .venv

$(READY): pyproject.toml deploy/constraints.txt deploy/setup.sh
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" deploy/setup.sh "$(VENV)"
	@touch $@

links: ## The tree in which the type checker sees the package
	@mkdir -p $(LINKS)
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder $(LINKS)/$$folder; done

models: setup ## The built-in models, in the cache
	@$(BIN)/paceline models get smollm2-135m smollm2-135m-draft smollm2-135m-eagle3

clean: ## Remove the environment and everything that is built
	rm -rf $(VENV) .cache build dist results *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
