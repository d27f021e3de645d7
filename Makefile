# Every target sets up .venv by itself; a machine needs Python 3.11 or later and make.
# PYTHON=/path/to/python chooses the interpreter, JOBS=n the number of test processes.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
JOBS ?= auto
SUITE ?= quick
PIP := $(BIN)/python -m pip --disable-pip-version-check
NEWEST := $(shell sed -n 's/^NEWEST = "\(.*\)"/\1/p' src/fuseplan/backends/triton/versions.py)
NEWEST_TRITON := $(VENV)/triton-$(NEWEST)

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/ready-run ## run the main job: 21 fused plans, each beside its operators one at a time, and a model
	@$(BIN)/fuseplan demo

test: $(VENV)/ready-dev $(NEWEST_TRITON)/ready ## run the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check: $(VENV)/ready-dev ## lint, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy --strict

format: $(VENV)/ready-dev ## rewrite the code as `make check` wants it
	@$(BIN)/ruff check --fix --unsafe-fixes
	@$(BIN)/ruff format

bench: $(VENV)/ready-peers ## measure a suite against the other libraries (SUITE=quick)
	@$(BIN)/fuseplan bench $(SUITE)

docs: $(VENV)/ready-run ## write the reference and a stub from the code, the pages of figures from recorded results
	@$(BIN)/python -m docs.pages.reference docs
	@$(BIN)/python -m docs.pages.miopen_stub src/fuseplan/miopen/__init__.pyi
	@$(BIN)/python -m benchmarks.report.measured benchmarks/results docs/measured.md
	@$(BIN)/python -m benchmarks.report.versions benchmarks/results docs/versions.md
	@$(BIN)/python -m benchmarks.report.published benchmarks/results docs/published.md
	@$(BIN)/python -m docs.pages.supported docs
	@$(BIN)/python -m docs.pages.miopen docs
	@$(BIN)/python -m benchmarks.report.speed benchmarks/results docs/speed.md

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "fuseplan needs Python 3.11 or later; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# The stamps: made once, made again when pyproject.toml changes.
$(VENV)/ready-run: pyproject.toml | $(BIN)/python
	@echo "==> installing fuseplan with its command line and charts, and ONNX Runtime (about 150 MB to fetch)"
	@$(PIP) install -e '.[cli,plot,onnx]' onnxruntime
	@touch $@

# torch goes first: what depends on it then finds it there, and takes no other build of it.
$(VENV)/ready-dev: pyproject.toml | $(BIN)/python
	@echo "==> installing torch, which the tests compare with (the largest part: some minutes)"
	@$(PIP) install "$$(sed -n 's/^ *"\(torch==[0-9.]*\)",/\1/p' pyproject.toml)"
	@echo "==> installing fuseplan and what its tests need"
	@$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/ready-run

# Beside the Triton that is imported, which is the oldest, tests compile with the newest.
$(NEWEST_TRITON)/ready: | $(BIN)/python
	@echo "==> installing the newest Triton that is supported"
	@rm -rf $(NEWEST_TRITON)
	@$(PIP) install --no-deps --target $(NEWEST_TRITON) triton==$(NEWEST)
	@touch $@

$(VENV)/ready-peers: $(VENV)/ready-dev
	@echo "==> installing the libraries to compare with"
	@$(PIP) install -e '.[dev,peers]'
	@touch $@
