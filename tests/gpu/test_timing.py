"""What the benches capture is kept alive."""

import pytest
import torch

from bench.timing import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_captured_function_keeps_what_it_reads():
    out = torch.zeros(1 << 20, device="cuda")

    def made():
        source = torch.full((1 << 20,), 3.0, device="cuda")
        return capture(lambda: out.copy_(source), "cuda")

    replay = made()
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
    replay()
    assert out.eq(3).all()
    assert len(others) == 8
