# `make` lists the targets. Each installs what it needs, once, into .venv.
#   make PYTHON=python3.12 test        another interpreter (after make clean)
#   make train WORKDIR=runs/other

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON  ?= python3
VENV    ?= .venv
WORKDIR ?= runs/quickstart
WORKERS ?= 3# pytest processes; some tests wait, so more than cores

PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip install -qq --disable-pip-version-check
# $(call install,EXTRAS,MORE). requirements.txt constrains: it says which version,
# pyproject.toml says what. uv, from pip's index, takes a tenth of pip's time; where it
# can't install, pip does.
define install
@url=$${PIP_INDEX_URL:-$$($(PY) -m pip config get global.index-url 2>/dev/null || :)}; \
  extras='$(1)'; what=(-c requirements.txt -e ".[$${extras// /,}]" $(2)); \
  $(VENV)/bin/uv pip install -q --compile-bytecode --python $(PY) \
    $${url:+--default-index "$$url"} "$${what[@]}" || $(PIP) "$${what[@]}"
endef
PYTEST  := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
           JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
           JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 \
           HYPOTHESIS_STORAGE_DIRECTORY=$(CURDIR)/.cache/hypothesis \
           $(PY) -m pytest -n $(WORKERS) --dist worksteal

# Where it is set, each process compiles all of its modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-newest train durations coverage mutations test test-all test-long test-newest test-ray soak chaos browser worlds heterogeneous lint notebook docs package requirements clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1 @ \2/p' $(MAKEFILE_LIST) | \
	  awk -F ' @ ' '{ printf "%-20s %s\n", $$1, $$2 }'

setup: $(VENV)/.train ## make .venv with what the runner needs

train: $(VENV)/.train ## train the quickstart on this machine's CPU, into $(WORKDIR)
	JAX_PLATFORMS=cpu $(PY) -m acco_jax.train --config=experiments/quickstart.py \
	  --workdir=$(WORKDIR)

# What a newer Python and jax may break: layout, collectives, gradients, the forms of a
# step, README's snippets. The rest runs on one interpreter.
TESTS   ?=
LIBRARY := $(addprefix tests/core/test_, layout.py collectives.py compiler.py gradients.py) \
           $(addprefix tests/methods/test_, acco.py zero1.py) \
           $(addprefix tests/step/test_, step.py compiled.py donation.py) \
           tests/schedule/test_footprint.py tests/project/test_readme.py tests/test_multiprocess.py

test: $(VENV)/.test ## test every method and every command once, in five to eleven minutes
	$(PYTEST) $(TESTS)

test-all: $(VENV)/.test ## run what CI tests besides: whole runs, more optimizers and worlds
	$(PYTEST) -m "slow and not long"

test-long: $(VENV)/.test ## run what CI has no time for, and ten times the properties' examples
	EXAMPLES=10 $(PYTEST) -m "long or hypothesis"

test-newest: ## run the library's tests on Python 3.13 or 3.12, with the newest jax
	@export OPTIMIZED=1; $(call on-newest,test TESTS="$(LIBRARY)")

setup-newest:
	@$(call on-newest,.venv-newest/.test)

test-ray: $(VENV)/.test ## kill a process of a run under Ray Train, in .venv-ray
	@$(MAKE) --no-print-directory VENV=.venv-ray .venv-ray/.ray
	$(PYTEST) -n 0 -m long tests/run/test_ray.py

durations: $(VENV)/.test ## run all but the long tests; where do their minutes go?
	$(PYTEST) -p benchmarks.durations -m "not long"
	$(PY) benchmarks/durations.py

coverage: $(VENV)/.test ## the same, with the lines of acco_jax/ that each test runs
	rm -rf build/coverage && mkdir -p build/coverage
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
	  COVERAGE_FILE=$(CURDIR)/build/coverage/.coverage \
	  $(PYTEST) -p benchmarks.durations -m "not long"
	mv build/durations.jsonl build/coverage
	$(PY) -m coverage combine -q && $(PY) benchmarks/covered.py

mutations: $(VENV)/.test ## fifty faults: which do the fast tests notice? (hours)
	$(PY) benchmarks/mutations.py --coverage=build/coverage

soak: $(VENV)/.test ## kill runs a hundred times; all must end with the same bits
	$(PY) benchmarks/soak.py

chaos: $(VENV)/.test ## half an hour of faults in four processes (root, ip and tc)
	$(PY) benchmarks/chaos.py

