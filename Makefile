# One command runs what CI runs: `make test`. `make help` lists the others.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# If this variable is set, each process of each test compiles this tree's modules again.
unexport PYTHONDONTWRITEBYTECODE

# Python of .venv and .venv-worker: 3.11 or later.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
WORKER_VENV := .venv-worker
GPU_VENV := .venv-gpu
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Repeats tests that failed while the machine was suspended or stalled: they have limits of seconds.
TESTS := ./.ci/tests $(BIN)/python

# An existing environment instead of .venv-gpu, for machines without a package index: its Python, and the
# PYTHONPATH with which it finds vLLM's CUDA build including the CPU build's libraries.
GPU_PYTHON ?=
GPU_SITE ?=
GPU_RUN = $(if $(GPU_PYTHON),PYTHONPATH="$(GPU_SITE):$(CURDIR)/worker_image/src" $(GPU_PYTHON),$(GPU_VENV)/bin/python)
OUT ?=
export OUT

.PHONY: help setup quickstart test check lint types imports unit integration e2e cluster bench lock clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1 | /p' Makefile | column -t -s '|'

setup:  ## installs everything into .venv and .venv-worker; does nothing if nothing changed
	@./.ci/setup "$(PYTHON)" $(VENV) $(WORKER_VENV)

quickstart: setup  ## a small model on this machine, from a file to served tokens
	@$(BIN)/python -m tests.quickstart

# Tests with limits of seconds start when no other test computes, and a test of a real node runs alone. Tests
# without such limits get the remaining CPU time, and a tenth of theirs (.ci/idle explains why not less).
test: need-root check  ## what CI runs
	@failed=0; for lanes in "computing programs images" "hurried unhurried"; do ./.ci/lanes $$lanes || failed=1; done; exit $$failed
hurried: waiting nodes
.PHONY: hurried

check: setup  ## the inner loop: lint, types, imports, unit
	@./.ci/lanes unit static

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

chart: setup  ## checkov, kube-score and kubernetes-validate over the rendered chart: each finding is listed in docs/contributor/chart.md
	$(BIN)/python -m tests.chart_linters

docs: setup  ## the docs as a site, in site/; a broken link or a page without a place in the navigation fails
	$(BIN)/python -m tests.docs_site

static: lint imports types chart docs
.PHONY: static chart docs

imports: setup  ## import-linter: the direction of imports
	$(BIN)/lint-imports

unit: setup  ## pure tests, on all cores
	$(PYTEST) tests/unit -n auto --maxprocesses 8

# Tests run in two lanes: tests that compute, and tests that mostly wait. The second lane includes new folders of
# tests/integration. Each lane runs two files at once; tests/integration/conftest.py keeps some tests together.
LONGEST := --durations=100 --durations-min=5
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
COMPUTING := $(addprefix tests/integration/,worker kernels bridge feed_forward up bench fetch models served_models calibration)

integration: setup  ## a real API server; real vLLM groups on the CPU
	@failed=0; for lanes in computing "waiting unhurried"; do ./.ci/lanes $$lanes || failed=1; done; exit $$failed

computing: setup  ## the integration tests that start vLLM or compile
	$(TESTS) $(LONGEST) $(TWO_FILES) $(COMPUTING) -m "not feed_forward_matrix and not unhurried"

unhurried: setup  ## the integration tests without limits of seconds, at a tenth of the priority
	./.ci/idle $(PYTEST) $(LONGEST) tests/integration -m "unhurried and not served_models_matrix"

waiting: setup  ## the integration tests that mostly wait: for an API server, for time-outs
	@$(BIN)/python -m tests.cluster build
	$(TESTS) $(LONGEST) $(TWO_FILES) tests/integration -m "not gang_schedulers and not many_namespaces and not every_request and not unhurried" \
	  $(COMPUTING:%=--ignore=%)

programs: setup  ## builds the programs of the test cluster ahead of the tests that need them, at a tenth of the priority
	@./.ci/idle $(BIN)/python -m tests.cluster build

images: need-root setup  ## the same with the images of this tree
	@./.ci/idle $(BIN)/python -m tests.cluster images

need-root:
	@if [ "$$(id -u)" != 0 ]; then \
	  echo "make $(MAKECMDGOALS) starts a real Kubernetes node (containerd, kubelet, network name spaces) and must be" >&2; \
	  echo "root: run it as root, or run the rest with: make check integration" >&2; exit 1; fi
.PHONY: need-root

cluster-tests: need-root setup  ## the test cluster's own tests, once for each state of tests/cluster; root
	@$(BIN)/python -m tests.cluster tested || { \
	  $(BIN)/python -m tests.cluster build node && $(BIN)/python -m tests.cluster images && \
	  $(PYTEST) tests/cluster/tests && $(BIN)/python -m tests.cluster tested --record; }

nodes: cluster-tests e2e
.PHONY: computing unhurried waiting cluster-tests nodes programs images

feed-forward: setup  ## 21 architectures with feed-forward ranks on CPUs: the tokens of transformers
	$(PYTEST) tests/integration/feed_forward -m feed_forward_matrix
