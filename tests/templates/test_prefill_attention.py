"""The kernel of ``ckv::prefill_attention`` against its reference in float64, and when it stands in for torch's own."""

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.kernels import prefill_attention as kernel
from ckv_compile.reference.prefill_attention import prefill_attention as reference
from ckv_compile.testing import random_cache

SMALL = {"BLOCK_M": 32, "BLOCK_N": 32}


def case(device, past, queries, first, heads=(4, 2), dim=64, value_dim=None, dtype=torch.float32):
    used = past + queries
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(len(first), heads[0], queries, dim, generator=generator).to(dtype)
    key, value = (
        random_cache(len(first), heads[1], used + 5, size, first, used, dtype, seed=seed)
        for seed, size in ((1, dim), (2, value_dim or dim))
    )
    return [t.to(device) for t in (query, key, value)]


def check(query, key, value, past, first, sink_logits=None, state="cpu"):
    length, first = torch.tensor([past], device=state), torch.tensor(first, device=state)
    out = kernel.prefill_attention(
        query, key[:, :, :1], value[:, :, :2], length, first, 0.3, sink_logits, **SMALL
    ).cpu()
    wide = [t.cpu().double() for t in (query, key, value)]
    sinks = None if sink_logits is None else sink_logits.cpu()
    want = reference(*wide, length.cpu(), first.cpu(), 0.3, sinks)
    assert out.dtype == query.dtype
    assert out.transpose(1, 2).is_contiguous()
    allowed = 1e-6 if out.dtype == torch.float32 else 3e-3 if out.dtype == torch.bfloat16 else 5e-4
    assert (out.double() - want).norm() <= allowed * want.norm()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("past", "queries", "first"),
    [(0, 70, [0]), (33, 40, [0, 50]), (64, 1, [0, 3]), (20, 5, [24, 25]), (0, 40, [40, 7])],
)
def test_later_turns_padding_and_sinks(device, past, queries, first, sinks):
    tensors = case(device, past, queries, first)
    check(*tensors, past, first, torch.tensor([0.0, -torch.inf, 3.0, torch.inf], device=device) if sinks else None)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 80), (96, 96), (128, 128), (256, 256)])
def test_every_head_dim(device, dim, value_dim):
    check(*case(device, 9, 40, [0], (2, 1), dim, value_dim), 9, [0])


def test_every_dtype(device, dtype):
    check(*case(device, 9, 40, [0, 11], dtype=dtype), 9, [0, 11])


def test_length_may_be_on_the_device(device):
    check(*case(device, 9, 40, [0]), 9, [0], state=device)


def test_torch_attends_where_it_knows_how():
    query, value = torch.zeros(2, 4, 9, 64), torch.zeros(2, 2, 1, 64)
    none, some = torch.tensor([0, 0]), torch.tensor([0, 2])

    def applies(length, first, sinks=None, tensor=query):
        return kernel.applies(tensor, value, torch.tensor([length]), first, sinks)

    assert not applies(0, none)
    assert applies(0, none, torch.zeros(4))
    assert applies(0, some)
    assert applies(7, none)
    assert not applies(7, none, tensor=query[:, :, :1])
    assert not applies(7, none, tensor=query.double())
    assert not applies(7, none, tensor=torch.zeros(2, 4, 9, 512))
