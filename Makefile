# Each target does all its own set-up, on a machine with Python 3.11 or later and nothing else.
#   make demo    the main job, on the network that is shipped in the package
#   make test    checks, tests, the README's examples: the gate, which CI runs
#   make quick   the tests that need no browser, no process and no compiler
#   make full    the gate with more examples and larger models, inner doctests, mutants
#   make check   ruff and mypy alone
#   make mutants change the source in 60 places, and see whether a test notices
#   make bench   the table of ratios, with rivals
#   make docs    the documentation as a site, in site/
#   make dist    the wheel and the sdist, in dist/: built twice, checked, installed and used bare
#   make extras  the same, and each extra installed alone and used
#   make matrix  a selection of the tests on other versions of torch, Python and NumPy
#   make types   how much of the public interface has known types, by pyright
#   make clean   remove what the others made

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
DIST_VENV := .venv-dist
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

# A worker on each core takes whole files: what a file compiles, starts or loads is made once. One
# more costs as much as it saves; past eight, the longest file is what is waited for.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# Tests start hundreds of processes: bytecode is written, so that each need not compile all sources.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses=$(JOBS) --maxprocesses=8 \
  --dist=loadfile --no-loadscope-reorder

.PHONY: demo test quick full check mutants bench docs dist extras matrix types clean
.DEFAULT_GOAL := test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch goes in first and alone: by its pin, so that no other package draws in another build of it.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) torch
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[cli]"
	touch $@

$(VENV)/.check: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[cli,check]"
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[test,check]"
	touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[docs]"
	touch $@

$(BENCH_VENV)/.bench: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) torch
	$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[bench]"
	touch $@

$(DIST_VENV)/.dist: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install $(PIP_FLAGS) $$(sed -n 's/^release = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',"')
	touch $@

demo: $(VENV)/.demo
	$(VENV)/bin/hookline demo --out runs/demo
	@echo
	@echo "The documentation: docs/recording.md and beside it, and by task docs/recipes.md."
	@echo "As a site, in the browser and without a network: make docs, then open site/index.html."

define RUFF
$(VENV)/bin/ruff check .
$(VENV)/bin/ruff format --check .
endef

# The page is tested in a real Chromium, Debian's: the one without windows, which is quicker.
define BROWSER
command -v chromium-headless-shell >/dev/null || \
  { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq chromium-headless-shell; } || \
  command -v chromium >/dev/null
endef

check: $(VENV)/.check
	$(RUFF)
	$(VENV)/bin/mypy

# mypy is one of the tests: it takes a minute, in which the other workers go on.
test: $(VENV)/.test
	$(BROWSER)
	$(RUFF)
	$(PYTEST)

quick: $(VENV)/.test
	$(PYTEST) -m "not compiles and not processes and not slow"

full: $(VENV)/.test
	$(BROWSER)
	$(RUFF)
	$(PYTEST) --hypothesis-profile=full
	$(VENV)/bin/python tests/mutants.py

mutants: $(VENV)/.test
	$(VENV)/bin/python tests/mutants.py

bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks

docs: $(VENV)/.docs
	$(VENV)/bin/python docs/_site/build.py

dist: $(DIST_VENV)/.dist
	$(DIST_VENV)/bin/python release/dist.py
	$(PYTHON) release/install.py

extras: $(DIST_VENV)/.dist
	$(DIST_VENV)/bin/python release/dist.py
	$(PYTHON) release/install.py --extras

# The environments that are in .venv-matrix/ are used as they are.
matrix:
	$(PYTHON) release/matrix.py

# pyright looks for the package where the first python of the path does.
types: $(DIST_VENV)/.dist $(VENV)/.test
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(DIST_VENV)/bin/python release/typed.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(DIST_VENV) .venv-matrix runs dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
