# Set-up goes into .venv and is skipped when nothing changed.
#   make demo     show the demo: conversations, lending and a restart, then stop
#   make serve    start configs/embedded.yaml and stay up
#   make test     everything that .ci/run checks
#   make fuzz, make sanitize, make mutants    see CONTRIBUTING.md
PYTHON ?= python3
# The default is a build that brings no CUDA packages; on a GPU machine: make setup TORCH=torch
TORCH ?= torch==2.13.0
CONFIG ?= configs/embedded.yaml
VENV := .venv
BIN := $(VENV)/bin

CPP_SOURCES := $(shell find cpp_ext -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt) CMakeLists.txt
SETUP_INPUTS := pyproject.toml $(CPP_SOURCES)

.PHONY: setup demo serve test check unit fuzz sanitize mutants format clean

setup: $(VENV)/.ready

$(VENV)/.deps: pyproject.toml
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH) and the other packages (minutes on the first run)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake ninja "scikit-build-core>=0.11" "nanobind>=2.7"
	@touch $@

$(VENV)/.ready: $(VENV)/.deps $(SETUP_INPUTS)
	@echo "building the C++ extension (minutes on the first run)"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[test,dev]"
	@# For the axe-core in it, which tests of the page need; Playwright, on which it depends, is not used.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "axe-playwright-python>=0.1.8"
	@touch $@

demo: setup
	@$(BIN)/swiftkv demo $(CONFIG)

serve: setup
	@$(BIN)/swiftkv serve $(CONFIG)

test: check unit

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py
	MYPYPATH=benchmarks/gpu $(BIN)/mypy benchmarks/gpu/*.py tests/gpu
	$(BIN)/clang-format --dry-run --Werror $$(find cpp_ext tests/core/fuzz tests/core/parts -name '*.cpp' -o -name '*.h')

# Two processes, because the tests that start nodes wait more than they compute.
unit: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# How long to fuzz; see tests/core/fuzz/run.py.
FUZZ_SECONDS ?= 900

fuzz: setup
	$(BIN)/python tests/core/fuzz/run.py --seconds $(FUZZ_SECONDS)

sanitize: setup
	$(BIN)/python -m pytest -m slow tests/core/test_sanitized.py

mutants: setup
	$(BIN)/python -m pytest -m slow -s tests/core/mutants

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find cpp_ext tests/core/fuzz tests/core/parts -name '*.cpp' -o -name '*.h')

clean:
	rm -rf build $(VENV)
