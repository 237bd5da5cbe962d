"""Which devices attention is rewritten for: by capability, never by name."""

import ast
from pathlib import Path

import pytest
import torch

import ckv_compile
from ckv_compile.backend import device_reason


@pytest.mark.parametrize(("capability", "supported"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True),
                                                       ((10, 0), True), ((12, 1), True)])  # fmt: skip
def test_a_gpu_is_judged_by_its_compute_capability(monkeypatch, capability, supported):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = device_reason(torch.device("cuda", 0))
    assert (reason is None) == supported
    if not supported:
        assert "7.5" in reason
        assert "8.0" in reason


def test_other_devices_are_refused_with_their_name():
    assert device_reason(torch.device("cpu")) is None
    assert "mps" in device_reason(torch.device("mps"))


def test_no_source_asks_for_the_name_of_a_device():
    root = Path(ckv_compile.__file__).parent
    asks = [
        path.name
        for path in [*root.rglob("*.py"), *(root.parent / "passes").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("get_device_name", "name") and "cuda" in ast.unparse(node)
    ]
    assert asks == []
