import pytest
import torch
import torch.nn.functional as F

import ckv_compile.ops  # noqa: F401

grouped_linear = torch.ops.ckv.grouped_linear


@pytest.mark.parametrize("lead", [(), (3,), (2, 1)])
@pytest.mark.parametrize("sizes", [(5,), (4, 2, 2), (3, 3, 1, 7, 2)])
def test_linears_stand_side_by_side(lead, sizes):
    x, weights = torch.randn(*lead, 8), [torch.randn(size, 8) for size in sizes]
    biases = [torch.randn(size) if size % 2 else None for size in sizes]
    out = grouped_linear(x, weights, biases)
    assert out.shape == (*lead, sum(sizes))
    for own, weight, bias in zip(out.split(sizes, -1), weights, biases, strict=True):
        assert torch.equal(own, F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.tensor(1.0)}, "input must have at least one dimension"),
        ({"weights": [], "biases": []}, "weights must hold at least one matrix, got 0"),
        ({"biases": [None]}, "biases must hold 2, one per matrix or None, got 1"),
        ({"weights": [torch.zeros(4, 8), torch.zeros(4, 7)]}, r"weights must be \[any, 8\], got \(4, 7\)"),
        ({"weights": [torch.zeros(4, 8), torch.zeros(4, 8).double()]}, "weights must have input's dtype torch.float32"),
        ({"biases": [None, torch.zeros(3)]}, r"biases must be \[4\], got \(3,\)"),
        ({"biases": [None, torch.zeros(4).half()]}, "biases must have input's dtype torch.float32, got torch.float16"),
    ],
)
def test_invalid_argument_is_named(change, message):
    arguments = {"input": torch.zeros(1, 8), "weights": [torch.zeros(4, 8)] * 2, "biases": [None, None]}
    with pytest.raises(ValueError, match=message):
        grouped_linear(**{**arguments, **change})


def test_opcheck():
    weights = [torch.randn(4, 8), torch.randn(3, 8)]
    torch.library.opcheck(grouped_linear.default, (torch.randn(2, 1, 8), weights, [None, torch.randn(3)]))