.PHONY: feed-forward

models: setup  ## attention of every kind and weights of every format on two CPU pods: the tokens of stock vLLM
	$(PYTEST) $(LONGEST) tests/integration/served_models
.PHONY: models

gangs: setup  ## groups under Kueue, Volcano, coscheduling and kube-schedulers, which it builds; root
	@$(BIN)/python -m tests.cluster build gangs
	$(PYTEST) tests/integration/scheduling -m gang_schedulers
.PHONY: gangs

routes: need-root setup  ## two groups behind Envoy, an endpoint picker and KEDA's interceptor, which it builds; root
	@$(BIN)/python -m tests.cluster build routes
	@$(BIN)/python -m tests.cluster images
	$(PYTEST) tests/routes
.PHONY: routes

e2e: need-root setup  ## a real Kubernetes node with images of this tree; root
	@$(BIN)/python -m tests.cluster build node
	@$(BIN)/python -m tests.cluster images
	$(TESTS) $(LONGEST) tests/e2e -m "not every_fault"

faults: setup  ## every row of the fault matrix, on two real nodes; OUT=DIR keeps what was measured; root
	@$(BIN)/python -m tests.cluster build
	@$(BIN)/python -m tests.cluster images
	$(PYTEST) tests/e2e/faults
.PHONY: faults

cluster: setup  ## a real single-node Kubernetes with our images, until `make cluster-down`; root
	@$(WORKER_VENV)/bin/python -m tests.models .models/small
	@$(BIN)/python -m tests.cluster up node --images --models .models

cluster-down:  ## stops what `make cluster` started
	@$(BIN)/python -m tests.cluster down
.PHONY: cluster-down

bench: setup  ## our CPU group against stock vLLM, in one run
	$(BIN)/python -m tests.bench.pipeline_vs_stock

# Reports missing requirements before it installs anything.
need-gpu:
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU' || \
	  { echo "make $(MAKECMDGOALS) needs an NVIDIA GPU: nvidia-smi found none" >&2; exit 1; }
setup-gpu: need-gpu
	@if [ -n "$(GPU_PYTHON)" ]; then $(GPU_RUN) -m vllm_heteroinfer.kernels.build >/dev/null; \
	else ./.ci/setup "$(PYTHON)" $(VENV) "" $(GPU_VENV); fi
.PHONY: need-gpu setup-gpu test-gpu bench-gpu churn

test-gpu: setup-gpu  ## on a machine with a GPU: the right tokens in every topology; two GPUs: more of them
	$(GPU_RUN) -m pytest tests/gpu

bench-gpu: setup-gpu  ## on a machine with a GPU: bridge, CPU kernels, offloading, metrics
	$(GPU_RUN) -m tests.bench.bridge_all_reduce
	$(GPU_RUN) -m tests.bench.cpu_linear --quick
	$(GPU_RUN) -m tests.bench.offload
	$(GPU_RUN) -m tests.bench.metrics_overhead

CHURN := --groups 200 --parallel 5 --modes Pipeline,Tensor
churn: setup  ## starts and ends 200 tiny CPU groups: none hangs or leaves anything behind
	$(BIN)/python -m tests.bench.churn $(CHURN)

SOAK := --seconds 3600 --resources 50 --real
soak: setup  ## an hour of deleted pods and API server crashes: all groups are Ready again, nothing leaks; root
	@$(BIN)/python -m tests.cluster build node
	$(BIN)/python -m tests.soak $(SOAK)
.PHONY: soak

SCALE := --resources 1000 --idle-seconds 600 --write docs/contributor/scale.md
scale: setup  ## 1,000 resources of 4 pods on kwok nodes: time, memory, silence, restart; root
	@$(BIN)/python -m tests.cluster build control-plane
	$(PYTEST) -s tests/integration/operator -m many_namespaces
	$(BIN)/python -m tests.scale $(SCALE)

SPECS := --count 10000
specs: setup  ## 10,000 random resources against models, CRD, planner, manifests and a real API server
	@$(BIN)/python -m tests.cluster build control-plane
	$(BIN)/python -m tests.integration.specs $(SPECS)
CORNERS := --count 1000
corners: need-root setup  ## 1,000 random resources on a real API server, each struck by a random fault; root
	@$(BIN)/python -m tests.cluster build
	$(BIN)/python -m tests.corners $(CORNERS)
	$(PYTEST) tests/integration/operator/test_status_first.py -m every_request
.PHONY: scale specs corners

dashboards: setup  ## the chart's dashboards from their definitions, and their pictures of a group that serves
	$(BIN)/python -m charts.dashboards
	@$(BIN)/python -m tests.cluster build
	$(BIN)/python -m tests.watching
.PHONY: dashboards

lock: setup  ## newest allowed versions into the pinned files
	@./.ci/lock $(BIN)/uv

clean:  ## environments and caches of this tree; the cache of models and tools stays
	rm -rf $(VENV) $(WORKER_VENV) $(GPU_VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis
