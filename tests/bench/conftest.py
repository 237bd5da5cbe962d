import pytest
import torch

from ckv_compile import backend


@pytest.fixture
def restored(monkeypatch):
    """What the benches change in the process is as before."""
    monkeypatch.setattr(backend, "_compile", backend._compile)
    monkeypatch.setattr(backend, "GraphRunner", backend.GraphRunner)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
