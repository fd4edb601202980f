# Every target works in a fresh checkout: it needs Python 3.10 to 3.13 with venv, and a package registry.
#
#   make timeline    predict one decode step for one user; files in k3sim-out/
#   make test        the tests but the slow ones: two minutes on two cores
#   make test-slow   the slow ones: whole steps in many layouts, fits, builds of all kernels, every documented command
#   make kernel-tools  add torch and CUTLASS, with which make test also checks and builds the kernels; no GPU needed
#   make lint        style
#   make typecheck   build the wheel, check the types of its package
#   make wheel       the same installation, its size and contents checked, the default command run from it
#   make docs        only the documented commands and examples
#   make bench       start-up, speed, memory, repeatability and the kernels against their budgets
#   make readme      rewrite docs/measured.md, and what README.md and docs/accuracy.md show of a run (the picture needs chromium)
#   make clean       remove what the targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEEL_BIN := build/installed/bin
BENCH_PYTHON ?= $(BIN)/python
PIP_INSTALL := -m pip --disable-pip-version-check --quiet install
# One worker a core; a file stays with one worker, for what its tests share.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := timeline
.PHONY: timeline test test-slow kernel-tools lint typecheck wheel docs bench readme picture clean

timeline: $(VENV)/.base
	$(BIN)/k3sim timeline --concurrency 1

test: $(VENV)/.test
	$(PYTEST) -m 'not slow'

test-slow: $(VENV)/.test
	$(PYTEST) -m slow

kernel-tools: $(VENV)/.kernel-tools

lint: $(VENV)/.test
	$(BIN)/ruff check .

docs: $(VENV)/.test
	$(BIN)/python -m pytest tests/test_documentation.py

bench: $(if $(filter $(BIN)/%,$(BENCH_PYTHON)),$(VENV)/.base)
	$(BENCH_PYTHON) tools/bench.py

readme: picture
	$(BIN)/python -m k3sim.calibrate.compare.kernel_errors
	$(BIN)/python tools/readme_output.py
	$(BIN)/python tools/measurements_tables.py

picture: $(VENV)/.base
	$(BIN)/python tools/picture.py

wheel: build/installed/.wheel
	$(WHEEL_BIN)/python tools/check_installed_wheel.py

# Types are checked on the package of the wheel: in the tree its folders do not lie under k3sim.
typecheck: build/typed/.wheel $(VENV)/.test
	cd build/empty && MYPYPATH=../typed ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p k3sim

clean:
	rm -rf $(VENV) build k3sim-out k3sim.egg-info

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo "no virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python $(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.kernel-tools: $(VENV)/.test
	$(BIN)/python $(PIP_INSTALL) --editable '.[test,test-kernels]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python $(PIP_INSTALL) --editable '.[test]'
	touch $@

# build/lib is removed first: a wheel takes in whatever an earlier build left there.
build/installed/.wheel: $(shell git ls-files '*.py' '*.json' '*.js' '*.css' pyproject.toml 2>/dev/null)
	rm -rf build/lib build/installed build/dist build/empty
	mkdir -p build/empty
	$(PYTHON) -m venv build/installed
	$(WHEEL_BIN)/python -m pip --disable-pip-version-check --quiet wheel --no-deps --wheel-dir build/dist .
	$(WHEEL_BIN)/python $(PIP_INSTALL) build/dist/k3sim-*.whl
	touch $@

build/typed/.wheel: build/installed/.wheel
	rm -rf build/typed
	$(WHEEL_BIN)/python $(PIP_INSTALL) --no-deps --target build/typed build/dist/k3sim-*.whl
	touch $@
