"""Prefill on a GPU: compiled operators against their references, lengths that change, and an unmodified generate."""

import math

import pytest
import torch

import ckv_compile
import ckv_compile.lowering
from ckv_compile.reference.key_neighbors import key_neighbors as reference_neighbors
from ckv_compile.reference.topk_prefill import topk_prefill as reference_lists
from ckv_compile.testing import prompt, random_cache, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ckv = torch.ops.ckv
SCALE, SINKS = 0.1, 10
LARGEST_ERROR = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}  # relative L2 distance to float64


def caches(batch, heads, used, dim, first, dtype):
    return [random_cache(batch, heads, used + 7, dim, first, used, dtype, seed=seed).cuda() for seed in (1, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_exact_lists_are_those_of_the_reference_at_every_length(dim, dtype):
    torch._dynamo.reset()

    @torch.compile(dynamic=True, fullgraph=True)
    def lists(query, key, value, length, first, ticket):
        return ckv.topk_prefill(query, key, value, length, first, ticket, SCALE, SINKS, 8, None, "exact")

    for past, queries, first in ((0, 70, [0, 0]), (40, 333, [0, 50]), (1000, 1025, [3, 1500])):
        key, value = caches(2, 2, past + queries, dim, first, dtype)
        query = torch.randn(2, queries, 6, dim, device="cuda").to(dtype).transpose(1, 2)
        state = torch.tensor([past], dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
        nominal = key[:, :, :1], value[:, :, :1]
        out, neighbor, weight = lists(query, *nominal, *state, torch.tensor([-1, 0]))
        want = reference_lists(query, *nominal, *state, SCALE, SINKS, 8, None)
        tolerance = 3e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert (out - want[0]).norm() <= tolerance * want[0].norm()
        torch.testing.assert_close(weight, want[2], atol=1e-5, rtol=1e-4)
        assert torch.equal(neighbor >= 0, want[1] >= 0)
        assert (neighbor == want[1]).double().mean() > 0.999, "but for ties"


@pytest.mark.parametrize("block_size", [0, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_key_neighbors_are_those_of_the_reference(dtype, block_size):
    key, _ = caches(2, 3, 2000, 128, [0, 700], dtype)
    arguments = (key[:, :, :1], torch.tensor([0, 700]), 64, 2000, 8, SINKS, False, block_size)
    found, want = ckv.key_neighbors(*arguments), reference_neighbors(*arguments)
    assert torch.equal(found >= 0, want >= 0)
    assert (found == want).double().mean() > 0.999, "but for ties"


@torch.compile(dynamic=True, fullgraph=True)
def with_lists(query, key, value, length, first, ticket, scale, sink_logits, topk):
    return ckv.topk_prefill(query, key, value, length, first, ticket, scale, SINKS, 8, sink_logits, topk)[0]


@pytest.mark.parametrize("sink", [None, -math.inf, -3.0, 0.0, 5.0, math.inf])
@pytest.mark.parametrize("dtype", LARGEST_ERROR, ids=str)
@pytest.mark.parametrize(("past", "first"), [(0, [0, 0]), (0, [0, 200]), (777, [0, 0]), (777, [0, 800])])
def test_prefill_attention_is_that_of_float64(past, first, dtype, sink):
    torch._dynamo.reset()  # of a function it compiles eight forms at most
    key, value = caches(2, 2, past + 300, 128, first, dtype)
    query = torch.randn(2, 6, 300, 128, device="cuda").to(dtype)
    sink_logits = None if sink is None else torch.tensor([sink, 0.25, -1.0, 2.0, sink, 0.0], device="cuda")
    state = torch.tensor([past], dtype=torch.int32), torch.tensor(first, dtype=torch.int32), torch.tensor([-1, 0])
    wide = [t.cpu().double() for t in (query, key, value)]
    want = ckv.prefill_attention(*wide, *state, SCALE, None if sink_logits is None else sink_logits.cpu())
    nominal = query, key[:, :, :1], value[:, :, :1], *state, SCALE
    found = {"attention": ckv.prefill_attention(*nominal, sink_logits)}
    for topk in ("fast", "exact"):
        found[topk] = with_lists(*nominal, sink_logits, topk)
    for name, out in found.items():
        error = (out.cpu().double() - want).norm() / want.norm()
        assert error <= LARGEST_ERROR[dtype], name


@pytest.mark.parametrize("topk", ["fast", "exact"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_the_attention_graph(padded, topk):
    torch._dynamo.reset()
    model = tiny_model("llama").cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(2, tokens=200, padded=padded).items()}
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    options = {"graph": "attention", "topk": topk, "min_context": 0, "workers": 0, "strict": True}
    module = torch.compile(model, backend="communitykv", options=options)
    assert torch.equal(module.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    assert ckv_compile.explain(module, show=False).graphs
    torch._dynamo.reset()
