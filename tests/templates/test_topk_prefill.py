"""The kernels of ``ckv::topk_prefill`` against eq. 1 and 2 in float64, on caches that are NaN outside of what is read."""

import math

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.lowering import topk_prefill as lowering
from ckv_compile.testing import random_cache

SINKS, SCALE = 3, 0.3
SMALL = {"BLOCK_M": 32, "BLOCK_N": 32, "GROUPS": 16}  # cells of two keys


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Of the repair, which the interpreter runs one after another."""
    monkeypatch.setattr(lowering, "PROGRAMS", 3)


class Case:
    def __init__(
        self, device, past=0, queries=70, first=(0,), heads=(2, 1), dim=64, value_dim=None, dtype=torch.float32,
        layout="slab", seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.past, self.first = past, list(first)
        used, batch, value_dim = past + queries, len(first), value_dim or dim
        query = torch.randn(batch, queries, heads[0], dim, generator=generator).to(device, dtype)
        self.query = query.transpose(1, 2)
        cache = (batch, heads[1], used + 9)
        self.key = random_cache(*cache, dim, self.first, used, dtype, layout, seed + 1).to(device)
        self.value = random_cache(*cache, value_dim, self.first, used, dtype, layout, seed + 2).to(device)

    def run(self, kappa, sink_logits=None, scale=SCALE, **tuned):
        device = self.query.device
        length, first = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([self.past], self.first))
        return rendered.topk_prefill(
            self.query, self.key[:, :, :1], self.value[:, :, :2], length, first, scale, SINKS, kappa, sink_logits,
            **{**SMALL, **tuned},
        )  # fmt: skip

    def oracle(self, sink_logits=None, scale=SCALE):
        """Output; every query's probability of every key [B, HQ, Q, keys], -1 where it is no candidate; largest score."""
        (batch, heads, queries, _), kv_heads = self.query.shape, self.key.shape[1]
        used = self.past + queries
        position = torch.arange(used)
        query, key, value = (t.cpu().double() for t in (self.query, self.key[:, :, :used], self.value[:, :, :used]))
        out = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
        candidates = torch.full((batch, heads, queries, used), -1.0, dtype=torch.float64)
        largest = 0.0
        for row, begin in enumerate(self.first):
            seen = (position <= self.past + torch.arange(queries)[:, None]) & (position >= begin)
            for head in range(heads):
                kv_head = head * kv_heads // heads
                score = query[row, head] @ key[row, kv_head].nan_to_num().T * scale
                largest = max(largest, score[seen].abs().max().item() if seen.any() else 0.0)
                score = torch.where(seen, score, -torch.inf)
                norm = torch.logsumexp(score, 1)
                if sink_logits is not None:
                    norm = torch.logaddexp(norm, sink_logits[head].cpu().double())
                weight = torch.exp(score - torch.where(norm == -torch.inf, 0.0, norm)[:, None])
                out[row, head] = weight @ value[row, kv_head].nan_to_num()
                candidates[row, head] = torch.where(seen & (position >= begin + SINKS), weight, -1.0)
        return out, candidates, largest

    def check(self, kappa=8, least_equal=1.0, sink_logits=None, scale=SCALE, **tuned):
        """Compare; at least that part of the lists holds the largest weights. Returns the kernel's results."""
        out, neighbor, weight = (t.cpu() for t in self.run(kappa, sink_logits, scale, **tuned))
        want, candidates, largest = self.oracle(sink_logits, scale)
        assert out.dtype == self.query.dtype
        assert neighbor.dtype == torch.int32
        assert out.isfinite().all()
        rounding = 2**-22 * largest  # of a score, a sum of many products, and of its scale: so relative to a weight
        allowed = 1e-6 + rounding if out.dtype == torch.float32 else 3e-3 if out.dtype == torch.bfloat16 else 5e-4
        assert (out.double() - want).norm() <= allowed * want.norm()
        listed = neighbor >= 0
        own = candidates.gather(3, neighbor.clamp(min=0).long())
        assert own[listed].ge(0).all(), "a sink, padding or a later key"
        torch.testing.assert_close(weight.double(), torch.where(listed, own, 0.0), atol=2e-6, rtol=2e-5 + 2 * rounding)
        best = torch.topk(candidates, min(kappa, candidates.shape[3])).values
        best = torch.nn.functional.pad(best, (0, kappa - best.shape[3]), value=-1.0).clamp(min=0)
        assert torch.equal(listed.sum(3), candidates.ge(0).sum(3).clamp(max=kappa)), "as many as there are"
        assert weight.diff(dim=3).le(1e-7).all(), "in order"
        ordered = neighbor.sort(3).values
        assert not (ordered.diff(dim=3).eq(0) & ordered[..., 1:].ge(0)).any(), "a key twice"
        equal = torch.isclose(weight.double(), best, atol=2e-6, rtol=2e-5 + 2 * rounding).all(3)
        assert equal.double().mean() >= least_equal
        return out, neighbor, weight


