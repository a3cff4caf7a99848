# make train          trains a tensor-parallel GPT on two processes, beside the same on one
# make test           passes the tests of the parts; 10 minutes on two cores
# make test-rest      passes those that take longer, and those of the whole: families of models, training loops, processes
#                     that end, the examples, the benchmarks; about 35 minutes. With SHARE=1/15, a fifteenth of them
# make test-cards     passes the tests of trainings, training loops and whole models on NVIDIA cards: the machine's, or
#                     pretended ones, for which it needs a C++ compiler; 9 minutes. With SHARE=1/6, a sixth
# make test-all       passes all of them, with every rare case: all families at all sizes in all modes; hours
# make bench          steps beside Megatron-style layers by hand and the plans of others, each pass on and off, what a
#                     layer keeps, seconds to capture and how they grow, memory
# make versions       some tests under each version of Python, torch and transformers, into docs/versions.md: an hour
# make docs           the site of the documentation, into build/site: open build/site/index.html
# make lint           ruff and mypy
# make clean          removes all that these made
#
# Each makes .venv and installs what it needs. With another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Two workers share the files, in the order that tests/conftest.py gives them: the longest first.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
EVERY := tests tests/examples tests/benchmarks
ON_CARDS := tests/training tests/system tests/integrations/loops

.PHONY: train test test-rest test-cards test-all bench versions docs lint clean

train: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train_gpt.py

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) --budget 8 -m "not system and not costly"

test-rest: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) --budget 16 -m "system or costly" $(SHARE:%=--share %) $(EVERY)

test-cards: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) --cards $(SHARE:%=--share %) $(ON_CARDS)

test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) --all

bench: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 benchmarks/step.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 benchmarks/passes.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 benchmarks/activations.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/capture.py --llama
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth.py benchmarks/growth.png
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 benchmarks/memory.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 benchmarks/zero.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 benchmarks/predicted/bubble.py

# In virtual environments of its own. `docs/versions.py --help` says how to run some rows only.
versions:
	$(PYTHON) docs/versions.py

# Fails for a warning, a dead link or anchor, and for anything that a page would fetch from elsewhere.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy autotp examples

# Without -c the newest torch would come, and with it, in places, gigabytes of CUDA.
$(INSTALLED): setup.py setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "autotp needs Python 3.10 or newer, and this is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,docs,examples]'
	touch $@

clean:
	rm -rf .venv build dist out src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
