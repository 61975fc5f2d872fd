# Every target sets up what it needs on first use: .venv with the tested versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports: of all that is installed that is little.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install train test test-slow test-harness test-slurm check bench bench-moe bench-finetune bench-eval bench-data bench-watch bench-memory bench-layouts bench-checkpoint bench-faults gpu-check ui wheel clean

help: ## print every target
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.train ## make .venv and install what training needs

train: $(VENV)/.train ## train yamls/quickstart.yaml on real text: minutes on a laptop's CPU
	$(BIN)/python scripts/train.py yamls/quickstart.yaml

test: $(VENV)/.dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.dev ## run the tests that CI has no time for
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.dev ## lint, format, types and the floors of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench ## speed and memory beside a bare loop and the Hugging Face Trainer
	$(BIN)/python -m benchmarks.training.compare

bench-moe: $(VENV)/.bench ## mixtures of experts: the layer beside a dense one, a model beside transformers' DBRX
	$(BIN)/python -m benchmarks.moe.layer
	$(BIN)/python -m benchmarks.moe.model

bench-finetune: $(VENV)/.bench ## fine-tuning beside TRL's SFTTrainer, padded and packed, full and LoRA; memory beside the estimate
	$(BIN)/python -m benchmarks.finetune.compare
	$(BIN)/python -m benchmarks.finetune.memory

bench-eval: $(VENV)/.eval ## the gauntlet's scoring beside lm-evaluation-harness and padding to the maximum
	$(BIN)/python -m benchmarks.evaluation.compare

bench-data: $(VENV)/.dev ## the order's mixing, loaders beside others (RIVALS=their python), preparation beside datasets.map
	$(BIN)/python -m benchmarks.data.orders
	$(BIN)/python -m benchmarks.data.loaders $(if $(RIVALS),--python $(RIVALS))
	$(BIN)/python -m benchmarks.data.preparation
	$(BIN)/python -m benchmarks.data.data_wait

bench-watch: $(VENV)/.train ## what watch, heartbeats and hang monitor cost a step of the quickstart
	$(BIN)/python -m benchmarks.training.watch

bench-memory: $(VENV)/.dev ## bytes on one of 512 ranks, on fake tensors, beside the estimate
	$(BIN)/python -m benchmarks.memory.fake_ranks

bench-layouts: $(VENV)/.dev ## DBRX on 512 and 3,072 fake ranks, by every layout: shards, groups, memory, and what a step sends
	$(BIN)/python -m benchmarks.memory.layouts
	$(BIN)/python -m benchmarks.memory.communication

bench-checkpoint: $(VENV)/.dev ## what a save of 2 GB holds training up: in the background, at once, by torch's async_save
	$(BIN)/python -m benchmarks.checkpoints.saving

bench-faults: $(VENV)/.dev ## faults injected into runs of four processes: who sees them, what is done, what it costs
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.faults.quiet

gpu-check: $(VENV)/.gpu ## tests, kernels, speed, memory and losses of the GPU at hand, on one page: CHECK="minutes=60 steps=mfu"
	$(BIN)/python scripts/gpu_check.py $(CHECK)

test-harness: $(VENV)/.dev $(VENV)/.eval ## the tests that compare with lm-evaluation-harness
	$(BIN)/python -m pytest tests/gauntlet/test_harness.py tests/benchmarks/test_evaluators.py

test-slurm: $(VENV)/.dev ## jobs of a real Slurm on this machine that are drained, killed, requeued: ten minutes
	@PATH="$$PATH:/usr/sbin:/sbin"; for name in slurmctld slurmd sbatch; do command -v $$name >/dev/null \
		|| { echo "$$name is not there: apt install slurmctld slurmd slurm-client"; exit 2; }; done
	$(BIN)/python -m pytest -m slurm -n 0 tests/resilience/slurm

ui: $(VENV)/.ui ## open MLflow on the runs of this folder
	$(BIN)/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

wheel: $(VENV)/.train ## build dist/*.whl, which carries recipes, gauntlets and the console command
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## delete .venv and caches of tools; runs/ stays
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; about a minute)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; about two minutes)"
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.train $@

$(VENV)/.gpu: $(VENV)/.train
	$(PIP) pytest pytest-timeout
	@touch $@

$(VENV)/.bench: $(VENV)/.train
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.eval: $(VENV)/.train
	$(PIP) -e '.[eval]'
	@touch $@

$(VENV)/.ui: $(VENV)/.train
	$(PIP) -e '.[ui]'
	@touch $@
