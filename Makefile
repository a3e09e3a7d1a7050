# `make train` and `make test` need nothing but make and a Python of version 3.11 or later.
VENV := .venv
STAMP := $(VENV)/.seedbed-installed
BIN := $(VENV)/bin
# One more than cores: tests wait for other processes a fifth of the time.
WORKERS ?= $(shell expr $$(nproc) + 1)
# The first interpreter that runs and is new enough; a name that is found may be a shim without a Python behind it.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: help setup train test test-all lint format types docs bench web lock dist clean

help:
	@echo "make setup   set up .venv"
	@echo "make train   set up .venv and train Pong"
	@echo "make test    set up .venv and run the tests;  make test-all  and those that need minutes"
	@echo "make lint    check style;  make format  mend it"
	@echo "make types   check types"
	@echo "make docs    build the documentation: build/docs/index.html"
	@echo "make bench   list the benchmarks; ARGS=NAME runs one"
	@echo "make web     build the scripts of replays and reports (needs npm)"
	@echo "make dist    build the wheel and the source distribution into dist/"
	@echo "make lock    pin what is installed in .venv into requirements.lock"
	@echo "make clean   remove .venv and caches (runs are kept)"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "seedbed needs Python 3.11 or later: none is on the PATH. Install one," \
		"or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "making .venv failed: on Debian and Ubuntu" \
		"install the package python3-venv, then run make again" >&2; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

train: setup
	$(BIN)/seedbed train pong $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# Each of what needs minutes may take the whole machine.
test-all: test
	$(BIN)/python -m pytest -m "slow and not gpu and not cluster" --timeout 1800 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/pyright

docs: setup
	$(BIN)/sphinx-build -n -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

bench: setup
	$(BIN)/seedbed bench $(ARGS)

web:
	cd src/seedbed/viewer/web && npm install --no-audit --no-fund && npm run build

dist: setup
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	@! grep -q 'src="docs/' README.md || echo "README.md shows pictures by relative addresses, which a package" \
		"index cannot show: before uploading see Release in CONTRIBUTING.md"

# Names and versions only: no hosts, no hashes, no tools that the venv brings along.
lock:
	$(BIN)/python -m pip list --disable-pip-version-check --format=freeze \
		--exclude seedbed --exclude pip --exclude setuptools --exclude wheel | LC_ALL=C sort -f > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
