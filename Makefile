# `make demo` and `make test` set everything up by themselves in .venv; see `make help`.
#
#   PYTHON=python3.12   the interpreter the environment is made with (default: python3.11, python3 or python)
#   VENV=path           where the environment is or will be (default: .venv)
#   ENV_READY=1         install nothing: use VENV, where it is given, else PYTHON, as it is
#   N=1000              how many calls the fuzz compares
#   TRANSFORMERS=5.25.0 the release that `make newest` tests (default: the newest that pip finds)
#   WITH="..."          packages that the release needs in other versions than the environment's
#   PART=2, OUT=path    which ten minutes of `make gpu` (default: 1), and the folder of its results
#   TORCH=cpu|default   PyTorch's CPU build, or the build that pip takes by itself (default: by machine)
#   ARGS="..."          further arguments for the command of demo, bench, bench-ops, paper, plot, fuzz; PYTEST="..." for the tests

PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
TORCH ?= $(shell if nvidia-smi -L >/dev/null 2>&1 || [ "$$(uname -s)" != Linux ]; then echo default; else echo cpu; fi)
PYTEST ?= -n auto --maxprocesses=8 --dist loadfile --no-loadscope-reorder
OLDEST := 5.17.0
FAIRSEQ := fairseq==0.12.2
N ?= 1000
PART ?= 1

# `origin` tells whether VENV was named by the user or comes from the line above.
ifndef ENV_READY
PY = $(VENV)/bin/python
else ifeq ($(origin VENV),file)
PY = $(PYTHON)
else
PY = $(VENV)/bin/python
endif
OLDEST_DIR = $(abspath $(VENV)/oldest)
NEWEST_DIR = $(abspath $(VENV)/newest)
READY := $(if $(ENV_READY),,$(VENV)/.ready)
OLDEST_READY := $(if $(ENV_READY),,$(OLDEST_DIR)/.ready-$(OLDEST))
# Tests whose result depends on the release of transformers; those of graphs and C take long and test the same code.
OF_TRANSFORMERS := tests/models tests/patches/transformers tests/unilm \
  --ignore=tests/models/test_graphs.py --ignore=tests/models/test_in_c.py
SANITIZED = build/sanitized
# libstdc++ too: AddressSanitizer looks for its __cxa_throw when the process starts.
SANITIZE = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 FASTGEN_OPS=native $(RUN) -m tests.native_fuzz $(SANITIZED)
RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY)
TORCH_PIN = $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-every newest cuda test-gpu gpu check docs tables bench bench-ops coverage-of-families paper plot fuzz sanitize clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18
	@sed -n 's/^#  \( [A-Z_]*=\)/ \1/p' Makefile

demo: $(READY)  ## translate real sentences unpatched and patched, side by side (about 4 minutes on 2 cores)
	$(RUN) -m fastgen demo $(ARGS)

test: $(READY)  ## a sample of the tests that covers every area (about 10 minutes on 2 cores)
	$(RUN) -m pytest -m "not slow" $(PYTEST)

# On the oldest transformers the sample is enough: what a release changes lies in one file, patches/transformers/compat.py.
test-all: $(READY) $(OLDEST_READY)  ## all tests, with each value of each parameter, then a sample on the oldest transformers
	$(RUN) -m pytest -m "not combination" $(PYTEST)
	@if [ -d $(OLDEST_DIR) ]; then export PYTHONPATH=$(OLDEST_DIR) EXPECT_TRANSFORMERS=$(OLDEST); set -x; \
	  $(RUN) -m pytest -m "not slow" $(PYTEST) $(OF_TRANSFORMERS); \
	else echo "not tested on transformers $(OLDEST): $(OLDEST_DIR) is missing and ENV_READY=1 says to install nothing"; fi

test-every: $(READY)  ## all tests with every combination of their parameters (over an hour on 2 cores)
	$(RUN) -m pytest $(PYTEST)

newest: $(READY)  ## the tests that touch transformers, on the newest release or on TRANSFORMERS=5.25.0
	rm -rf $(NEWEST_DIR)
	$(PY) -m pip install --quiet --no-deps --target $(NEWEST_DIR) transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))
	$(if $(WITH),$(PY) -m pip install --quiet --target $(NEWEST_DIR) $(foreach package,$(WITH),'$(package)'))
	@version=$$($(RUN) -m tests.newest $(NEWEST_DIR)) || exit; \
	export PYTHONPATH=$(NEWEST_DIR) EXPECT_TRANSFORMERS=$$version; set -x; \
	$(RUN) -m pytest $(PYTEST) $(OF_TRANSFORMERS)

