# Everything starts here: `make serve` and `make test` each do all their own set-up.
# Python 3.11 to 3.13 and make are all that has to be there; what else is missing is named before anything is changed.

PYTHON ?= python3
# cpu or gpu; empty: gpu where an NVIDIA GPU is visible
DEVICE ?=
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=

BIN := .venv/bin
# one broken fixture of the shared cluster fails hundreds of tests the same way
MAX_FAILURES := 5
# processes: they take groups of tests, those that start a stack first (tests/conftest.py)
TEST_PROCESSES := -n 2 --dist loadscope --max-worker-restart=0
# what decides, and starts no process; and the rules that look at sources
CHECKED := tests/core tests/autoscaling tests/quota tests/test_dependencies.py tests/test_docs.py tests/test_groups.py \
	tests/test_house.py tests/test_imports.py tests/test_suite_rules.py tests/test_times.py
# a test that takes longer than any of ours prints where it stands, ends its process and with that the run
STUCK_S := 600
test-long test-cluster: STUCK_S := 3600
WHEN_STUCK = -o faulthandler_timeout=$(STUCK_S) -o faulthandler_exit_on_timeout=true

MAKEFLAGS += --no-print-directory
export TORCH_INDEX MODEL CONFIG PORT SIGNING_KEY
# a caller's search path must not reach into .venv; and Python keeps what it compiles: a stack is a dozen processes, each
# of which would compile this project anew
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help serve check test test-long test-cluster test-first-hour gpu-check lint lock release clean setup

help: ## show this list
	@echo 'make TARGET [NAME=value ...]'
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo
	@echo '  MODEL=ID       serve, gpu-check: a Hugging Face id or a folder; default: the built-in model tiny'
	@echo '  CONFIG=FILE    serve: a YAML configuration'
	@echo '  PORT=N         serve: the port of the endpoint'
	@echo '  PYTHON=python3.12  the Python that .venv is made from'
	@echo '  DEVICE=cpu|gpu     which lock file; default: gpu where an NVIDIA GPU is visible'
	@echo '  TORCH_INDEX=URL    where the CPU build of torch comes from if the usual index lacks it'
	@echo '  PYTEST_ARGS=...    test: more arguments for pytest'
	@echo '  VLLM=0.33.0        lock: the version of vLLM that the extras cpu and gpu take'
	@echo '  RAY=2.61.0         lock: the version of Ray'
	@echo '  SIGNING_KEY=FILE   release: the private SSH key that signs dist/SHA256SUMS; without one it stays unsigned'
	@echo '  GPU_CHECK_ARGS=... gpu-check: --quick, --clients 1,32, --out FILE, ...; DEVICE=cpu runs it without a GPU'

setup: ## make .venv complete, and nothing else (the other targets do so first)
	@$(PYTHON) -I scripts/install.py --device '$(DEVICE)'

# exec: Ctrl-C and SIGTERM then reach serve-app itself, and its exit status is ours
serve: setup ## serve a model here, in the foreground, until Ctrl-C
	@set --; \
	if [ -n "$$CONFIG" ]; then set -- "$$@" --config "$$CONFIG"; fi; \
	if [ -n "$$MODEL" ]; then set -- "$$@" --model "$$MODEL"; fi; \
	if [ -n "$$PORT" ]; then set -- "$$@" --port "$$PORT"; fi; \
	exec $(BIN)/serve-app up "$$@"

check: lint ## the checks, the rules of the house and the pure cores, for every commit (2 minutes on 2 cores)
	@exec $(BIN)/python -m pytest -m 'not long' $(CHECKED) $(TEST_PROCESSES) $(WHEN_STUCK) $(PYTEST_ARGS)

test: lint ## the checks and the default tests, in two processes (half an hour on 2 cores)
	@exec $(BIN)/python -m pytest -m 'not long' $(TEST_PROCESSES) --maxfail=$(MAX_FAILURES) $(WHEN_STUCK) $(PYTEST_ARGS)

test-long: lint ## all tests, the long ones too
	@exec $(BIN)/python -m pytest $(TEST_PROCESSES) --maxfail=$(MAX_FAILURES) $(WHEN_STUCK) $(PYTEST_ARGS)

test-cluster: setup ## `ray up` onto test hosts in namespaces of this machine (root; under 15 minutes on 2 cores)
	@$(BIN)/python -m tests.requires 'test hosts' vllm redis-server
	@exec $(BIN)/python -m pytest tests/cluster/test_onprem.py $(WHEN_STUCK) $(PYTEST_ARGS)

test-first-hour: setup ## a newcomer's first hour, step by step, on the CPU (under 10 minutes on 2 cores)
	@exec $(BIN)/python -m tests.first_hour

gpu-check: setup ## every check of a machine with GPUs, a report in gpu-check.md
	@set --; \
	if [ -n "$$MODEL" ]; then set -- "$$@" --model "$$MODEL"; fi; \
	if [ '$(DEVICE)' = cpu ]; then set -- "$$@" --device cpu; fi; \
	exec $(BIN)/python -m benchmarks.gpu_check "$$@" $(GPU_CHECK_ARGS)

.PHONY: docs
docs: setup ## the documents as a site in build/docs; links, anchors and spelling are checked
	@$(BIN)/codespell README.md CONTRIBUTING.md docs
	@$(BIN)/python -m sphinx -b html -n -W --keep-going -c docs -d build/doctrees . build/docs
	@echo 'The site: build/docs/index.html'

lint: setup ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

lock: ## resolve requirements/*.txt anew; VLLM or RAY names another version, which goes into pyproject.toml, too
	@exec $(PYTHON) -I scripts/lock.py $(if $(VLLM),'VLLM=$(VLLM)') $(if $(RAY),'RAY=$(RAY)')

release: setup ## wheel, source distribution, SBOM, licences and checksums of this commit, in dist/
	@exec $(BIN)/python -m scripts.release

clean: ## remove .venv and everything made by tools
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
