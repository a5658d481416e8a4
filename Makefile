# From nothing: `make demo` shows what it does, `make test` runs the suite. Before a commit: `make check`. Each makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt
TESTS ?=
PYTEST := $(BIN)/python -m pytest
ALL_CORES := -n auto --maxprocesses 8 --dist worksteal
OLDEST := .venv-oldest
TORCH_ALONE := amp autograd claims compile config conversion cost func kept layer memory meter monitor noise padding peak producer rest_config rest_conversion results sharing storage torch_private checkpoint toy_kind
# What docs/compatibility.md says of torch 2.6: no mask in a compiled graph, and graphs made again at min_dim and max_dim.
NOT_ON_OLDEST := batch_sizes_do_not_recompile masks_do_nothing_to_compiled_layers_and_leave_nothing_behind \
	the_traced_size_is_the_real_one_for_every_number_of_rows

.PHONY: demo test test-slow test-oldest coverage check format clean

demo: $(INSTALLED)
	$(BIN)/backsketch demo

test: $(INSTALLED)
	$(PYTEST) $(ALL_CORES) $(TESTS)

test-slow: $(INSTALLED)
	$(PYTEST) -m slow $(TESTS)

# The oldest torch that is supported, and the tests that need nothing else; its own deprecations are no errors.
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.6.0 numpy pytest pytest-xdist hypothesis
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(OLDEST)/bin/python -m pytest $(ALL_CORES) -W default -k 'not inductor' \
		$(NOT_ON_OLDEST:%=--deselect tests/test_compile.py::test_%) $(TORCH_ALONE:%=tests/test_%.py)

coverage: $(INSTALLED)
	$(PYTEST) $(ALL_CORES) --cov --cov-report=term --cov-report=xml $(TESTS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage* coverage.xml

# Reinstalls only when what is to be installed changes; the sources themselves are installed in place.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $(INSTALLED)
