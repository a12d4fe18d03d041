# `make demo` and `make test` are all that a fresh machine needs: each makes .venv when there is none.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# The versions that passed: all packages but torch, which TORCH chooses. Empty: the newest in range.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/pip $(if $(MAKE_TERMERR),,--quiet) --disable-pip-version-check install $(CONSTRAINTS:%=--constraint %)
STEPS ?= 240
PROGRAMS ?= 2000
MODULES ?= 2000
MUTANTS ?= 2000
XDSL ?= xdsl
JOBS ?= 2
FAULTS ?= 200
# One more than two cores: a test that waits for ranks leaves its core to another.
WORKERS ?= 3
DIGITS := docs/examples/digits.npz

.PHONY: demo site test test-ci test-gpu test-all test-xdsl mutants programs modules fuzz faults lint constraints clean

# torch is named before the project, so that its range does not draw a newer (and larger) build.
# The tables of the grammar are computed once here, and not by each process that tests.
$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	@echo "Making $(VENV): $(TORCH), shardir, and the packages of its examples and tests; minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[torch,examples,lsp,test,lint]"
	$(BIN)/python -c "from shardir.syntax.parser import default_parser; default_parser()"
	touch $@

$(DIGITS): docs/examples/make_digits.py $(VENV)/ready
	$(BIN)/python $<

demo: $(DIGITS)  ## compile docs/examples/digits.ir, train it on 4 ranks, compare with one device
	$(BIN)/shard-run docs/examples/digits.ir --steps $(STEPS) --check

$(VENV)/docs-ready: $(VENV)/ready
	$(PIP) --editable ".[docs]"
	touch $@

site: $(VENV)/docs-ready  ## the documentation as a site in build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --output-format min-text --python-interpreter-path $(BIN)/python

test: lint $(DIGITS)  ## the checks of the source, then every test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-ci: $(VENV)/ready  ## what CI runs besides: benchmarks in smoke form, an extension from wheels, frameworks
	SHARDIR_TESTS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal test/tools/test_bench.py test/project/test_extension.py test/run/test_frameworks.py

test-all:  ## the long forms of the tests: all pairs, all layouts, all types (docs/contribute/testing.md)
	SHARDIR_TESTS=all $(MAKE) test

test-gpu: $(VENV)/ready $(DIGITS)  ## test/run on the GPUs of this machine, with a .venv made by TORCH=torch
	SHARDIR_TEST_DEVICE=cuda NVIDIA_TF32_OVERRIDE=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal test/run

test-xdsl: $(VENV)/ready  ## texts, ops and passes with another xDSL: the newest, or XDSL=xdsl==0.72.0
	rm -rf build/xdsl
	$(BIN)/pip --quiet --disable-pip-version-check install --no-deps --target build/xdsl "$(XDSL)"
	PYTHONPATH=build/xdsl OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal test/build test/compat test/dialects test/passes test/pipelines test/syntax test/frontends/test_generic_stablehlo.py

mutants: $(VENV)/ready  ## plant errors, each of which the tests of its package must catch
	$(BIN)/python test/mutants/run.py --jobs $(JOBS)

programs: $(VENV)/ready  ## random programs of all ops, others each time
	PROGRAMS=$(PROGRAMS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 test/passes/test_random_programs.py

modules: $(VENV)/ready  ## random modules of torch, trained as torch does; SEED=7 for the same again
	OMP_NUM_THREADS=1 $(BIN)/python test/modules.py --modules $(MODULES) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/ready  ## damaged variants of the examples: a message or a program, in time and memory
	OMP_NUM_THREADS=1 $(BIN)/python test/mutations.py --mutants $(MUTANTS) --jobs $(JOBS)

faults: $(VENV)/ready  ## commands under signals, full disks, closed pipes and odd environments
	OMP_NUM_THREADS=1 $(BIN)/python test/disturbances.py --cases $(FAULTS) --jobs $(JOBS)

constraints:  ## test the newest versions in range in an environment of its own, and record them
	$(MAKE) VENV=.venv-newest CONSTRAINTS= site test
	(sed -n '/^#/p' constraints.txt; .venv-newest/bin/pip --disable-pip-version-check freeze --exclude-editable --exclude torch) > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf .venv-newest

clean:
	rm -rf $(VENV) build *.egg-info
