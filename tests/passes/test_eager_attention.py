"""Attention written out with two products and a softmax: what is taken for it, and near misses that are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.passes.match_attention import AttentionSite, Cache, find_sites
from ckv_compile.testing import capture_call

HEADS, KV_HEADS, DIM, PAST = 4, 2, 16, 6
LEAST = torch.finfo(torch.float32).min


class Eager:
    """Attention with learned sinks over a growing cache; its pieces can be replaced one at a time."""

    def repeat(self, cache: Tensor) -> Tensor:
        rows, heads, tokens, dim = cache.shape
        return cache[:, :, None].expand(rows, heads, 2, tokens, dim).reshape(rows, heads * 2, tokens, dim)

    def product(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(query, key.transpose(2, 3))

    def scale(self, scores: Tensor) -> Tensor:
        return scores * 0.25

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def mask(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(allowed, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    def masked(self, scores: Tensor) -> Tensor:
        queries, keys = scores.shape[2:]
        query = torch.arange(queries)[:, None] + keys - queries
        return scores + self.mask(self.sees(query, torch.arange(keys)[None, :])[None, None], scores.dtype)

    def column(self, sinks: Tensor, query: Tensor) -> Tensor:
        return sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)

    def weights(self, scores: Tensor, sinks: Tensor) -> Tensor:
        joined = torch.cat([scores, sinks], dim=-1)
        joined = joined - joined.max(dim=-1, keepdim=True).values
        return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, p=0.0, training=False)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> Tensor:
        key, value = self.repeat(keys), self.repeat(values)
        scores = self.masked(self.scale(self.product(query, key)))
        return torch.matmul(self.drop(self.weights(scores, self.column(sinks, query))).to(value.dtype), value)

    def __call__(self, query, key, value, past_key, past_value, sinks) -> tuple[Tensor, ...]:
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        return self.attend(query, keys, values, sinks), keys, values


class Plain(Eager):
    """The same without sinks, as most models have it."""

    def weights(self, scores: Tensor, sinks: Tensor) -> Tensor:
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def examine(attention: Eager, tokens: int = 3, dtype: torch.dtype = torch.float32) -> AttentionSite | str:
    """The site of the only attention, or why it was refused."""
    new = [torch.randn(2, heads, tokens, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    past = [torch.randn(2, KV_HEADS, PAST, DIM, dtype=dtype) for _ in range(2)]
    captured = capture_call(lambda *inputs: attention(*inputs), *new, *past, torch.randn(HEADS, dtype=dtype))
    sites, refusals = find_sites(captured.gm)
    assert len(sites) + len(refusals) == 1
    return sites[0] if sites else refusals[0].reason


def variant(base: type = Eager, **methods) -> Eager:
    return type("Variant", (base,), methods)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("attention", [Eager, Plain])
def test_the_unchanged_attention_matches(attention, tokens, dtype):
    site = examine(attention(), tokens, dtype)
    assert (site.cache, site.is_decode, site.scale, site.dtype) == (Cache.DYNAMIC, tokens == 1, 0.25, dtype)
    assert (site.num_query_heads, site.num_kv_heads, site.head_dim) == (HEADS, KV_HEADS, DIM)
    assert site.node.target is torch.matmul
    assert (site.sink_logits is not None) is (attention is Eager)


SAME = {
    "division": (Plain, {"scale": lambda self, scores: scores / 4}),
    "number first": (Plain, {"scale": lambda self, scores: 0.25 * scores}),
    "where the other way round": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(~allowed, LEAST, torch.zeros((), dtype=dtype))}),
    "a tensor of one number": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, torch.tensor(0.0), torch.tensor(LEAST))}),
    "minus infinity": (Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, 0.0, -torch.inf)}),
    "operator": (Plain, {"product": lambda self, query, key: query @ key.transpose(-1, -2)}),
    "softmax in its own dtype": (Plain, {"weights": lambda self, scores, sinks: scores.softmax(-1)}),
    "converted before": (Plain, {"weights": lambda self, scores, sinks: scores.float().softmax(-1)}),
    "dropout while training with p = 0": (Plain, {"drop": lambda self, weights: F.dropout(weights, 0.0, True)}),
    "dropout of p = 0.1 in inference": (Plain, {"drop": lambda self, weights: F.dropout(weights, 0.1, False)}),
    "no dropout": (Plain, {"drop": lambda self, weights: weights}),
    "maximum subtracted without sinks": (
        Plain, {"weights": lambda self, s, sinks: (s - s.amax(-1, keepdim=True)).softmax(-1)}),
    "sinks without a maximum": (
        Eager, {"weights": lambda self, s, sinks: torch.cat([s, sinks], -1).softmax(-1)[:, :, :, :-1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_same_meaning_matches_however_it_is_written(name):
    base, methods = SAME[name]
    site = examine(variant(base, **methods))
    assert isinstance(site, AttentionSite), site
    assert site.scale == 0.25


NEAR_MISSES = {
    "softmax over queries": (
        Plain, {"weights": lambda self, s, sinks: s.softmax(-2)}, "softmax over dimension -2"),
    "softmax in float64": (
        Plain, {"weights": lambda self, s, sinks: F.softmax(s, -1, dtype=torch.float64).float()}, "softmax in float64"),
    "weights rounded": (
        Plain, {"weights": lambda self, s, sinks: s.softmax(-1).half().float()}, "rounded to another dtype"),
    "weights scaled": (Plain, {"drop": lambda self, weights: weights * 2}, "weights are changed by mul"),
    "dropout": (Plain, {"drop": lambda self, weights: F.dropout(weights, 0.1, True)}, "dropout_p is 0.1"),
    "weights returned": (
        Plain, {"attend": lambda self, *a: self.twice(*a), "twice": lambda self, q, k, v, s: _returning(self, q, k, v)},
        "the attention weights are read by 2 nodes"),
    "scale is a tensor": (
        Plain, {"scale": lambda self, s: s * torch.ones(HEADS, 1, 1)}, "scaled by a tensor"),
    "scaled after the mask": (
        Plain, {"masked": lambda self, s: Eager.masked(self, s) * 0.5}, "scale and a mask"),
    "softcapped": (Plain, {"scale": lambda self, s: torch.tanh(s * 0.25 / 30) * 30}, "softcapping"),
    "softcapped after the mask": (
        Plain, {"masked": lambda self, s: torch.tanh(Eager.masked(self, s))}, "softcapping"),
    "a bias beside the mask": (
        Plain, {"scale": lambda self, s: s * 0.25 + torch.arange(s.shape[3])}, "scale and a mask (add)"),
    "a bias for a mask": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, 0.0, -10.0)}, "zero or the least number"),
    "a bias where keys are seen": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, 1.0, LEAST)}, "zero or the least number"),
    "a tensor of another number": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, torch.tensor(1.0), LEAST)},
        "zero or the least number"),
    "zeros that are written": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, torch.zeros(()).add_(1), LEAST)},
        "zero or the least number"),
    "a bool for a mask": (Plain, {"mask": lambda self, allowed, dtype: allowed}, "adds bool numbers"),
    "a mask with a hole": (
        Plain, {"sees": lambda self, query, key: (key <= query) & (key != 2)}, "not a causal rule"),
    "a mask of seen keys, added as if they were not": (
        Plain, {"mask": lambda self, allowed, dtype: torch.where(allowed, LEAST, 0.0)}, "mask"),
    "a window": (Plain, {"sees": lambda self, query, key: (key <= query) & (key > query - 4)}, "last 4 tokens"),
    "no mask": (Plain, {"masked": lambda self, s: s}, "every query sees every key"),
    "keys not transposed but reshaped": (
        Plain, {"product": lambda self, q, k: q @ k.reshape(2, HEADS, DIM, -1)}, "transposed in another way"),
    "scores used elsewhere": (
        Plain, {"weights": lambda self, s, sinks: s.softmax(-1) * s.logsumexp(-1, True)}, "also read by"),
    "in place": (Plain, {"scale": lambda self, s: s.mul_(0.25)}, "scale and a mask (mul_)"),
    "sinks twice": (
        Eager, {"weights": lambda self, s, sinks: Eager.weights(self, torch.cat([s, sinks], -1), sinks)[..., :-1]},
        "weights are changed by getitem"),
    "sinks first": (
        Eager, {"weights": lambda self, s, sinks: torch.cat([sinks, s], -1).softmax(-1)[..., 1:]}, "getitem"),
    "first column dropped": (
        Eager, {"weights": lambda self, s, sinks: torch.cat([s, sinks], -1).softmax(-1)[..., 1:]}, "getitem"),
    "sinks of every query": (
        Eager, {"column": lambda self, sinks, q: sinks.reshape(1, -1, 1, 1).expand(2, -1, q.shape[2], -1) * 2},
        "one logit per head"),
    "sinks of rows": (
        Eager, {"column": lambda self, sinks, q: sinks[None].expand(2, -1).reshape(2, -1, 1, 1).expand(-1, -1, 3, -1)},
        "one logit per head"),
    "another maximum": (
        Eager, {"weights": lambda self, s, sinks: (lambda x: (x - x.amax(-2, keepdim=True)).softmax(-1)[..., :-1])(
            torch.cat([s, sinks], -1))}, "something else than each row's maximum"),
    "half of the maximum": (
        Eager, {"weights": lambda self, s, sinks: (lambda x: (x - x.amax(-1, keepdim=True) / 2).softmax(-1)[..., :-1])(
            torch.cat([s, sinks], -1))}, "something else than each row's maximum"),
}  # fmt: skip


def _returning(attention: Eager, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    weights = attention.masked(attention.scale(attention.product(query, attention.repeat(keys)))).softmax(-1)
    return weights @ attention.repeat(values) + weights.mean()


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_refused_with_its_reason(name):
    base, methods, reason = NEAR_MISSES[name]
    found = examine(variant(base, **methods))
    assert isinstance(found, str), f"{name} was matched"
    assert reason in found


def test_a_query_that_is_written_between_the_products_is_refused():
    def attend(self, query, keys, values, sinks):
        weights = self.masked(self.product(query, self.repeat(keys))).softmax(-1)
        query.zero_()
        return weights @ self.repeat(values)

    assert "written in place in the middle" in examine(variant(Plain, attend=attend))


def test_returned_weights_and_scores_are_refused():
    def weights_too(self, query, keys, values, sinks):
        weights = self.masked(self.product(query, self.repeat(keys))).softmax(-1)
        return weights @ self.repeat(values), weights

    def scores_too(self, query, keys, values, sinks):
        scores = self.masked(self.product(query, self.repeat(keys)))
        return scores.softmax(-1) @ self.repeat(values), scores

    assert "output_attentions" in examine(variant(Plain, attend=weights_too))
    assert "are returned too" in examine(variant(Plain, attend=scores_too))
