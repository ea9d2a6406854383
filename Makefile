# make demo    set up, then raw text to a trained MLSM model with a report (4 to 8 minutes on 2 cores)
# make test    set up, then lint, types and the tests of the fast lane (at most 5 minutes on 2 cores)
# make test-all  the same, then the slow lane: everything else that needs no GPU
# make docs    the documentation site, build/docs/index.html; a broken link or a missing docstring fails
# PYTHON=...   another interpreter; it gets its own environment, .venv-X.Y
# CORPUS=...   the demo on your own text (one sentence a line, blank lines between documents)
SHELL := /bin/sh
# Python compiles what is imported, once, and keeps it; pip would compile all packages, which takes a minute
export PYTHONDONTWRITEBYTECODE =

ifdef PYTHON
  VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  ifeq ($(VERSION),)
    $(error PYTHON=$(PYTHON) does not run)
  endif
  VENV ?= .venv-$(VERSION)
else
  VENV ?= .venv
endif
STAMP := $(VENV)/.installed
SLOW_STAMP := $(VENV)/.installed-slow
DEMO_DIR ?= demo
REPORT = $(firstword $(wildcard $(DEMO_DIR)/report.html) build/demo/report.html)
# test files that run at the same time, each with one thread: more threads do not speed up tiny models
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo docs test test-fast test-slow test-all lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt scripts/find_python.sh
	@rm -f $(STAMP)
	@python="$${PYTHON:-$(PYTHON)}"; [ -n "$$python" ] || python=$$(scripts/find_python.sh) || exit 1; \
	  [ -x $(VENV)/bin/python ] || { echo "setting up $(VENV) with $$python"; "$$python" -m venv $(VENV); }
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(VENV)/bin/python -m pip install --no-compile --progress-bar off -q -e '.[test]'
	$(VENV)/bin/python -m pip check
	$(VENV)/bin/mlsm doctor
	@touch $(STAMP)

# gradio is large, and only the slow lane opens its page
$(SLOW_STAMP): $(STAMP)
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(VENV)/bin/python -m pip install --no-compile --progress-bar off -q -e '.[test,explore]'
	@touch $(SLOW_STAMP)

demo: setup
	$(VENV)/bin/python examples/mlsm/demo.py --output $(DEMO_DIR) $(if $(CORPUS),--corpus '$(CORPUS)')

docs: setup $(REPORT)
	rm -rf build/docs
	REPORT=$(REPORT) $(VENV)/bin/sphinx-build -q -W --keep-going -c docs . build/docs
	@echo '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">' > build/docs/index.html
	@echo "the site: build/docs/index.html"

# the report on the site is that of the demo, or else of a demo with little text and few updates
build/demo/report.html: | setup
	$(VENV)/bin/python scripts/collect_corpus.py --output build/text --max-megabytes 0.6
	$(VENV)/bin/python examples/mlsm/demo.py --corpus build/text/train.txt --output build/demo \
	  --auxiliary-updates 100 --updates 20

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-fast: setup
	$(PYTEST) -m 'not slow and not gpu'

# both at once: mypy uses one core, and the tests often wait
test: setup
	$(MAKE) --no-print-directory -j 2 lint test-fast

test-slow: setup $(SLOW_STAMP)
	$(PYTEST) -m 'slow and not gpu' --durations 60

test-all: test test-slow

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(DEMO_DIR) build docs/reference dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
