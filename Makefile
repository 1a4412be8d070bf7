# make setup   virtual environment with pinned dependencies        make demo    overlapped against plain decoding
# make test    every test that is not slow                          make check   linters, formatter and type checker
# make bench   the local benchmark                                  make clean   forget the environment and caches

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.paceline-setup

# One torch thread per process: a multi-threaded region stalls whenever anything else wants one of its cores.
export OMP_NUM_THREADS := 1

.PHONY: setup demo test test-slow check format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/paceline demo

test: setup
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not ray"

test-slow: setup
	$(BIN)/python -m pytest -q -m "slow and not gpu and not ray"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/paceline bench local

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
