# Everything that a person does with this project; `make` alone lists it.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := operator,trainer,mlperf,demo,test,bench
TORCH ?= auto
TORCH_INDEX ?= https://download.pytorch.org/whl
OUTPUT ?= runs/openmoji
PYTEST_OPTIONS ?=
SUITE ?= test
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2
# ATen's plain kernels beside oneDNN's AVX-512 are in no processor, and torch's bfloat16 attention fails there.
# A processor without AVX-512 has the first setting by itself, in all tests.
ISA = $(if $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null),"$(AVX2)") "$(AVX2) ATEN_CPU_CAPABILITY=default"
ISA_TESTS ?= tests/trainer
NODES ?= 3
FAMILY ?= ipv4
FAULTS ?=
SECONDS ?= 60
BUILDER ?=
SOURCE ?=
KEY ?=
PUBLIC_KEY ?=
REGISTRY ?=
IMAGE ?= operator
HELM ?= helm
HELM_OPTIONS ?=
BUILDAH ?= buildah
BUILD_OPTIONS ?=
PUSH_OPTIONS ?=
CONTEXT ?= .
RELEASE ?= dist/release
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# Only make setup exchanges the torch of an environment that is there; test-torch has another meaning for it.
ifneq ($(wildcard $(BIN)/python),)
ifeq ($(filter setup test-torch,$(MAKECMDGOALS)),)
override TORCH := auto
endif
endif

# Of the torch that was asked for last; any is good enough if none is asked for.
INSTALLED := .venv/.installed$(addprefix -,$(filter-out auto,$(TORCH)))

.DEFAULT_GOAL := help
.PHONY: help setup run lora test test-quick proof prepare-cluster test-isa test-ipv6 test-torch check check-quick format generate golden fuzz lock sbom audit wheel release check-tag push-chart push-image sign verify reproduce bench bench-operator faults cluster cluster-images cluster-down chart size clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(INSTALLED) ## make the environment in .venv (idempotent); TORCH=cpu|cuda|rocmX.Y, by default what the machine has

$(INSTALLED): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m supply_chain.torch_wheel "$(TORCH)" "$(TORCH_INDEX)" '.[$(EXTRAS)]'
	@rm -f .venv/.installed*
	@touch .venv/.installed $@
	@echo 'To call fluxtrain by its name: . .venv/bin/activate'
	@test ! -e .git || git config core.hooksPath >/dev/null || git config core.hooksPath .githooks

run: setup ## train examples/openmoji.yaml on this machine; again: resume
	$(BIN)/fluxtrain prepare openmoji
	$(BIN)/fluxtrain run examples/openmoji.yaml --output $(OUTPUT)
	@echo 'Prompts of your own, of these words:' && cat data/openmoji/images/words.txt
	@echo '$(BIN)/fluxtrain sample $(OUTPUT) --prompt "pink ghost with sunglasses and crown" --output images'

lora: setup ## after make run: train examples/openmoji-lora.yaml, a style, in about two minutes
	$(BIN)/fluxtrain prepare openmoji
	$(BIN)/fluxtrain run examples/openmoji-lora.yaml

test: setup prepare-cluster ## run all tests but those of make proof (SUITE=all: those too); as root, those on a real cluster
	$(BIN)/python -m tests.run $(SUITE) $(PYTEST_OPTIONS)

test-quick: setup ## the tests that need no cluster and start no training of their own
	$(BIN)/python -m tests.run quick $(PYTEST_OPTIONS)

proof: setup prepare-cluster ## the tests that are long by nature, test-isa, test-ipv6 and test-torch: after make test, before a release
	$(BIN)/python -m tests.run proof $(PYTEST_OPTIONS)

prepare-cluster: setup
	@test "$$(id -u)" != 0 || $(BIN)/python -m cluster prepare || echo "no cluster here; its tests report why they are skipped"

# Torch's cache of compiled graphs has no instruction set in its key: each setting has a cache of its own.
test-isa: setup ## the tests of numbers with the kernels of older processors, one after the other (ISA_TESTS=)
	@caches=$$(mktemp -d); trap 'rm -rf "$$caches"' EXIT; trap 'exit 130' INT TERM; \
	for isa in $(ISA); do echo "$$isa"; \
	env $$isa TORCHINDUCTOR_CACHE_DIR="$$(mktemp -d -p "$$caches")" \
	$(BIN)/python -m pytest -q --numprocesses=2 -m computes $(PYTEST_OPTIONS) $(ISA_TESTS) || exit 1; done

test-ipv6: setup prepare-cluster ## two jobs and their network policies on a cluster without IPv4, as root
	@test "$$(id -u)" != 0 || FAMILY=ipv6 $(BIN)/python -m pytest -q $(PYTEST_OPTIONS) tests/end_to_end/isolation/test_isolation.py

