# `make run` and `make test` are all a newcomer needs; both make the .venv they use.

VENV   := .venv
PYTHON ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
WORKERS ?= 2

# pip's own progress on a terminal, nothing but errors in a log.
INSTALL = quiet=--quiet; if [ -t 1 ]; then quiet=; fi; $(BIN)/python -m pip install $$quiet \
	--disable-pip-version-check --constraint constraints.txt --editable

SPHINX = $(BIN)/python -m sphinx -q -n -W --keep-going -E -c docs -d build/pages

.DEFAULT_GOAL := help
.PHONY: help run test lint format bench lab notebooks docs browser install clean
MAKEFLAGS += --no-print-directory

help:  ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

run: $(STAMP)  ## run and verify examples/mlp.mdsl on a 2x2 mesh, showing what each device did
	@$(BIN)/meshdsl run examples/mlp.mdsl --mesh rows:2,cols:2 --layout hybrid --verify

test: $(STAMP)  ## the whole test suite
	@echo "running the tests on $(WORKERS) workers"
	@$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=10

lint: $(STAMP)  ## style, format and types, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## bring every file to the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## time what has to be fast
	@for file in $$(grep -l __main__ benchmarks/*.py); do name=benchmarks.$$(basename $$file .py); \
		echo "$$name"; $(BIN)/python -m $$name || exit 1; done

lab: $(STAMP)  ## open the notebooks in JupyterLab, installing it first
	@[ -x $(BIN)/jupyter-lab ] || { echo "installing JupyterLab"; $(INSTALL) '.[notebook]'; }
	@$(BIN)/jupyter-lab examples/notebooks

notebooks: $(STAMP)  ## execute the notebooks' scripts and write the notebooks anew
	@$(BIN)/python examples/notebooks/execute.py

docs: $(STAMP)  ## the site of all pages, in build/site; LINKS=1 asks for every address in them
	@$(SPHINX) . build/site
	@$(MAKE) browser
	@[ -z "$(LINKS)" ] || $(SPHINX) -b linkcheck . build/links
	@echo "open $(CURDIR)/build/site/index.html"

browser: $(STAMP)  ## the page that needs no installation, in build/site; it needs node and npm
	@$(BIN)/python -m docs.browser.build build/site

install: $(STAMP)  ## make .venv ready and do nothing else

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The newest Python that will do, unless PYTHON names one.
define FIND_PYTHON
python=; for name in $(PYTHON) python3.14 python3.13 python3.12 python3.11 python3 python; do \
	if "$$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then python="$$name"; break; fi; \
done; \
if [ -z "$$python" ]; then \
	echo "meshdsl needs Python 3.11 or newer with its venv module, and none was found." >&2; \
	echo "Install one (on Debian and Ubuntu python3-venv goes with it)," >&2; \
	echo "or name it: make PYTHON=/path/to/python3 ..." >&2; \
	exit 1; \
fi
endef

# A .venv whose Python has gone (an upgrade of the system's) is made anew.
ifeq ($(shell [ -x $(BIN)/python ] && echo there),)
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt
	@[ -x $(BIN)/python ] || { $(FIND_PYTHON); \
		echo "creating $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv --clear $(VENV); }
	@echo "installing torch, its friends and the tools of the tests into $(VENV)"
	@[ -e $@ ] || { \
		echo "the first time takes minutes, depending on the network: about 0.5 GB are downloaded,"; \
		echo "and a few GB on Linux where pip takes the torch wheel with the CUDA libraries"; }
	@$(INSTALL) '.[dev]'
	@touch $@
