# Every target does its own set-up: Python >= 3.11 and make are all it takes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Twice as many as there are cores: a third of the time a test waits, for a server or for processes of its own.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, 2 * (os.cpu_count() or 1)))')
# Three times as many for the long tests, which kill, pause and wait for leases to expire.
LONG_WORKERS = $(shell $(PYTHON) -c 'import os; print(min(6, 3 * (os.cpu_count() or 1)))')
PYTEST = $(BIN)/python -m pytest -q
LONG = $(PYTEST) -n $(LONG_WORKERS) --dist=loadgroup --no-loadscope-reorder -o faulthandler_timeout=900
# Compiled modules are kept, whatever the shell says: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup demo test check long fmt bench bench-guard bench-peers torture mutants proofs outside migrate

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

setup: $(READY)  ## build .venv from requirements.lock

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"trinity-buffer needs Python >= 3.11, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	@echo 'building .venv from requirements.lock, once: 2.5 GB, mostly torch, in about five minutes'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup      ## four processes train a small policy through one store
	$(BIN)/trinity-buffer demo $(ARGS)

test: setup      ## the quick tests, a case of each on each database, on all cores
	$(PYTEST) -n $(WORKERS) --dist=loadgroup --cases 1 --hypothesis-profile quick $(ARGS)

check: setup     ## what CI runs: format, lint, types, dead names, floors, and all tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/lint-imports
	$(LONG) -m "not outside" $(ARGS)

long: setup      ## the long tests, on all cores
	$(LONG) -m long $(ARGS)

fmt: setup       ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: setup     ## the figures of docs/proofs/performance.md; quickly: make bench ARGS="--tasks 32 --repetitions 1"
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-peers: setup  ## beside other people's stores: make bench-peers ARGS="--peers reverb,files --repetitions 1"
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-guard: setup  ## fails when writing, annotating or streaming is half as quick as recorded
	$(BIN)/python -m benchmarks.guard $(ARGS)

torture: setup   ## kill, pause, starve and confuse everything: make torture ARGS="--store postgresql"
	$(BIN)/python -m benchmarks.torture --minutes 30 --seed 1 --record $(ARGS)

mutants: setup   ## small changes that no test notices: make mutants ARGS="--sample 20 --seed 7"
	$(BIN)/python -m benchmarks.mutants $(ARGS)

proofs: setup    ## recorded figures that are older than their code: make proofs ARGS=--run
	$(BIN)/python -m benchmarks.proofs $(ARGS)

outside: setup   ## our adapters with other people's real packages: make outside ARGS="trl --record"
	$(BIN)/python -m benchmarks.outside $(ARGS)

migrate: setup   ## bring a store up to date: make migrate URL=sqlite:///runs/sort.db
	$(BIN)/trinity-buffer migrate --store $(URL)
