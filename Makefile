# make demo    simulated replicas, the gateway and a chat load, on a fresh machine
# make test    linters, types and all tests that need no real vLLM
# make test-vllm   the same gateway in front of two real vLLM replicas (FOREBAY_VLLM_DIR or FOREBAY_VLLM_URLS)
# make bench-vllm  pacing in front of real replicas, judged by the clock: wants a quiet machine
# make compiled    core and data path compiled into .compiled (needs a C compiler), and their tests run against that
# make image   the container image, with podman or docker: IMAGE (forebay), ENGINE, IMAGE_ARGS for the engine's build
# make wheel   the same as a wheel for this platform and Python: dist/forebay-*.whl
# make bench   CPU per request and per streamed event, beside vllm-router in the same run; compiled where there is a
#              C compiler, BUILD=plain: as it is

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 2
IMAGE ?= forebay
IMAGE_ARGS ?=
ENGINE ?= $(firstword $(notdir $(shell command -v podman 2>/dev/null || command -v docker 2>/dev/null)))
COMPILED := .compiled
BUILD ?= compiled

.PHONY: demo test test-vllm compiled image wheel bench bench-vllm lint format clean

$(VENV)/.demo: pyproject.toml
	@echo 'setting up $(VENV): half a minute to some minutes, by the network'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[loadtests]'
	touch $@

$(VENV)/.test: pyproject.toml
	@echo 'setting up $(VENV): half a minute to some minutes, by the network'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/forebay demo $(DEMO_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m 'not vllm' -n $(TEST_JOBS) --dist loadfile $(TEST_ARGS)

test-vllm: $(VENV)/.test
	$(BIN)/python -m pytest -m 'vllm and not timing' tests/vllm $(TEST_ARGS)

bench-vllm: $(VENV)/.test
	$(BIN)/python -m pytest -m timing tests/vllm $(TEST_ARGS)

# a folder of its own, so that nothing of it can come from anywhere else: sources, what is compiled of them, tests
compiled: $(VENV)/.test
	$(BIN)/python deploy/compile.py --must $(COMPILED)
	rm -rf $(COMPILED)/tests $(COMPILED)/deploy && cp -r tests deploy $(COMPILED)/
	cd $(COMPILED) && FOREBAY_BUILT=compiled $(abspath $(BIN))/python -m pytest --rootdir . -m 'not plain' tests/policies tests/stories \
	  tests/gateway -n $(TEST_JOBS) --dist loadfile $(TEST_ARGS)

wheel: $(VENV)/.test
	$(BIN)/python deploy/compile.py --must $(COMPILED)
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist $(COMPILED)

# podman's own format has no health checks; docker knows no other
image:
	@test -n '$(ENGINE)' || { echo 'make image needs podman or docker, and neither is on the PATH; ENGINE=... names another' >&2; exit 1; }
	$(ENGINE) build $(if $(findstring podman,$(ENGINE)),--format docker) -t $(IMAGE) $(IMAGE_ARGS) -f deploy/Containerfile .
	$(ENGINE) run --rm $(IMAGE) --version
	$(ENGINE) images $(IMAGE)

ifeq ($(BUILD),plain)
bench: $(VENV)/.demo
	$(BIN)/python -m loadtests.bench $(BENCH_ARGS)
else
bench: $(VENV)/.test
	$(BIN)/python deploy/compile.py $(COMPILED)
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(COMPILED)) $(BIN)/python -m loadtests.bench $(BENCH_ARGS)
endif

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(COMPILED) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