cuda: $(READY)
	@$(RUN) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no CUDA device")'

test-gpu: cuda  ## the tests that need a CUDA device
	$(RUN) -m pytest -m gpu

gpu: cuda  ## ten minutes of tests and benchmarks on a GPU: PART=1 (what to run first), 2 or 3, into OUT
	$(RUN) -m benchmarks.gpu --part $(PART) $(if $(OUT),--out '$(OUT)') $(ARGS)

check: $(READY)  ## ruff (format, lint), pyright, and the workflows of .github
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m pyright --pythonpath $(PY)
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/zizmor" --offline --quiet .github/workflows

docs: $(READY)  ## build the documentation's site into site/, without a network; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict  # with --quiet, --strict would see no warning

tables: $(READY)  ## write the tables of docs/ that are made from the code's records and from benchmarks/results
	$(RUN) docs/hooks/tables.py

bench: $(READY)  ## run the benchmarks, writing JSON to benchmarks/results
	$(RUN) -m benchmarks $(ARGS)

bench-ops: $(READY)  ## each operation against what runs without it, writing JSON to benchmarks/results
	$(RUN) -m benchmarks.ops $(ARGS)

coverage-of-families: $(READY)  ## how every family of transformers runs, for docs/families.md (about 10 minutes on 2 cores)
	$(RUN) -m benchmarks.coverage $(ARGS)
	$(RUN) docs/hooks/tables.py

paper: $(READY)  ## the tables and figures of the papers on this machine (under 30 minutes on 2 cores), writing JSON
	$(RUN) -m benchmarks.paper $(ARGS)

plot: $(READY)  ## draw the plots from that JSON alone
	$(RUN) -m benchmarks.plot $(ARGS)

fuzz: $(READY)  ## compare N=1000 random generate calls with unpatched transformers
	$(RUN) -m tests.fuzz -n $(N) $(ARGS)

sanitize: $(READY)  ## the operations in C with AddressSanitizer and UndefinedBehaviorSanitizer: N=1000 rounds, and tests
	CC=gcc $(RUN) fastgen/ops/native/build.py --sanitize $(SANITIZED)
	$(SANITIZE) --rounds $(N)
	$(SANITIZE) --pytest tests/ops/test_native.py tests/ops/test_native_search.py tests/models/test_in_c.py \
	  tests/models/test_encoders_in_c.py tests/patches/transformers/generate/test_in_a_row.py \
	  tests/ops/test_native_noise.py tests/decoding/test_native_draws.py \
	  tests/patches/transformers/planning/test_common_prompt.py

clean:  ## remove what make and the tools made: .venv, caches, build output
	rm -rf .venv build dist site fastgen/ops/native/lib .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyTorch first, alone and without what it needs, which the next line installs from the usual index: so pip never
# picks a build by itself. The CPU build lies in PyTorch's own index, where pip is not told of a nearer place.
# antlr4-python3-runtime, of hydra, and rouge-score come as source alone and build in an environment of their own; so does fairseq.
$(VENV)/.ready: pyproject.toml constraints.txt hatch_build.py $(wildcard fastgen/ops/native/*.[ch] fastgen/ops/native/isa/*.h fastgen/ops/native/build.py)
	@[ -n "$(PYTHON)" ] || { echo "fastgen needs Python 3.11 or newer: none found; name one with PYTHON=/path/to/python" >&2; exit 1; }
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import torch, sys; sys.exit(not "$(TORCH_PIN)".endswith("==" + torch.__version__.split("+")[0]))' 2>/dev/null \
	  || if [ "$(TORCH)" = cpu ]; then \
	    $(PY) -m pip install --quiet --no-deps $(TORCH_PIN)+cpu \
	    || $(PY) -m pip install --no-deps --index-url https://download.pytorch.org/whl/cpu $(TORCH_PIN)+cpu; \
	  else $(PY) -m pip install --no-deps $(TORCH_PIN); fi
	$(PY) -m pip install --quiet -c constraints.txt hatchling hatch-fancy-pypi-readme editables antlr4-python3-runtime rouge-score
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps $(FAIRSEQ)
	touch $@

# The oldest transformers lies in a folder of its own, which PYTHONPATH puts before the environment's.
$(OLDEST_DIR)/.ready-$(OLDEST): | $(READY)
	rm -rf $(OLDEST_DIR)
	$(PY) -m pip install --quiet --no-deps --target $(OLDEST_DIR) transformers==$(OLDEST)
	touch $@
