# Every target sets up what it needs: only make and Python 3.11 or newer have to be there.
#
# The plain commands install torch from the Python package index, which on Linux x86-64 is a CUDA
# build of several GB. For a CPU build take pip's arguments from the "get started" page of
# pytorch.org:
#     make quickstart TORCH_ARGS="--index-url <address of the CPU wheels>"
# Another version: make quickstart TORCH=torch==2.12.0

# The first of these that is new enough is used; `make PYTHON=/path/to/python test` names one.
PYTHON ?= python3 python3.11 python3.12 python3.13
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
# More arguments for `test` (ARGS="-m 'not slow'"), `quickstart` and `interop`.
ARGS ?=
# Processes that `test` runs in, one thread each.
WORKERS ?= 2
# For `bench` and `interop`.
TARGET ?= targets/smollm2-135m
HEAD ?=
PROMPTS ?=

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: help quickstart test check bench interop clean FORCE

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

quickstart: $(STAMP) ## fetch a target, train two draft heads, decode losslessly, print the table
	$(RUN) -m scripts.quickstart $(ARGS)

test: $(STAMP) ## fetch the real target, run all tests
	$(RUN) -m scripts.fetch_target smollm2-135m
	$(RUN) -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

check: $(STAMP) ## lint, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(STAMP) ## race transformers' speculative decoding: make bench PROMPTS=<file> [HEAD=<folder>]
	@test -n "$(PROMPTS)" || \
	  { echo 'usage: make bench PROMPTS=<file.jsonl> [HEAD=<trained head>] [TARGET=$(TARGET)]' >&2; exit 2; }
	$(RUN) -m scripts.benchmark --target $(TARGET) --prompts $(PROMPTS) $(ARGS)
	$(if $(HEAD),$(RUN) -m scripts.evaluate --target $(TARGET) --head $(HEAD) --prompts $(PROMPTS))

interop: $(STAMP) ## exports in the programs they are for: make interop ARGS='--head eagle3=<trained head>'
	$(RUN) -m interop --target $(TARGET) $(ARGS)

clean: ## remove caches and build files; .venv, targets/ and outputs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# An explicit TORCH or TORCH_ARGS installs again, so that it is never silently without effect.
ifneq ($(origin TORCH) $(origin TORCH_ARGS),file file)
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml
	@found=; for python in $(PYTHON); do \
	  if $$python -c '$(NEW_ENOUGH)' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: Python 3.11 or newer is needed; none of these is: $(PYTHON)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 1; \
	fi; \
	if ! $(RUN) -c '$(NEW_ENOUGH)' 2>/dev/null || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  $$found -m venv --clear $(VENV) || \
	    { echo "error: $$found cannot make $(VENV) (on Debian: apt install python3-venv)" >&2; exit 1; }; \
	fi
	$(RUN) -m pip install "$(TORCH)" $(TORCH_ARGS)
	$(RUN) -m pip install -e ".[dev]"
	@touch $@
