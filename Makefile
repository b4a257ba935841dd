# Everything runs in .venv, which the first target that needs it makes; Python 3.11 and pip are all that must be there.
#
#   make demo        plan, train and read out a small GPT on 4 local ranks
#   make test        lint, types, tests            make test-full   the slow tests too
#   make bench       the benchmarks' tables        make coverage    which public models run (an hour; resumes)
#   make clean       remove what the targets made

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready
# a process per core, and each file's tests in one of them: they share what is captured once
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
TYPED := .venv/typed
EXAMPLES := $(patsubst examples/%.py,-m %,$(wildcard examples/*.py))

.PHONY: demo test test-full lint bench coverage clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

test: lint
	$(PYTEST) -m "not slow" tests/pure tests/local tests/gloo

test-full: lint
	$(PYTEST) tests

# mypy cannot follow pyproject's package-dir: it reads the sources under their import names, through links.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/autopar
	@cd $(TYPED) && ln -s ../../examples/*.py .
	@cd $(TYPED)/autopar && ln -s ../../../autopar/* ../../../passes ../../../cost_model .
	cd $(TYPED) && ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p autopar $(EXAMPLES)

bench: $(READY)
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python $$file; done

# The models of timm need nothing of what it depends on beside torch and transformers.
coverage: $(READY)
	$(BIN)/python -m pip install -c constraints.txt --no-deps timm
	$(BIN)/python -W ignore benchmarks/coverage

# torch by itself first: it is the largest download, and stays where it is when another pin changes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,examples,dev]"
	@touch $@

clean:
	rm -rf .venv build dist demo_output .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
