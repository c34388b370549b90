# make install   virtual environment in .venv with everything needed, the embedded model included
# make demo      a corpus is built, the model served, prompts asked over HTTP, and methods compared
# make test      the tests
# make lint      ruff and mypy
#
# PYTHON              interpreter for .venv, 3.11 or newer (default: the first found)
# TORCH_INSTALL_ARGS  further pip options for installing torch, for instance the index of its CPU builds

VENV := .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INSTALL_ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: install demo test lint

install: $(STAMP)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml $(wildcard requirements/*) | $(VENV)/bin/python
	@TORCH_INSTALL_ARGS="$(TORCH_INSTALL_ARGS)" requirements/install.sh $(VENV)
	@touch $@

demo: install
	$(VENV)/bin/python -m eval_jobs demo

test: install
	$(VENV)/bin/python -m pytest

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