# Torch's lowest version, and that of today's CUDA images.
test-torch: ## the tests marked torch_range with other versions: TORCH="2.9.0 2.11"; PYTHON= is 3.12 (Debian's if none is here) or a path
	@env -u MAKEFLAGS -u TORCH -u PYTHON $(MAKE) --silent --no-print-directory setup
	@$(BIN)/python -m tests.torch_range $(TORCH:auto=2.9.0 2.11) $(if $(filter file,$(origin PYTHON)),,--python $(PYTHON)) $(PYTEST_OPTIONS)

check-quick: setup ## the part of check that takes seconds: format, lint, generated files, examples
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/python -m fluxtrain_operator.generate --check
	$(BIN)/yamllint --strict examples .yamllint

check: check-quick ## that, types, layers, sizes, duplicates, subjects of commits
	$(BIN)/mypy --no-error-summary
	@found=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$found"; exit 1; }
	$(BIN)/python -m pytest -q tests/architecture/test_size.py tests/architecture/test_duplicates.py
	$(BIN)/python tests/architecture/subjects.py

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: setup ## write manifests/crd.yaml and the generated pages of docs from the code
	$(BIN)/python -m fluxtrain_operator.generate

golden: setup ## write the golden files anew; review the diff like code
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/contract tests/operator tests/trainer/model tests/trainer/encode

fuzz: setup ## give changed files and messages to all readers, for SECONDS= each; exit 1 if one does what it may not
	$(BIN)/python -m tests.trainer.fuzz $(SECONDS)

lock: setup ## write the images' lock files anew from constraints.txt: every package with its hashes
	$(BIN)/python -m supply_chain lock

sbom: setup ## write dist/*.cdx.json, the packages of both images as CycloneDX
	$(BIN)/python -m supply_chain sbom dist

audit: setup ## compare the packages of both images with known advisories; says so if it cannot
	$(BIN)/python -m supply_chain audit

wheel: setup ## build dist/*.whl; the same commit gives the same bits
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build -t wheel -d dist

release: setup ## write dist/release: wheel, its sources, chart, lists of packages, provenance (BUILDER= and SOURCE= are URIs), SHA256SUMS
	@rm -rf dist/release
	@BUILDER="$(BUILDER)" SOURCE="$(SOURCE)" $(BIN)/python -m supply_chain release dist/release

check-tag: ## compare TAG= with the version; exit 1 if they differ
	@$(PYTHON) -m supply_chain.tag "$$TAG"

push-chart: ## push the chart of dist/release to REGISTRY=, where helm or docker is logged in
	$(HELM) push $(RELEASE)/fluxtrain-operator-$(VERSION).tgz oci://$(REGISTRY)/charts $(HELM_OPTIONS)

push-image: ## build IMAGE=operator|trainer of this commit with the wheel in dist, and push it to REGISTRY=
	$(BUILDAH) build --timestamp $$(git log -1 --format=%ct) --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
	--file images/$(IMAGE).Dockerfile --tag $(REGISTRY)/fluxtrain/$(IMAGE):$(VERSION) $(BUILD_OPTIONS) $(CONTEXT)
	$(BUILDAH) push $(PUSH_OPTIONS) $(REGISTRY)/fluxtrain/$(IMAGE):$(VERSION)

sign: setup ## sign dist/release by your private KEY=, a PEM file: docs/supply-chain.md
	@$(BIN)/python -m supply_chain sign dist/release "$(KEY)"

verify: setup ## check dist/release by the PUBLIC_KEY= of whoever signed it
	@$(BIN)/python -m supply_chain verify dist/release "$(PUBLIC_KEY)"

reproduce: setup ## build the operator image of this commit twice, in two stores; exit 1 if the digests differ; on Debian, as root
	@$(BIN)/python -m supply_chain reproduce

bench: setup ## measure against the peers (makes their environments; about an hour)
	$(BIN)/python -m benchmarks

bench-operator: setup ## our operator among 1,000 jobs, and against Kubeflow's training-operator and Trainer, on fake nodes; as root
	$(BIN)/python -m benchmarks.operator.alone
	$(BIN)/python -m benchmarks.operator

faults: setup ## do each fault of tests/faults to a job on a real cluster, and write docs/faults.md; half an hour, as root
	$(BIN)/python -m tests.faults $(FAULTS)

cluster: setup ## start a real Kubernetes of three nodes (NODES=, FAMILY=ipv4|ipv6) on this machine, as root; prints the KUBECONFIG and PATH to export
	@FAMILY=$(FAMILY) $(BIN)/python -m cluster up --nodes=$(NODES)

cluster-images: setup ## build both images of this checkout and load them into its nodes; prints how to apply a small job
	@FAMILY=$(FAMILY) $(BIN)/python -m cluster images --nodes=$(NODES)

cluster-down: ## stop it; nothing is left
	@$(BIN)/python -m cluster down

chart: setup ## write the chart's dashboards, README and goldens anew; review the diff like code
	$(BIN)/python -m dashboards
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/chart

size: setup ## files, lines, function median and p90
	@$(BIN)/python -m tests.architecture.size

clean: ## remove caches and runs; data and .venv stay
	rm -rf runs build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find operator trainer tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
