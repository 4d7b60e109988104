# Everything here works from a bare clone with python3 and make: the environment is made on the
# first call and reused while pyproject.toml and constraints.txt stay as they are.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
PYTEST_ARGS ?=
# Test processes side by side. Much of what the tests do is waiting for processes to start and end.
SIDE_BY_SIDE ?= 3
BENCH_ARGS ?=
# Their packages are large, and would be imported in every process that the tests fork.
ALONE := --ignore=tests/frameworks --ignore=tests/ray

# Hundreds of interpreters start in a run of the tests: each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-all test-frameworks test-ray test-report test-dashboard test-versions bench lint format dist docs causes pictures clean
# Two pip runs in one environment would trip over each other.
.NOTPARALLEL:

help:
	@echo 'make demo      torch and holdfast while workers are killed, leak and meet a damaged file'
	@echo 'make test      the quick test suite (PYTEST_ARGS="-k name" for a part of it)'
	@echo 'make test-slow a selection of the slow tests (.ci/slow.txt)'
	@echo 'make test-all  every test, with all fault combinations'
	@echo 'make test-frameworks  with the real packages people train with'
	@echo 'make test-ray  with workers on a Ray cluster of several nodes, on this machine'
	@echo 'make test-report  the page of `holdfast report` in a real Chromium (CHROMIUM=path)'
	@echo 'make test-dashboard  the Grafana dashboard against the schema that Grafana publishes; needs npm'
	@echo 'make test-versions  the quick suite with the oldest, the pinned and the newest torch'
	@echo 'make bench     holdfast beside torch and its peers (BENCH_ARGS="--quick" for a glance)'
	@echo 'make lint      ruff and mypy'
	@echo 'make format    let ruff rewrite what it can'
	@echo 'make dist      sdist and wheel, and the wheel tried in an environment of its own'
	@echo 'make docs      check links in the docs, run their examples, and build the site (build/site)'
	@echo 'make pictures  take the pictures of the docs, with Chromium'
	@echo 'make causes    write docs/causes from the catalogue of causes'

# NumPy's linear algebra would start its threads again after every fork, and they spin.
test test-slow test-all test-frameworks: export OPENBLAS_NUM_THREADS = 1

demo: $(VENV)/.has-test
	$(RUN) examples/demo.py

test: $(VENV)/.has-test
	$(RUN) -m pytest -n $(SIDE_BY_SIDE) --dist worksteal -m 'not slow and not frameworks and not report and not grafana and not ray' $(ALONE) $(PYTEST_ARGS)

test-slow: $(VENV)/.has-test
	HOLDFAST_STORM_SECONDS=40 $(RUN) -m pytest -n $(SIDE_BY_SIDE) --dist worksteal \
		-m 'slow and not frameworks and not report and not grafana and not ray' $(shell grep -v '^#' .ci/slow.txt) $(ALONE) $(PYTEST_ARGS)

test-all: $(VENV)/.has-test
	HOLDFAST_THOROUGH=1 $(RUN) -m pytest -n $(SIDE_BY_SIDE) --dist worksteal -m 'not frameworks and not report and not grafana and not ray' $(ALONE) $(PYTEST_ARGS)

test-frameworks: $(VENV)/.has-frameworks
	$(RUN) -m pytest -n $(SIDE_BY_SIDE) --dist loadscope -m 'frameworks and not slow' $(PYTEST_ARGS)

test-report: $(VENV)/.has-report
	$(RUN) -m pytest -m report tests/run_report $(PYTEST_ARGS)

GRAFANA := build/grafana-schema
test-dashboard: $(VENV)/.has-test
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(GRAFANA) \
		@grafana/schema@13.2.3 typescript@5
	GRAFANA_MODULES=$(GRAFANA)/node_modules $(RUN) -m pytest -m grafana tests/metrics $(PYTEST_ARGS)

pictures: $(VENV)/.has-report
	$(RUN) .ci/diagrams.py docs/images
	$(RUN) examples/demo.py --picture docs/images/demo.svg
	$(RUN) -m tests.run_report.pictures docs/images

# In an environment of its own: no other test needs Ray and Ray Train.
test-ray:
	$(MAKE) VENV=$(VENV)-ray $(VENV)-ray/.has-test-ray
	$(VENV)-ray/bin/python -m pytest -m ray tests/ray $(PYTEST_ARGS)

# An environment for each pair of Python and torch; VERSIONS="oldest 3.12:2.9" for some.
test-versions:
	$(PYTHON) .ci/versions.py $(VERSIONS) $(if $(PYTEST_ARGS),--pytest="$(PYTEST_ARGS)")

bench: $(VENV)/.has-bench
	$(RUN) -m benchmarks $(BENCH_ARGS)

lint: $(VENV)/.has-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict src

format: $(VENV)/.has-lint
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

dist: $(VENV)/.has-dist
	rm -rf dist
	$(RUN) -m build --outdir dist .
	$(RUN) .ci/try_wheel.py dist/*.whl

docs: $(VENV)/.has-docs
	$(RUN) .ci/causes.py --check docs/causes
	$(RUN) -m pytest tests/docs $(PYTEST_ARGS)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo 'the site: build/site/index.html'

causes: $(VENV)/.has-test
	$(RUN) .ci/causes.py docs/causes

clean:
	rm -rf $(VENV) $(VENV)-ray .versions build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# One stamp per extra of pyproject.toml.
$(VENV)/.has-%: pyproject.toml constraints.txt | $(VENV)/.made
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