browser: $(VENV)/.browser docs ## look at a report and the site in Chromium, light and dark
	JAX_PLATFORMS=cpu $(PY) -m acco_jax.compare --config=experiments/quickstart.py \
	  --methods=acco,zero1 --seeds=1 --workdir=build/browser/runs --config.steps=60 \
	  --config.eval_every=10 --config.log_every=1
	$(PY) benchmarks/browser.py --out=build/browser --site=build/site build/browser/runs

worlds: $(VENV)/.test ## ten random changes of a run's processes, replayed to the bit
	$(PY) benchmarks/worlds.py

heterogeneous: $(VENV)/.test ## four processes, one of them slow (root, CPU quotas)
	$(PY) benchmarks/heterogeneous.py

lint: $(VENV)/.test ## check format, lint, types and prose
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q -n 0 tests/project/test_prose.py

notebook: $(VENV)/.test ## execute the Colab notebooks here and keep their outputs
	cd colab && ../$(VENV)/bin/jupyter-execute --inplace *.ipynb

# Without --quiet, which hides the warnings that --strict counts.
docs: $(VENV)/.docs ## build the site into build/site, warnings are errors
	$(VENV)/bin/codespell --ignore-words=docs/words.txt --skip='*/katex/*' *.md docs/*.md docs/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict -f docs/mkdocs.yml

package: $(VENV)/.package ## build wheel and sdist, install each, run README's quickstart
	rm -rf dist build/package
	$(PY) -m hatchling build
	@mkdir -p build
	@sed -n '/^```python/,/^```/{/^```/!p}' README.md > build/quickstart.py
	@for file in dist/*.whl dist/*.tar.gz; do \
	  echo "installing $$file into a new environment" && \
	  $(PYTHON) -m venv --clear build/package && \
	  build/package/bin/pip install -qq --disable-pip-version-check \
	    -c requirements.txt "$$file" && \
	  (cd build && JAX_PLATFORMS=cpu package/bin/python -W error quickstart.py) || exit 1; \
	done

requirements: ## resolve the newest versions into requirements.txt (with uv)
	$(PYTHON) -m venv .venv-uv && .venv-uv/bin/pip install -qq uv
	sed '/^[^#]/,$$d' requirements.txt > .venv-uv/requirements.txt
	.venv-uv/bin/uv pip compile pyproject.toml --all-extras --universal \
	  --python-version 3.11 --no-emit-package acco-jax --no-annotate --no-header -q \
	  | sed -E 's/python_full_version/python_version/g; / == .(emscripten|pypy)./d' \
	  >> .venv-uv/requirements.txt
	mv .venv-uv/requirements.txt requirements.txt

clean: ## remove environments and caches (runs/ stays)
	rm -rf .venv .venv-* .cache build dist

# Stamps: an environment is brought up to date when what defines it has changed.
$(VENV)/.train: pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: acco-jax needs Python 3.11 or newer, and '$(PYTHON)' is" \
	  "$$($(PYTHON) --version 2>/dev/null || echo missing):" \
	  "say make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing the runner's requirements into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) uv || :
	$(call install,train report)
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "installing the tests' requirements into $(VENV)"
	$(call install,train test plan)
	@touch $@

$(VENV)/.ray: $(VENV)/.train
	@echo "installing Ray Train into $(VENV)"
	$(call install,train,'ray[train]==2.60.0')
	@touch $@

$(VENV)/.browser: $(VENV)/.train
	@echo "installing what drives a browser into $(VENV)"
	$(call install,train browser)
	@touch $@

$(VENV)/.package: $(VENV)/.train
	@echo "installing the build backend into $(VENV)"
	$(call install,train package)
	@touch $@

$(VENV)/.docs: $(VENV)/.train
	@echo "installing the site's requirements into $(VENV)"
	$(call install,train docs)
	@touch $@

# The first that runs (a pyenv shim may exist and not), not of a free-threaded build.
probe := import ensurepip, sys; print(sys.executable) if "free-thr" not in sys.version else sys.exit(1)
define find-newest
for p in python3.13 python3.12 "$$(pyenv root 2>/dev/null)"/versions/3.13*/bin/python \
  "$$(pyenv root 2>/dev/null)"/versions/3.12*/bin/python; do \
  "$$p" -c '$(probe)' 2>/dev/null && break; done || true
endef
define on-newest
python=$$($(find-newest)); if [ -n "$$python" ]; then \
  $(MAKE) --no-print-directory PYTHON="$$python" VENV=.venv-newest $(1); \
else echo "no Python 3.13 or 3.12 found, nothing to run"; fi
endef
