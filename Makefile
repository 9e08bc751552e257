# Needs: Linux, python3 >= 3.10, make, a package index. Everything else is set up in $(VENV).
#   make doctor ARGS="--level quick"         options for `nccl-doctor run`
#   make test ARGS="tests/unit -k versions"  options for pytest
#   make test TIMES=50 ARGS="tests/lab -k nft"  finds the test that fails once in fifty times
#   TORCH_INDEX=URL                          take torch from another index (e.g. CPU builds)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TIMES ?=
NAME ?=
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS := -c constraints-dev.txt

# A resolver that does not answer costs a test seconds for each new connection; and thousands of
# processes that may not keep what they compile would each spend half a second on it.
TEST_ENV := RES_OPTIONS="timeout:1 attempts:1" PYTHONDONTWRITEBYTECODE=
SIDE_BY_SIDE := -n 4 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help doctor test test-wide test-nccl test-torch test-newest test-gpu gpu-validation accuracy accuracy-long chaos docs site samples screenshots man zipapp dist lint format new-check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

doctor: $(VENV)/.doctor ## set up and examine this machine (one rank per GPU, or two gloo ranks)
	@$(BIN)/nccl-doctor run $(ARGS) && code=0 || code=$$?; \
	echo "make: the command is $(abspath $(BIN))/nccl-doctor; next, for a job, type on every host" >&2; \
	echo "  $(abspath $(BIN))/nccl-doctor run -- torchrun …" >&2; \
	exit $$code

test: $(VENV)/.dev ## set up and run the tests; with TIMES=50, each one so often
	@scripts/lab_tools.sh
	@scripts/browser_tools.sh
ifeq ($(ARGS)$(TIMES),)
	@$(TEST_ENV) $(BIN)/python -m compileall -q -j 0 nccl_doctor checks tests/support
	$(TEST_ENV) $(BIN)/python -m pytest -m "not wide" $(SIDE_BY_SIDE) tests
else
	$(TEST_ENV) $(BIN)/python -m pytest $(if $(TIMES),--count $(TIMES) $(SIDE_BY_SIDE)) $(ARGS)
endif

test-wide: $(VENV)/.dev ## what `make test` leaves out, and properties by many more examples
	@scripts/lab_tools.sh
	$(TEST_ENV) EXAMPLES=deep $(BIN)/python -m pytest -m "wide or hypothesis" tests $(ARGS)

# Thirteen wheels of NCCL, about 250 MB each, are kept in the cache of the user; no GPU is needed.
test-nccl: $(VENV)/.dev ## compare our rules with real NCCL, and write docs/nccl-validation.md
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python scripts/nccl_validation.py --write docs/nccl-validation.md $(ARGS)

# Seven releases with the libraries that they need, about 10 GB, are kept in the cache of the user.
test-torch: $(VENV)/.dev ## run with other releases of torch, and write docs/torch-versions.md
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python scripts/torch_versions.py --write docs/torch-versions.md $(ARGS)

test-newest: $(VENV)/.dev ## run with the newest of everything that the index offers, and say what changed
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python scripts/newest.py $(ARGS)

# One after the other: they measure speed, and share the GPU's memory. All skipped is no success
# where somebody says that there must be a GPU.
GPU_TESTS = $(TEST_ENV) $(BIN)/python -m pytest -m gpu -n 0 --junitxml build/gpu.xml
test-gpu: $(VENV)/.dev ## only the tests that need a GPU; with CI or GPU_REQUIRED=1, no GPU is a failure
	GPU_REQUIRED="$(or $(GPU_REQUIRED),$(CI))" $(GPU_TESTS) $(ARGS)

gpu-validation: $(VENV)/.dev ## the same, and write the results into docs/gpu-validation.md
	@rm -f build/gpu.xml
	-GPU_REQUIRED=1 $(GPU_TESTS)
	$(BIN)/python scripts/gpu_validation.py build/gpu.xml --write docs/gpu-validation.md

accuracy: $(VENV)/.dev ## run the whole corpus of faults and write docs/accuracy.md
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python benchmarks/accuracy.py --write docs/accuracy.md $(ARGS)

accuracy-long: $(VENV)/.dev ## the same with 1,000 healthy runs, and with the fixes typed: some hours
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python benchmarks/accuracy.py --healthy 1000 --records build/accuracy.jsonl --fixes build/fixes.json --write docs/accuracy.md $(ARGS)

chaos: $(VENV)/.dev ## runs that something strikes at random (ARGS="--runs N --seed S --from K"), writes docs/chaos.md
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python benchmarks/chaos.py --write docs/chaos.md $(ARGS)

docs: $(VENV)/.dev ## write what docs/ and README.md have from the program: pages, help, samples
	@$(BIN)/python scripts/docs.py
	@$(BIN)/python scripts/architecture.py

site: $(VENV)/.dev ## write docs/ as a site into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

samples: $(VENV)/.dev ## record docs/samples in the lab (ARGS="pair killed": only those)
	@scripts/lab_tools.sh
	$(TEST_ENV) $(BIN)/python scripts/samples.py $(ARGS)

screenshots: $(VENV)/.dev ## make docs/pictures again, from docs/samples
	@scripts/browser_tools.sh
	$(TEST_ENV) $(BIN)/python scripts/screenshots.py

man: $(VENV)/.dev ## write build/nccl-doctor.1, the man page
	@$(BIN)/python scripts/man_page.py $(ARGS)

zipapp: $(VENV)/.python ## write dist/nccl-doctor.pyz, one file that needs Python and torch only
	@$(BIN)/python scripts/make_zipapp.py

dist: $(VENV)/.python ## write into dist/ what can be installed: wheel, sdist, one file, Containerfile
	@$(PIP) install $(PINS) setuptools
	@$(BIN)/python scripts/make_dist.py

lint: $(VENV)/.dev ## ruff, formatting, who imports whom, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: $(VENV)/.dev ## apply formatting and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

new-check: ## write checks/NAME.py and its test: make new-check NAME=clock_skew
	@$(PYTHON) scripts/new_check.py $(if $(FOLDER),--folder) -- "$(NAME)"

clean: ## remove what make made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Stamps: a second call does nothing.

$(VENV)/.python:
	@scripts/make_venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

# DeepSpeed comes as source and asks the installed torch what to build, so torch comes first and
# the build sees this environment; DS_BUILD_OPS=0: no operator is compiled.
$(VENV)/.doctor: $(VENV)/.python pyproject.toml constraints-dev.txt
	@echo "installing torch (the first time takes a while)"
	@$(PIP) install $(PINS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "installing nccl-doctor with DeepSpeed"
	@$(PIP) install $(PINS) setuptools wheel
	@DS_BUILD_OPS=0 $(PIP) install $(PINS) --no-build-isolation --editable '.[deepspeed]'
	@touch $@

$(VENV)/.dev: $(VENV)/.doctor
	@echo "installing what tests and linters need"
	@$(PIP) install --no-build-isolation --requirement constraints-dev.txt
	@touch $@
