# make demo: train on real data and compare memory.
# make test: build, and run the tests except those marked slow; PYTEST_ADDOPTS="-m ''" runs
#   the slow tests too.
# make tables: write the tables of docs/ from benchmarks/results.
# make models: convert models of other libraries, and train them next to the originals; an hour.
# make wheels: build wheels for the CPU and for CUDA, and test them with several versions of Python
#   and torch.
# All targets except wheels set up $(VENV) first. TORCH names the torch to install, for example
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11

# All tests of a file run in one process, so that what they compile is compiled once. Each process
# has as many threads as there are cores, which must not wait busily for each other.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
INSTALLED := $(VENV)/.installed

.PHONY: demo test models wheels tables lint format clean

demo: $(INSTALLED)
	$(VENV)/bin/python benchmarks/demo.py

test: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest $(PARALLEL)

tables: $(INSTALLED)
	$(VENV)/bin/python benchmarks/tables.py

models: $(INSTALLED)
	$(VENV)/bin/pip install -q -e '.[models]' --no-build-isolation
	$(VENV)/bin/python benchmarks/bench_models.py

wheels:
	PYTHON=$(PYTHON) .ci/wheels

lint: $(INSTALLED)
	$(VENV)/bin/python benchmarks/tables.py --check
	$(VENV)/bin/python .ci/glossary.py
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(find csrc tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu*')
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(find csrc tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu*')

$(INSTALLED): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(if $(findstring index-url,$(TORCH)),$(TORCH),'$(TORCH)')
	$(VENV)/bin/pip install 'setuptools>=77' ninja numpy
	$(VENV)/bin/pip install --no-build-isolation -e '.[test,demo,lint]'
	touch $@

clean:
	rm -rf build dist *.egg-info inplace_ops/*.so $(INSTALLED)
