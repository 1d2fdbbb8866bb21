# make demo: train a small network in PyTorch, with in-place modules and converted, and compare.
#   Builds for this machine's GPU alone, if it has one.
# make test: build, and run the tests except those marked slow; PYTEST_ADDOPTS="-m ''" runs
#   the slow tests too.
# make site: build the documentation as a site, build/site/index.html.
# make tables: write the tables of the documentation from benchmarks/results.
# make models: convert models of other libraries, and train them next to the originals:
#   90 minutes.
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
# Three stamps: torch and the tools to build; all that tests, lint, site and benchmarks need; and a
# build that suffices for the demo on this machine. Where all is installed, the demo uses that.
TORCH_INSTALLED := $(VENV)/.torch
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.demo
# Without --no-compile pip compiles all of torch's Python files, of which the demo imports a part.
INSTALL := $(VENV)/bin/pip install --no-compile

.PHONY: demo test models wheels tables site lint format clean

demo: $(DEMO_INSTALLED)
	$(VENV)/bin/python examples/demo.py

test: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest $(PARALLEL)

tables: $(INSTALLED)
	$(VENV)/bin/python benchmarks/report.py

site: $(INSTALLED)
	$(VENV)/bin/sphinx-build -W --keep-going -q -c docs . build/site

models: $(INSTALLED)
	$(VENV)/bin/pip install -q -e '.[models]' --no-build-isolation
	$(VENV)/bin/python benchmarks/bench_models.py

wheels:
	PYTHON=$(PYTHON) .ci/wheels

lint: $(INSTALLED)
	$(VENV)/bin/python benchmarks/report.py --check
	$(VENV)/bin/python .ci/glossary.py
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu*')
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu*')

$(TORCH_INSTALLED):
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(if $(findstring index-url,$(TORCH)),$(TORCH),'$(TORCH)')
	$(INSTALL) 'setuptools>=77' ninja numpy
	touch $@

$(INSTALLED): $(TORCH_INSTALLED) $(SOURCES)
	$(INSTALL) --no-build-isolation -e '.[test,demo,lint,site]'
	touch $@

# The environment decides what is built, if it says so: see docs/building.md.
$(DEMO_INSTALLED): $(TORCH_INSTALLED) $(SOURCES)
	@if [ -e $(INSTALLED) ]; then $(MAKE) $(INSTALLED); exit; fi; \
	if [ -z "$$FORCE_CPU$$FORCE_CUDA$$TORCH_CUDA_ARCH_LIST" ]; then \
	  if $(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	  then export TORCH_CUDA_ARCH_LIST=native; else export FORCE_CPU=1; fi; \
	fi; $(INSTALL) --no-build-isolation -e '.[demo]'
	touch $@

clean:
	rm -rf build dist *.egg-info inplace_ops/*.so $(TORCH_INSTALLED) $(INSTALLED) $(DEMO_INSTALLED)
