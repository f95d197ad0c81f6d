# What people and CI both call.  Every target makes the environment it needs first.
#
#   make demo       a real server on a tiny model, every axis in one table
#   make test       the tests; those marked gpu are deselected, and so counted, without an NVIDIA GPU
#   make test-gpu   only the tests marked gpu
#   make soak       3,000 random requests and a canary among them; minutes
#   make csrc-check compile csrc/ for SM90 with a compiler from wheels; needs no GPU
#   make lint       ruff and mypy
#
# PYTHON names the interpreter to start from (3.11 or newer), VENV the environment to make, PYTEST
# further arguments for pytest, JOBS the processes that `make test` spreads test files over.

PYTHON ?= python3
VENV ?= .venv
PYTEST ?=
JOBS ?= $(if $(filter cpu,$(FLAVOUR)),2,0)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
FLAVOUR := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
INPUTS := requirements/$(FLAVOUR).txt requirements/test.txt pyproject.toml setup.py $(if $(filter cuda,$(FLAVOUR)),$(wildcard csrc/*))
# The stamp is named after what is installed, so a changed pin or entry point installs again.
STAMP := $(VENV)/.installed-$(FLAVOUR)-$(shell cat $(INPUTS) | sha256sum | cut -c1-16)

CUDA := build/cuda/.installed-$(shell cat requirements/csrc.txt | sha256sum | cut -c1-16)

.PHONY: demo test test-gpu soak csrc-check lint install clean

demo: $(STAMP)
	$(BIN)/vllm-invariant demo

test: $(STAMP) csrc-check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(if $(filter cpu,$(FLAVOUR)),-m "not gpu") $(PYTEST)

test-gpu: $(STAMP)
	@test $(FLAVOUR) = cuda || { echo "make test-gpu: nvidia-smi finds no NVIDIA GPU" >&2; exit 1; }
	$(BIN)/python -m pytest -m gpu $(PYTEST)

soak: $(STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m benchmarks.soak

csrc-check: $(STAMP) $(CUDA)
	CUDA_HOME=$(CURDIR)/build/cuda/nvidia/cu13 VLLM_INVARIANT_BUILD=1 \
	    $(BIN)/python setup.py --quiet build_ext --force --build-lib build/csrc

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(FLAVOUR),cpu)
	$(PIP) install --no-deps -r requirements/cpu.txt
	@# A CUDA build of torch needs libraries that its CPU build has not: see requirements/cpu.txt.
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $$(grep '^torch==' requirements/cpu.txt)
else
	$(PIP) install -r requirements/cuda.txt
endif
	$(PIP) install --no-deps -r requirements/test.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
ifeq ($(FLAVOUR),cpu)
	$(BIN)/python -m vllm_invariant.cpu_setup
endif
	rm -f $(VENV)/.installed-*
	touch $@

$(CUDA): | $(STAMP)
	rm -rf build/cuda
	$(PIP) install --no-deps --target build/cuda -r requirements/csrc.txt
	touch $@
