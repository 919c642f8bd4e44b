# The commands of this repository. `make` lists them. Everything is installed into .venv of this checkout.
# Variables: PYTHON (an interpreter >= 3.11), PIP_FLAGS (more options for pip), ARGS (more options for the command), TORCH (cpu or cuda).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

export PYTHON ?=
PIP_FLAGS ?=
ARGS ?=
# PyTorch's build: cpu or cuda. The one with CUDA, some 3 GB, is for machines with an NVIDIA GPU.
TORCH ?= $(if $(shell command -v nvidia-smi),cuda,cpu)

VENV_PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
PROTOC := .venv/protoc/.installed
PROTO_FILES = protos/*/v1/*.proto
# Generated code is made by the oldest toolchain that we support (docs/decisions/0002).
PROTOC_TOOLCHAIN := grpcio-tools==1.76.0 grpcio==1.76.0 protobuf==6.31.1
# Builds packages, and compiles the CPU kernels for them (deploy/kernels.py); 100 MB that nothing else needs.
RELEASE_TOOLS := .venv/.release
# Builds the documentation site (mkdocs.yml); 60 MB that nothing else needs.
SITE_TOOLS := .venv/.site
COMPOSE ?= docker compose
# Node is optional: without it buf and the tests of Node clients are skipped, except where NEED_NODE or CI says true.
NODE_TOOLS := .venv/node/tools/.installed
NODE_EXAMPLE := .venv/node/example/.installed
NPM_FLAGS := --ignore-scripts --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-retry-mintimeout=1000
BUF := .venv/node/tools/node_modules/.bin/buf
BASELINE := protos/baseline.binpb
export NEED_NODE ?= $(filter true 1,$(CI))

# A virtual environment does not survive being moved or copied: made for another folder, it is made again.
ifneq ($(shell cat .venv/.checkout 2>/dev/null),$(CURDIR))
.venv/.checkout: FORCE
endif

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.PHONY: setup
setup: $(INSTALLED) $(PROTOC) ## install everything into .venv (once; instant when nothing changed)
	@:

.PHONY: FORCE
FORCE:

.venv/.checkout:
	@if [ -f $@ ]; then rm -rf .venv; fi; \
	found=""; \
	for python in $${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	[ -n "$$found" ] || { echo "Python 3.11 or newer is needed: make setup PYTHON=python3.11"; exit 1; }; \
	echo "making .venv with $$("$$found" --version)"; \
	"$$found" -m venv .venv || { echo "making .venv failed; on Debian and Ubuntu: apt install python3-venv"; exit 1; }; \
	printf '%s\n' "$(CURDIR)" > $@

$(INSTALLED): .venv/.checkout pyproject.toml constraints.txt quire/torch-cpu.txt
	@[ $(TORCH) = cuda ] || $(VENV_PYTHON) -m pip install $(PIP_FLAGS) --no-deps --retries 1 -c constraints.txt -r quire/torch-cpu.txt \
	  || { echo "PyTorch without CUDA could not be installed; to take the build with CUDA: make setup TORCH=cuda"; exit 1; }
	$(VENV_PYTHON) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[all,dev]'
	@touch $@

# In a folder of its own: grpcio-tools 1.76 wants protobuf 6, the services run with protobuf 7.
$(PROTOC): $(INSTALLED)
	$(VENV_PYTHON) -m pip install $(PIP_FLAGS) --no-warn-conflicts --upgrade --target .venv/protoc $(PROTOC_TOOLCHAIN)
	@touch $@

$(RELEASE_TOOLS): $(INSTALLED)
	$(VENV_PYTHON) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[release]'
	@touch $@

$(SITE_TOOLS): $(INSTALLED)
	$(VENV_PYTHON) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	@touch $@

# Packages of $(1) as pinned there. No Node or no registry: says so and leaves nothing, so that it is tried again.
define install-node-packages
	@rm -rf $(@D); mkdir -p $(@D); cp $(1)/package*.json $(@D); \
	if ! command -v npm > /dev/null; then echo "npm is not there: what needs Node is skipped"; \
	elif npm install --prefix $(@D) $(NPM_FLAGS); then touch $@; \
	else echo "npm could not install the packages of $(1): what needs them is skipped"; fi; \
	[ -f $@ -o -z "$(NEED_NODE)" ]
endef

$(NODE_TOOLS): tests/clients/package.json | .venv/.checkout
	$(call install-node-packages,tests/clients)

$(NODE_EXAMPLE): examples/node/package.json examples/node/package-lock.json | .venv/.checkout
	$(call install-node-packages,examples/node)

MACHINES ?= $(shell uname -m)

.PHONY: wheel
wheel: $(RELEASE_TOOLS) ## dist/: an installable wheel with the CPU kernels for this machine (MACHINES="x86_64 aarch64": for these)
	PYTHONPATH=kernels $(VENV_PYTHON) -m deploy.wheel $(MACHINES)

.PHONY: wheels
wheels: ## the same for x86_64 and aarch64
	@$(MAKE) wheel MACHINES="x86_64 aarch64"

.PHONY: release
release: $(RELEASE_TOOLS) ## dist/release: wheels, sdist, images where Docker runs, notes, checksums of the commit (docs/release.md)
	PYTHONPATH=kernels $(VENV_PYTHON) -m deploy.release $(ARGS)

.PHONY: demo
demo: setup ## start the three services with models/tiny, stream from them, print one trace, stop
	$(VENV_PYTHON) -m quire.demo $(ARGS)

.PHONY: quick
quick: setup ## the tests of pure packages: scheduler core, block manager, gateway; within a minute
	@$(VENV_PYTHON) -m tests.shares quick $(ARGS)

.PHONY: test
test: setup $(NODE_TOOLS) $(NODE_EXAMPLE) ## all tests but the heavy ones; 10 to 14 minutes on two slow cores (aim: 10)
	@$(VENV_PYTHON) -m tests.shares test $(ARGS)

.PHONY: test-long
test-long: setup $(SITE_TOOLS) $(NODE_TOOLS) $(NODE_EXAMPLE) ## the heavy versions
	@$(VENV_PYTHON) -m tests.shares long $(ARGS)

.PHONY: test-families
test-families: setup ## every causal language model class of transformers, tiny, against generate (ARGS=--write: also the page)
	$(VENV_PYTHON) -m tests.worker.families $(ARGS)

.PHONY: test-cuda
test-cuda: setup ## the kernels and the worker's engine on a CUDA device; skips without one
	QUIRE_TEST_DEVICE=cuda $(VENV_PYTHON) -m pytest tests/kernels tests/worker/engine $(ARGS)

.PHONY: test-compose
test-compose: setup ## docker-compose.yml in a real engine, with images made without a registry (needs root and Debian's apt)
	$(VENV_PYTHON) -m tests.compose $(ARGS)

.PHONY: test-release
test-release: setup $(RELEASE_TOOLS) ## make release, with images, twice from new clones in the same engine: the same bytes
	$(VENV_PYTHON) -m tests.compose --release

.PHONY: test-install
test-install: wheel ## that wheel in an empty environment: without extras, and serving its built-in model
	$(VENV_PYTHON) -m tests.install dist/quire-*_$(shell uname -m).whl $(ARGS)

.PHONY: test-container
test-container: wheel ## that wheel in a Debian with Python alone, without a network: seconds to the first token (needs root and Debian's apt)
	$(VENV_PYTHON) -m tests.install.container dist/quire-*_$(shell uname -m).whl $(ARGS)

.PHONY: test-upgrade
test-upgrade: wheel ## services of the last release replaced by that wheel's, one by one, under resumable streams (ARGS="--from TAG")
	$(VENV_PYTHON) -m tests.install.upgrade dist/quire-*_$(shell uname -m).whl $(ARGS)

.PHONY: test-cells
test-cells: wheel ## SGLang Model Gateway, then Envoy, in front of two cells: 10,000 requests; one is killed, drained, rolled, upgraded (ARGS="smg --requests N")
	$(VENV_PYTHON) -m tests.cells $(ARGS)

.PHONY: test-arm
test-arm: $(RELEASE_TOOLS) ## the kernel tests on an emulated aarch64 (needs qemu-user and Debian's apt)
	PYTHONPATH=kernels $(VENV_PYTHON) -m tests.aarch64 $(ARGS)

VLLM_TESTS ?= vllm-0.33.0/tests

.PHONY: vllm-tests
vllm-tests: setup ## vLLM's own HTTP tests (VLLM_TESTS: the folder of its sdist) against the built-in model
	$(VENV_PYTHON) -m tests.clients.vllm_tests $(VLLM_TESTS) $(ARGS)

.PHONY: soak
soak: setup ## random lives of the scheduler core for as long as you like; each run goes on with new seeds
	$(VENV_PYTHON) -m tests.soak $(ARGS)

.PHONY: check
check: setup buf ## ruff, mypy, import-linter, buf, freshness of generated code
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	PYTHONPATH=.:kernels .venv/bin/lint-imports
	$(VENV_PYTHON) -m pytest tests/repo/test_protos.py

# Its own environment: what it installs is no business of the services.
.PHONY: audit
audit: setup ## known vulnerabilities of what constraints.txt pins; needs an advisory service that can be reached
	$(VENV_PYTHON) -m tests.install.audit $(ARGS)

.PHONY: protos
protos: setup ## generate code from protos/, beside them
	PYTHONPATH=.venv/protoc $(VENV_PYTHON) -m grpc_tools.protoc -I . \
	  --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO_FILES)

.PHONY: buf
buf: $(NODE_TOOLS) ## the protos: style, format, and nothing of the released API broken
	@if [ -f $(NODE_TOOLS) ]; then $(BUF) lint && $(BUF) format --diff --exit-code && $(BUF) breaking --against $(BASELINE); \
	else echo "buf is skipped: its npm package is not installed (Node 20 or newer and npm are needed)"; [ -z "$(NEED_NODE)" ]; fi

.PHONY: release-protos
release-protos: $(NODE_TOOLS) ## at a release: what is public now may not be broken any more
	test ! -f $(BASELINE) || $(BUF) breaking --against $(BASELINE)
	$(BUF) build --exclude-source-info --output $(BASELINE) \
	  $(addprefix --type quire.inference.v1.,InferenceService AdminService)

.PHONY: requirements
requirements: setup ## docs/requirements.md, from the numbers that tests name
	$(VENV_PYTHON) -m tests.requirements --write

.PHONY: site
site: $(SITE_TOOLS) ## build/site: the documentation as web pages, from docs/ and the code (SITE_URL=https://...: where it will be)
	PYTHONPATH=.:kernels $(VENV_PYTHON) -m deploy.site $(ARGS)

.PHONY: site-serve
site-serve: $(SITE_TOOLS) ## build it and show it at http://127.0.0.1:8080 (ARGS="--port 0": any free port)
	PYTHONPATH=.:kernels $(VENV_PYTHON) -m deploy.site --serve $(ARGS)

.PHONY: bench
bench: setup ## start-up, scheduler core, memory, simulated run, load on models/tiny; results in benchmarks/results
	$(VENV_PYTHON) -m benchmarks.startup
	$(VENV_PYTHON) -m benchmarks.scheduler_core --running 32,256,1024 --verify --out benchmarks/results/scheduler-core.json
	$(VENV_PYTHON) -m benchmarks.memory --save
	$(VENV_PYTHON) -m benchmarks.simulated_stack
	$(VENV_PYTHON) -m benchmarks.load --up models/tiny --workload all --plot benchmarks/results/load-tiny.png $(ARGS)

PEERS ?= vllm openvino llamacpp

.PHONY: peers
peers: setup ## what Quire is compared with on a CPU (PEERS), each in .venv/peers/NAME; what cannot be installed is left out
	$(VENV_PYTHON) -m benchmarks.compare.install --pip-flags "$(PIP_FLAGS)" $(PEERS)

.PHONY: up
up: ## the three services in containers, with Jaeger, Prometheus and Grafana (docs/containers.md)
	$(COMPOSE) up --build --detach --wait $(ARGS)

.PHONY: down
down: ## stop the containers
	$(COMPOSE) --profile '*' down $(ARGS)
