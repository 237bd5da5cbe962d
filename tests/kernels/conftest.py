"""Triton's interpreter sorts and scans element by element; whole arrays at a time make small graphs a matter of seconds."""

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from ckv_compile.kernels import token_graph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _sorted(x, dim=None, descending=False):
    assert not descending
    return tl.core.tensor(interpreter.TensorHandle(np.sort(x.handle.data, axis=dim), x.handle.dtype), x.type)


def _scanned(self, inputs):
    """``generic_scan``, whose own calls the combining function once for each element."""
    found = []
    for place in range(inputs[0].handle.data.shape[self.axis]):
        now = tuple(self.to_tensor(np.take(one.handle.data, place, axis=self.axis), one.dtype) for one in inputs)
        found.append(self.combine_fn.fn(*found[-1], *now) if found else now)
    parts = [np.stack([one[number].handle.data for one in found], self.axis) for number in range(len(inputs))]
    return [self.to_tensor(part, one.dtype) for part, one in zip(parts, inputs, strict=True)]


@pytest.fixture
def device(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(tl, "sort", _sorted)
        monkeypatch.setattr(interpreter.ScanOps, "generic_scan", _scanned)
        constants = token_graph.row_constants  # fewer programs, of more rows
        monkeypatch.setattr(token_graph, "row_constants", lambda *shape: constants(*shape) | {"R": 32})
        monkeypatch.setattr(token_graph, "HUB_PARTS", 2)
    return DEVICE