@pytest.mark.parametrize("topk", ["fast", "exact"])
@pytest.mark.parametrize(
    ("past", "queries", "first"),
    [
        (0, 1, [0]), (0, 5, [0, 3]), (0, 70, [0, 69]), (41, 33, [0, 50]), (64, 32, [0, 32]), (31, 65, [30, 96]),
        (100, 3, [0, 101]), (7, 64, [0, 71]),
    ],
)  # fmt: skip
def test_any_length_and_padding(device, past, queries, first, topk):
    Case(device, past, queries, first).check(least_equal=1.0 if topk == "exact" else 0.85, topk=topk)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (7, 1)])
def test_groups_of_any_size(device, heads):
    Case(device, 9, 40, heads=heads).check(kappa=4, topk="exact")


@pytest.mark.parametrize("layout", ["slab", "static"])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (64, 96)])
def test_every_head_dim(device, dim, value_dim, layout):
    Case(device, 5, 37, dim=dim, value_dim=value_dim, layout=layout).check(kappa=4)


def test_every_dtype(device, dtype):
    Case(device, 5, 40, [0, 9], dtype=dtype).check(kappa=4, topk="exact")


@pytest.mark.parametrize("kappa", [2, 3, 4, 8, 16, 32])
def test_every_kappa(device, kappa):
    Case(device, 0, 80).check(kappa, topk="exact")


@pytest.mark.parametrize("topk", ["fast", "exact"])
@pytest.mark.parametrize("sink", [-math.inf, -3.0, 0.0, 5.0, math.inf])
def test_sink_logit_takes_its_part_of_every_weight(device, sink, topk):
    sinks = torch.full((2,), sink, device=device)
    sinks[1] = 0.25
    Case(device, 11, 33, [0, 30]).check(4, sink_logits=sinks, topk=topk)


@pytest.mark.slow
def test_exact_lists_are_right_where_columns_overflow(device):
    """With one cell kept per column, most rows of a long prompt are wrong, doubtful and repaired."""
    case = Case(device, 0, 200)
    tuned = {"GROUPS": 8, "DEPTH": 1}
    case.check(8, topk="exact", **tuned)
    with pytest.raises(AssertionError):
        case.check(8, **tuned)


def test_fast_lists_are_nearly_always_right(device):
    Case(device, 0, 300).check(8, least_equal=0.95, BLOCK_N=64, GROUPS=32)


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4, 1e15])
def test_scores_of_any_size_keep_their_order(device, size):
    case = Case(device, 3, 60)
    _, candidates, largest = case.oracle(scale=1e-3)
    case.query *= size
    out, neighbor, weight = (t.cpu() for t in case.run(4, topk="exact"))
    assert out.isfinite().all()
    assert weight.ge(0).all()
    assert weight.le(1).all()
    listed = torch.where(neighbor >= 0, candidates.gather(3, neighbor.clamp(min=0).long()), 0.0)
    best = torch.topk(candidates, 4).values.clamp(min=0)
    torch.testing.assert_close(listed, best, atol=0, rtol=1e-6 * largest)


def test_large_scores_of_one_sign_keep_their_order(device):
    """Scores about a common offset, of which the low bits of an entry take a larger part."""
    case = Case(device, 0, 150)
    case.query[..., 0] = -40.0
    case.key[..., 0] = 40.0
    case.check(8, topk="exact", scale=0.1)


def test_constant_keys_give_distinct_neighbours_of_equal_weight(device):
    case = Case(device, 0, 100)
    case.key[:, :, :100] = 1.0
    weight = case.check(4, topk="exact")[2]
    assert torch.equal(weight[0, 0, 50], torch.full((4,), float(weight[0, 0, 50, 0])))


@pytest.mark.parametrize("scale", [-0.3, 0.05])
def test_any_scale(device, scale):
    Case(device, 0, 50).check(4, scale=scale, topk="exact")


def test_descriptors_read_the_same(device):
    case = Case(device, 20, 90, [0, 30], dim=96)
    for plain, described in zip(case.run(4), case.run(4, TMA=True), strict=True):
        assert torch.equal(plain, described)


def test_equal_inputs_give_equal_bits(device):
    case = Case(device, 0, 120)
    tuned = {"topk": "exact", "GROUPS": 8, "DEPTH": 1}
    assert all(torch.equal(a, b) for a, b in zip(case.run(8, **tuned), case.run(8, **tuned), strict=True))


def test_rows_are_as_if_alone(device):
    """A padded row of a batch has the lists of its own sequence, further on."""
    case = Case(device, 0, 60, [0, 25])
    alone = Case(device, 0, 35)
    alone.query, alone.key, alone.value = case.query[1:, :, 25:], case.key[1:, :, 25:], case.value[1:, :, 25:]
    _, both, _ = case.run(4, topk="exact")
    _, own, _ = alone.run(4, topk="exact")
    assert torch.equal(both[1:, :, 25:], torch.where(own >= 0, own + 25, own))


def test_default_configuration(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # blocks of this size hold no float32 on a device
    Case(device, 130, 150, dim=128, dtype=dtype).check(8, least_equal=0.99, BLOCK_M=128, BLOCK_N=128, GROUPS=32)


def test_attention_alone(device):
    case = Case(device, 30, 50, [0, 40])
    out, neighbor, weight = case.run(0)
    assert neighbor is None
    assert weight is None
    assert torch.equal(out, case.run(4)[0])
