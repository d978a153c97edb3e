# `make test` runs all tests of CI. `make help` lists the other targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# With this variable, Python stores no compiled files, and each process of a test compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Python of .venv and .venv-worker: 3.11 or later.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
WORKER_VENV := .venv-worker
GPU_VENV := .venv-gpu
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Repeats tests that failed while the machine was suspended or stalled, because these tests have limits of seconds.
TESTS := ./.ci/tests $(BIN)/python

# For machines without a package index, these two variables name an existing environment to use instead of .venv-gpu:
# its Python, and the PYTHONPATH with which it finds vLLM's CUDA build with the libraries of the CPU build.
GPU_PYTHON ?=
GPU_SITE ?=
GPU_RUN = $(if $(GPU_PYTHON),PYTHONPATH="$(GPU_SITE):$(CURDIR)/worker_image/src" $(GPU_PYTHON),$(GPU_VENV)/bin/python)
OUT ?=
export OUT

.PHONY: help setup quickstart test check lint types imports unit integration e2e cluster bench lock clean

help:  ## prints this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1 | /p' Makefile | column -t -s '|'

setup:  ## installs everything into .venv and .venv-worker; does nothing if nothing changed
	@./.ci/setup "$(PYTHON)" $(VENV) $(WORKER_VENV)

quickstart: setup  ## serves a small model on this machine, from its files to tokens
	@$(BIN)/python -m tests.quickstart

# Tests with limits of seconds start after all tests that compute, and tests of a real node run alone. Only the tests
# without such limits run beside them, at a tenth of the priority (.ci/idle explains why not lower).
test: need-root check  ## runs all tests of CI; root
	@failed=0; for lanes in "computing programs images" "hurried unhurried"; do ./.ci/lanes $$lanes || failed=1; done; exit $$failed
hurried: waiting nodes
.PHONY: hurried

check: setup  ## runs the checks before a commit: lint, types, imports, unit tests, chart, docs
	@./.ci/lanes unit static

lint: setup  ## checks rules and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## checks types with mypy in strict mode
	$(BIN)/mypy

chart: setup  ## checks the rendered chart with checkov, kube-score and kubernetes-validate; docs/contributor/chart.md must list each finding
	$(BIN)/python -m tests.chart_linters

docs: setup  ## builds the docs as a site in site/; fails if a link is broken or the navigation lacks a page
	$(BIN)/python -m tests.docs_site

static: lint imports types chart docs
.PHONY: static chart docs

imports: setup  ## checks the direction of imports with import-linter
	$(BIN)/lint-imports

unit: setup  ## runs the unit tests on all cores
	$(PYTEST) tests/unit -n auto --maxprocesses 8

# Tests run in two lanes: tests that compute, and tests that mostly wait. The second lane includes new folders of
# tests/integration. Each lane runs two files at the same time; tests/integration/conftest.py keeps some tests together.
LONGEST := --durations=100 --durations-min=5
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
COMPUTING := $(addprefix tests/integration/,worker kernels bridge feed_forward up bench fetch models served_models calibration)

integration: setup  ## runs the integration tests, with a real API server and real vLLM groups on the CPU
	@failed=0; for lanes in computing "waiting unhurried"; do ./.ci/lanes $$lanes || failed=1; done; exit $$failed

computing: setup  ## runs the integration tests that start vLLM or compile
	$(TESTS) $(LONGEST) $(TWO_FILES) $(COMPUTING) -m "not feed_forward_matrix and not unhurried"

unhurried: setup  ## runs the integration tests without limits of seconds, at a tenth of the priority
	./.ci/idle $(PYTEST) $(LONGEST) tests/integration -m "unhurried and not served_models_matrix"

waiting: setup  ## runs the integration tests that mostly wait for an API server or for time-outs
	@$(BIN)/python -m tests.cluster build
	$(TESTS) $(LONGEST) $(TWO_FILES) tests/integration -m "not gang_schedulers and not many_namespaces and not every_request and not unhurried" \
	  $(COMPUTING:%=--ignore=%)

programs: setup  ## builds the programs of the test cluster for later tests, at a tenth of the priority
	@./.ci/idle $(BIN)/python -m tests.cluster build

images: need-root setup  ## builds the images of this tree for later tests; root
	@./.ci/idle $(BIN)/python -m tests.cluster images

need-root:
	@if [ "$$(id -u)" != 0 ]; then \
	  echo "make $(MAKECMDGOALS): needs root, because it starts a real Kubernetes node (containerd, kubelet, network" >&2; \
	  echo "namespaces). Run it as root, or run the tests that need no root: make check integration" >&2; exit 1; fi
.PHONY: need-root

cluster-tests: need-root setup  ## tests the test cluster itself, once for each state of tests/cluster; root
	@$(BIN)/python -m tests.cluster tested || { \
	  $(BIN)/python -m tests.cluster build node && $(BIN)/python -m tests.cluster images && \
	  $(PYTEST) tests/cluster/tests && $(BIN)/python -m tests.cluster tested --record; }

nodes: cluster-tests e2e
.PHONY: computing unhurried waiting cluster-tests nodes programs images

