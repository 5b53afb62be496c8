# Every target works as the first command in a fresh clone: it creates .venv and installs what it needs.
#   make test      lint, types and layers, beside them all tests (what .ci/run runs)
#   make demo      measures every head of the bundled model, offline; ends with the path of the report, demo/report.html
#   make lint      the first three only
#   make format    let ruff rewrite what it can
#   make nightly   the checks too long for every commit: every normalizer compiled, random examples,
#                  kills, mutants of the code (a fixed list, a new sample), and test-lowest
#   make test-lowest  a part of the tests with the lowest versions that pyproject.toml allows, in .venv-lowest
#   make test-gpu  the tests that run on a GPU where there is one
#   make docs      the documentation as a site: open site/index.html, no server or network needed
#   make bench     speed and memory against what one would use instead
# Variables: PYTHON (3.11 or newer), WORKERS (parallel test processes), ARGS (more arguments for pytest or bench).

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
OPTIONAL := lab,lightning,media,frames,onnx
SMOKE := $(addprefix tests/,cli/test_commands.py normalizers/test_registry.py attention/test_learned_parts.py models/test_patch.py)
GPU_TESTS = $(shell grep -rlE --include='test_*.py' '\bDEVICE\b|cuda\.is_available' tests tests_lab)
LINT = $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports --no-logo
MUTANTS = mutants/$(shell git rev-parse --short HEAD).jsonl
NOT_COMPILED := tests?|testing|transformers/models|pip|debugpy|onnxruntime|onnxscript|IPython|jedi|prompt_toolkit|mypyc?|pygments/lexers|ray|aiohttp|grpc|ipykernel|jupyter_client|parso|pymdownx|sympy/physics|torchgen|tornado|traitlets|watchdog|wcwidth|werkzeug|ziamath|zmq

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Some containers set it. Without cached bytecode every test process compiles the package and rewrites the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-gpu test-lowest lint format demo docs nightly bench clean

# mypy takes one core for half a minute: beside the tests, not before them. Their output waits in the pipe until lint has
# ended, so the last line is pytest's.
test: SHELL := bash
test: $(INSTALLED)
	@set -o pipefail; [ -t 1 ] && color=yes || color=no; \
	$(BIN)/pytest -n $(WORKERS) --color $$color $(ARGS) 2>&1 | { ($(LINT)) </dev/null; lint=$$?; cat; \
	[ $$lint = 0 ] || echo "lint failed: see the lines before the tests" >&2; exit $$lint; }

# -v names each test at once, also if a time limit ends the run.
test-gpu: $(INSTALLED)
	$(BIN)/pytest -v $(GPU_TESTS) $(ARGS)

# Every "name>=version" becomes name==version: a bound that no release meets, or not together with the others, is an error.
# Needs an interpreter for which the lowest versions have wheels: PYTHON=python3.11.
test-lowest: LOWEST := .venv-lowest
test-lowest:
	@$(PYTHON) -m venv $(LOWEST)
	@grep -oE '"[[:alnum:]_.-]+>=[0-9.]+' pyproject.toml | sed 's/"//; s/>=/==/' >$(LOWEST)/lowest.txt
	$(LOWEST)/bin/pip install --quiet --constraint $(LOWEST)/lowest.txt --editable '.[$(OPTIONAL),test]'
	$(LOWEST)/bin/pytest $(SMOKE) $(ARGS)

lint: $(INSTALLED)
	$(LINT)

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(INSTALLED)
	$(BIN)/attnorm analyze --normalizers model,ssmax,entmax15 --metrics all --out demo/

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

nightly: $(INSTALLED)
	HYPOTHESIS_PROFILE=explore $(BIN)/pytest -n $(WORKERS) -m "nightly or further_case" --timeout 900 $(ARGS)
	$(BIN)/python tools/mutate.py --frozen --target 1 --stop-after 3600 --out $(MUTANTS)
	$(BIN)/python tools/mutate.py --number 100 --seed $$(date +%j) --stop-after 3600 --out $(MUTANTS)
	$(MAKE) test-lowest

bench: $(INSTALLED)
	$(BIN)/attnorm lab bench $(ARGS)

clean:
	rm -rf .venv .venv-lowest demo site dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "attnorm needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	      "name another one: make PYTHON=python3.12 ..." >&2; exit 1; }; \
	  echo "creating .venv and installing attnorm with its dependencies (about 1.5 GB; a minute or two)"; \
	  $(PYTHON) -m venv .venv; }
# The pip of older Pythons takes a minute to choose versions, a current one half of it. Without an index the old one serves.
	@$(BIN)/python -m pip install --quiet --upgrade pip 2>/dev/null || true
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
# pip would compile to bytecode on one core. Some packages hold files that are no valid Python; of others little is
# imported.
	@$(BIN)/python -m compileall -qq -j 0 -x '/($(NOT_COMPILED))/' .venv/lib || true
	@touch $@
