# make setup   virtual environment with pinned dependencies        make demo    overlapped against plain decoding
# make test    every test that is not slow                          make check   linters, formatter and type checker
# make bench   the local benchmark                                  make clean   forget the environment and caches
# make protos  the generated code in services/paceline/v1           make test-ray   tests on a real local Ray cluster
# make gpu     tests and benchmark on a CUDA device, with GPU_PYTHON as it is: torch, transformers, pydantic, pytest

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.paceline-setup
PROTOS := protos/paceline/v1
V1     := services/paceline/v1
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos \
	--plugin=$(BIN)/protoc-gen-mypy --plugin=$(BIN)/protoc-gen-mypy_grpc

# Tests that take a core for themselves and judge no speed: two run at once.
PARALLEL := tests/model tests/target tests/draft tests/drafters tests/lossless/test_engines.py \
	tests/lossless/test_exact.py tests/lossless/test_statistical.py

# One torch thread per process: a multi-threaded region stalls whenever anything else wants one of its cores.
export OMP_NUM_THREADS := 1

# $(call generate,ROOT): the path of a .proto file below protos/ is the path of its module below ROOT.
generate = $(PROTOC) --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	$(wildcard $(PROTOS)/*.proto)

.PHONY: setup demo test test-slow test-ray gpu check check-protos protos format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,quant,bench]'
	touch $@

demo: setup
	$(BIN)/paceline demo

test: setup
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu and not ray" $(PARALLEL)
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not ray" $(PARALLEL:%=--ignore=%)

test-slow: setup
	$(BIN)/python -m pytest -q -n 2 -m "slow and not gpu and not ray" $(PARALLEL)
	$(BIN)/python -m pytest -q -m "slow and not gpu and not ray" $(PARALLEL:%=--ignore=%)

test-ray: setup
	timeout 600 $(BIN)/python -m pytest -q -m "ray and not gpu" tests/metrics/test_metrics.py  # a cluster of its own
	timeout 2400 $(BIN)/python -m pytest -q -m "ray and not gpu" --ignore tests/metrics/test_metrics.py

gpu:
	PYTHONPATH=services:. $(GPU_PYTHON) -m pytest -q -W default -m gpu tests/gpu
	PYTHONPATH=services:. $(GPU_PYTHON) -m pytest -q -W default tests/model/attention/test_kernels.py
	PYTHONPATH=services:. $(GPU_PYTHON) benchmarks/gpu.py
	PYTHONPATH=services:. $(GPU_PYTHON) benchmarks/gpu.py --attention triton

protos: setup
	rm -f $(V1)/*_pb2.py $(V1)/*_pb2.pyi $(V1)/*_pb2_grpc.py $(V1)/*_pb2_grpc.pyi
	$(call generate,services)

check-protos: setup
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,"$$fresh") && \
	if ! diff -r -x __init__.py -x __pycache__ $(V1) "$$fresh/paceline/v1"; then \
		echo "$(V1) is not what $(PROTOS) generates: run make protos" >&2; exit 1; \
	fi

check: setup check-protos
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
