# Two commands: `make demo` shows Ingot on the pocket model, `make test` runs lint and the tests that need no GPU.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: install demo test quick-tests test-all lint gpu-test network-test clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Ingot needs Python 3.11 or newer, this is %s; set PYTHON=python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	OMP_WAIT_POLICY=passive $(VENV)/bin/python examples/demo.py

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The processes that tests start read the bytecode of Ingot, where it may be written.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# At the same time: mypy needs one core, and tests of processes leave some of theirs.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint quick-tests

quick-tests: $(STAMP)
	$(PYTEST) -m "not gpu and not slow and not network"

test-all: lint
	$(PYTEST) -m "not gpu and not network"

# Published models and data sets (docs/published.md): needs the Hugging Face hub, and for the 7B models a GPU.
network-test: $(STAMP)
	$(VENV)/bin/python -m pytest -m network tests/network

gpu-test: $(STAMP)
	$(VENV)/bin/python -m pytest -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache
