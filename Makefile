# Every target sets up what it needs. tools/environment.py chooses the interpreter.

PYTHON ?= $(shell command -v python || command -v python3)
ENVIRONMENT = py=$$($(PYTHON) tools/environment.py) || exit 1
TEST_OPTIONS ?=

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export HF_HUB_OFFLINE ?= 1

PART ?=
XLA_PYTHON ?=

.PHONY: help quickstart check test test-all test-gpu test-xla lint docs bench clean

help:
	@echo "make quickstart   set up, then fine-tune a small model on 2 CPU ranks and compare its answers"
	@echo "make check        lint and the most important tests, in about a minute (tests/check.txt)"
	@echo "make test         lint and all tests that are not slow (TEST_OPTIONS=... goes to pytest)"
	@echo "make test-all     lint and all tests, folder by folder, with a summary at the end;"
	@echo "                  PART=fsdp or PART=data,rest runs some of the folders"
	@echo "make test-gpu     the tests that need a GPU (one is enough); skipped without a GPU"
	@echo "make test-xla     the tests of the XLA engine, on 4 CPU devices, in an environment of its own (.venv-xla, about"
	@echo "                  7 GB; XLA_PYTHON=... names another one); some also start the torch engine"
	@echo "make lint         ruff and mypy"
	@echo "make docs         build the site of the documents into site/ (tools in .venv-docs)"
	@echo "make bench        run the benchmarks"
	@echo "make clean        remove .venv, .venv-xla, .venv-docs, site, caches and the quickstart's output"

quickstart:
	@$(ENVIRONMENT); $$py -m quickstart.run

# Two pytest processes; each file goes to one of them. TEST_OPTIONS="-n 0" for one process, as for --pdb.
test: lint
	@$(ENVIRONMENT); $$py -m pytest -n 2 --dist loadfile -m "not slow" $(TEST_OPTIONS)

test-all: lint
	@$(ENVIRONMENT); $$py tools/run_tests.py "$(PART)" $(TEST_OPTIONS)

check: lint
	@$(ENVIRONMENT); $$py tools/run_tests.py check -q $(TEST_OPTIONS)

test-gpu:
	@py=$$($(PYTHON) tools/environment.py gpu) || exit 1; $$py -m pytest -m gpu $(TEST_OPTIONS)

test-xla:
	@$(ENVIRONMENT); \
	xla=$(XLA_PYTHON); [ -n "$$xla" ] || xla=$$($(PYTHON) tools/environment.py xla) || exit 1; \
	FULLSHARD_TORCH_PYTHON=$$py PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 $$xla -m pytest tests/xla $(TEST_OPTIONS)

lint:
	@$(ENVIRONMENT); $$py -m ruff check . && $$py -m ruff format --check . && $$py -m mypy

docs:
	@py=$$($(PYTHON) tools/environment.py docs) || exit 1; $$py -m mkdocs build

bench:
	@$(ENVIRONMENT); \
	export OMP_NUM_THREADS=1; \
	for name in engine load_save save_stall stream; do $$py benchmarks/$$name.py; done; \
	if $$py -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	for name in engine_gpu overlap_gpu qlora_gpu qlora_70b sft_gpu; do $$py benchmarks/$$name.py; done; \
	$$py -m torch.distributed.run --nproc_per_node 1 benchmarks/weights_gpu.py; fi

clean:
	rm -rf .venv .venv-xla .venv-docs site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info quickstart/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
