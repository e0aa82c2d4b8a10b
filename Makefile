# Everything runs in its own virtual environment; the only things needed are Python 3.11, make and git.
#   make demo    set up, then FedAvg, LDA and FedProTIP on real handwritten digits, with a report
#   make test    set up, then lint, types and the tests
#   make coverage    the same tests with coverage, which takes half as long again
#   make test-all    set up with all extras, then the slow tests: large models, minutes each; optional packages
#   make bench   set up, then what it costs on this machine; make bench ARGS="task --quick" for some of it
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
EXTRAS := $(VENV)/.ready-extras
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test coverage test-all bench lint format clean
demo: $(READY)
	$(BIN)/fedprotip demo --out runs/demo

test: $(READY) lint
	$(BIN)/python -m pytest -m "not slow" -n 2

coverage: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n 2 --cov --cov-report=term

test-all: $(EXTRAS)
	$(BIN)/python -m pytest -m slow -n 2 --dist loadgroup

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedprotip needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	@touch $@

$(EXTRAS): $(READY)
	$(INSTALL) -e '.[dev,all]'
	@touch $@
