"""The kernel of grouped linear layers, and the CUDA code of graphs that use it."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F

from ckv_compile import rendered
from ckv_compile.fake_cuda import generated_code
from ckv_compile.lowering import grouped_linear as lowering

grouped = torch.ops.ckv.grouped_linear


def surrounded(*shape, dtype, device):
    """A contiguous random tensor between NaNs, aligned to 16 bytes."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 128,), torch.nan, dtype=dtype, device=device)
    own = memory[64 : 64 + size].view(shape)
    return own.copy_(torch.randn(shape, device=device))


@pytest.mark.parametrize("channels", [64, 100, 1030])
@pytest.mark.parametrize("sizes", [(40,), (37, 16, 5), (8, 8, 21, 1)])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_products_of_ragged_sizes(device, dtype, rows, sizes, channels):
    made = functools.partial(surrounded, dtype=dtype, device=device)
    torch.manual_seed(0)
    x, weights = made(rows, channels), [made(size, channels) / channels**0.5 for size in sizes]
    biases = [made(size) if size % 2 else None for size in sizes]
    expected = [
        F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    out = rendered.grouped_linear(x, weights, biases)
    torch.testing.assert_close(out.double(), torch.cat(expected, -1), **close)


@pytest.mark.parametrize("rows", [1, 2])
def test_every_configuration_computes_the_same(device, rows):
    torch.manual_seed(0)
    x, weights = torch.randn(rows, 1500, device=device), [torch.randn(n, 1500, device=device) for n in (9, 3)]
    expected = F.linear(x.double(), torch.cat(weights).double())
    for tuned in lowering.configs(rows, 1500, x.dtype):
        out = rendered.grouped_linear(x, weights, **tuned)
        torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-4)


# ---------------------------------------------------------------------- what Inductor writes


def layer(norm, query, key, value, bias, out, gate, up, down, x):
    """The linear layers of a decoder layer without its attention."""
    y = F.rms_norm(x, x.shape[-1:], norm)
    q, k, v = grouped(y, [query, key, value], [None, bias, None]).split([64, 32, 32], -1)
    x = x + grouped(q * k.repeat(1, 1, 2) + v.repeat(1, 1, 2), [out], [None])
    gated, raised = grouped(F.rms_norm(x, x.shape[-1:], norm), [gate, up], [None, None]).split([96, 96], -1)
    return x + grouped(F.silu(gated) * raised, [down], [None])


def code_of(rows=1, contiguous=True):
    def arguments():
        shapes = [(64,), (64, 64), (32, 64), (32, 64), (32,), (64, 64), (96, 64), (96, 64), (64, 96), (rows, 1, 64)]
        strides = [(1, shape[0]) if len(shape) == 2 and not contiguous else None for shape in shapes]
        return [
            torch.empty(shape, device="cuda", dtype=torch.bfloat16) if stride is None
            else torch.empty_strided(shape, stride, device="cuda", dtype=torch.bfloat16)
            for shape, stride in zip(shapes, strides, strict=True)
        ]  # fmt: skip

    return generated_code(lambda *given: layer(*given), arguments)


@pytest.mark.parametrize("rows", [1, 4])
def test_weights_are_neither_copied_nor_joined(rows):
    code = code_of(rows)
    call = code[code.index("def call(") :]
    launches = re.findall(r"triton_tem_\w+\.run\((.*?), stream=", call)
    assert [re.findall(r"\barg(\d+)_1", arguments)[:3] for arguments in launches[:-1]] == [
        ["1", "2", "3"],
        ["5"],
        ["6", "7"],
    ]
    assert len(launches) == 4
    assert re.findall(r"\barg(\d+)_1", launches[-1]) == ["8", "9"]  # the residual is added by the kernel
    assert "extern_kernels" not in call
    assert not re.search(r"\.copy_\(|\.clone\(|ops\.ckv", call)
    made = re.findall(r"empty_strided_cuda\((\([^)]*\))", call)
    largest = max(torch.Size(map(int, re.findall(r"\d+", size))).numel() for size in made)
    assert largest <= rows * 192, made  # no matrix has a copy


@pytest.mark.parametrize(("rows", "contiguous"), [(17, True), (1, False)])
def test_other_linears_are_left_to_torch(rows, contiguous):
    code = code_of(rows, contiguous=contiguous)
    assert "ckv.grouped_linear" in code
    assert "triton_tem" not in code
