"""End-to-end tests: real transformers models with random weights, through the backend."""

import gc

import pytest
import torch

import ckv_compile
from ckv_compile import backend, report


@pytest.fixture(autouse=True)
def fresh_process_state():
    torch._dynamo.reset()
    report._entries.clear()
    report._warned.clear()
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit  # transformers 5.17 raises it for a prompt in chunks


@pytest.fixture
def no_cache_of_another_test():
    gc.collect()
    ckv_compile.free_memory()
    yield
    gc.collect()
    ckv_compile.free_memory()


@pytest.fixture
def interpreted(monkeypatch):
    """Run rewritten graphs node by node: everything of ours runs, Inductor's compile time does not."""
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)


@pytest.fixture
def compilations(monkeypatch):
    """Plans of the graphs that were rewritten, in order."""
    plans = []
    original = backend.GraphRunner.__init__

    def record(self, plan, *args):
        plans.append(plan)
        original(self, plan, *args)

    monkeypatch.setattr(backend.GraphRunner, "__init__", record)
    return plans
