# Every target works from a bare checkout: `.venv` is made on first use and again when its inputs change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
# Else each of the hundreds of processes that the tests start compiles the sources once more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup browser demo docs test test-slow test-oldest chaos chaos-training containers check format bench wheels cuda clean

# How long `make chaos` and `make chaos-training` run, and what they draw by; without a seed one is drawn and printed.
MINUTES ?= 5
RUNS    ?= 20
SEED    ?=

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gradbox needs Python 3.11 or newer, got " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# The dashboard's tests want Chromium: Debian's is fetched where that may be, else they are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	  || echo "no chromium, and it cannot be fetched here: the tests of the dashboard will be skipped"

demo: $(STAMP)
	$(BIN)/gradbox demo

# More processes than CI has cores: most tests wait for a box or a worker. tests/scheduling.py says
# which tests keep together.
test: $(STAMP) browser
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=50

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# The suite with the oldest versions that pyproject.toml allows; their torch comes with CUDA, 5 GB.
# Then what a client runs with the Pydantic that a client may have, which is older than a service's.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct -e '.[dev]'
	.venv-oldest/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --no-deps pydantic==2.12.0 pydantic-core==2.41.1
	.venv-oldest/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder tests/client

chaos: $(STAMP)
	$(BIN)/python -m proofs.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The same bits after runs are trained while processes of their box are killed: about a minute a run.
chaos-training: $(STAMP)
	$(BIN)/python -m proofs.chaos.training --runs $(RUNS) $(if $(SEED),--seed $(SEED))

# The images built and started for real: by docker or podman, else (as root) by buildah and debootstrap.
containers: $(STAMP)
	$(BIN)/python -m proofs.containers

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

# On a machine with a GPU: with the torch that is installed there ($(PYTHON)), and without network once
# `make wheels` has been run, here or elsewhere, for its Python. What takes longer than MINUTES is left out.
WHEELS ?= build/wheels
CUDA_PYTHON ?= 3.12

wheels: $(STAMP)
	$(BIN)/python -m proofs.cuda.wheels collect $(WHEELS) --python $(CUDA_PYTHON)

cuda:
	$(PYTHON) -m proofs.cuda $(if $(wildcard $(WHEELS)),--wheels $(WHEELS)) $(if $(filter command,$(origin MINUTES)),--minutes $(MINUTES))

# The site, in build/docs: a link, an anchor or a name that leads nowhere ends it with an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