feed-forward: setup  ## runs 20 architectures in mode FeedForward on CPUs, and compares the tokens with those of transformers
	$(PYTEST) tests/integration/feed_forward -m feed_forward_matrix
.PHONY: feed-forward

models: setup  ## compares tokens of two CPU pods with stock vLLM, for every kind of attention and format of weights
	$(PYTEST) $(LONGEST) tests/integration/served_models
.PHONY: models

gangs: setup  ## builds Kueue, Volcano, coscheduling and kube-schedulers, and runs groups under them; root
	@$(BIN)/python -m tests.cluster build gangs
	$(PYTEST) tests/integration/scheduling -m gang_schedulers
.PHONY: gangs

routes: need-root setup  ## builds Envoy, an endpoint picker and KEDA's interceptor, and sends requests through them; root
	@$(BIN)/python -m tests.cluster build routes
	@$(BIN)/python -m tests.cluster images
	$(PYTEST) tests/routes
.PHONY: routes

e2e: need-root setup  ## runs the tests on a real Kubernetes node with images of this tree; root
	@$(BIN)/python -m tests.cluster build node
	@$(BIN)/python -m tests.cluster images
	$(TESTS) $(LONGEST) tests/e2e -m "not every_fault"

faults: setup  ## runs every row of the fault matrix on two real nodes; OUT=DIR keeps the measurements; root
	@$(BIN)/python -m tests.cluster build
	@$(BIN)/python -m tests.cluster images
	$(PYTEST) tests/e2e/faults
.PHONY: faults

cluster: setup  ## starts a real Kubernetes node with images of this tree (`make cluster-down` stops it); root
	@$(WORKER_VENV)/bin/python -m tests.models .models/small
	@$(BIN)/python -m tests.cluster up node --images --models .models

cluster-down:  ## stops what `make cluster` started
	@$(BIN)/python -m tests.cluster down
.PHONY: cluster-down

bench: setup  ## compares a group on CPUs with stock vLLM in one run
	$(BIN)/python -m tests.bench.pipeline_vs_stock

# Reports missing requirements before it installs anything.
need-gpu:
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU' || \
	  { echo "make $(MAKECMDGOALS): needs an NVIDIA GPU (nvidia-smi lists none). Run it on a machine with one" >&2; exit 1; }
setup-gpu: need-gpu
	@if [ -n "$(GPU_PYTHON)" ]; then $(GPU_RUN) -m vllm_heteroinfer.kernels.build >/dev/null; \
	else ./.ci/setup "$(PYTHON)" $(VENV) "" $(GPU_VENV); fi
.PHONY: need-gpu setup-gpu test-gpu bench-gpu churn

test-gpu: setup-gpu  ## on a machine with a GPU: compares tokens in every topology; two GPUs allow more topologies
	$(GPU_RUN) -m pytest tests/gpu

bench-gpu: setup-gpu  ## on a machine with a GPU: measures bridge, CPU kernels, offloading and metrics
	$(GPU_RUN) -m tests.bench.bridge_all_reduce
	$(GPU_RUN) -m tests.bench.cpu_linear --quick
	$(GPU_RUN) -m tests.bench.offload
	$(GPU_RUN) -m tests.bench.metrics_overhead

CHURN := --groups 200 --parallel 5 --modes Pipeline,Tensor
churn: setup  ## starts and ends 200 tiny CPU groups; fails if a group hangs or leaves anything behind
	$(BIN)/python -m tests.bench.churn $(CHURN)

SOAK := --seconds 3600 --resources 50 --real
soak: setup  ## deletes pods and ends the API server for an hour; fails if a group is not Ready again or memory leaks; root
	@$(BIN)/python -m tests.cluster build node
	$(BIN)/python -m tests.soak $(SOAK)
.PHONY: soak

SCALE := --resources 1000 --idle-seconds 600 --write docs/contributor/scale.md
scale: setup  ## measures the operator with 1,000 resources of 4 pods on kwok nodes; root
	@$(BIN)/python -m tests.cluster build control-plane
	$(PYTEST) -s tests/integration/operator -m many_namespaces
	$(BIN)/python -m tests.scale $(SCALE)

SPECS := --count 10000
specs: setup  ## checks that 10,000 random resources are refused with a message, or give objects that a real API server accepts
	@$(BIN)/python -m tests.cluster build control-plane
	$(BIN)/python -m tests.integration.specs $(SPECS)
CORNERS := --count 1000
corners: need-root setup  ## runs 1,000 random resources on a real API server, each with a random fault; root
	@$(BIN)/python -m tests.cluster build
	$(BIN)/python -m tests.corners $(CORNERS)
	$(PYTEST) tests/integration/operator/test_status_first.py -m every_request
.PHONY: scale specs corners

dashboards: setup  ## writes the chart's dashboards from charts/dashboards, and takes pictures with a group that serves
	$(BIN)/python -m charts.dashboards
	@$(BIN)/python -m tests.cluster build
	$(BIN)/python -m tests.watching
.PHONY: dashboards

lock: setup  ## writes the newest allowed versions to the files that pin versions
	@./.ci/lock $(BIN)/uv

clean:  ## removes environments and caches of this tree, but keeps the cache of models and tools
	rm -rf $(VENV) $(WORKER_VENV) $(GPU_VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis
