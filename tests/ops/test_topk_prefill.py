import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.reference import causal_blocks
from ckv_compile.reference.top_entries import top_entries
from ckv_compile.testing import nominal_cache, random_cache

topk_prefill = torch.ops.ckv.topk_prefill
TICKET = torch.tensor([-1, 0])


def case(past, num_queries, first, heads=(6, 2), dim=80, dtype=torch.float32):
    used = past + num_queries
    torch.manual_seed(0)
    query = torch.randn(len(first), heads[0], num_queries, dim).to(dtype)
    key = random_cache(len(first), heads[1], used + 5, dim, first, used, dtype, seed=1)
    value = random_cache(len(first), heads[1], used + 5, dim, first, used, dtype, seed=2)
    return query, key, value


def run(query, key, value, past, first, num_sink_tokens, kappa, sink_logits=None, scale=0.3):
    return topk_prefill(
        query, nominal_cache(key), nominal_cache(value), torch.tensor([past]), torch.tensor(first, dtype=torch.int32),
        TICKET, scale, num_sink_tokens, kappa, sink_logits,
    )  # fmt: skip


def check(query, key, value, past, first, num_sink_tokens, kappa, sink_logits=None, scale=0.3):
    """Eq. 1 and 2 in float64, row by row."""
    out, neighbor, weight = run(query, key, value, past, first, num_sink_tokens, kappa, sink_logits, scale)
    assert neighbor.dtype == torch.int32
    assert weight.dtype == torch.float32
    group_size = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            keys, values = key[row, head // group_size].double(), value[row, head // group_size].double()
            for i in range(query.shape[2]):
                begin, end = first[row], past + i + 1
                listed, weights = neighbor[row, head, i].tolist(), weight[row, head, i].double()
                if begin >= end:
                    assert listed == [-1] * kappa
                    assert out[row, head, i].eq(0).all()
                    continue
                scores = keys[begin:end] @ query[row, head, i].double() * scale
                norm = torch.logsumexp(scores, 0)
                if sink_logits is not None:
                    norm = torch.logaddexp(norm, sink_logits[head].double())
                alpha = torch.exp(scores - norm)
                torch.testing.assert_close(out[row, head, i].double(), alpha @ values[begin:end], atol=2e-6, rtol=1e-5)
                candidates = list(range(begin + num_sink_tokens, end))
                expected = min(kappa, len(candidates))
                assert listed[expected:] == [-1] * (kappa - expected)
                assert weights[expected:].eq(0).all()
                assert len(set(listed[:expected])) == expected
                assert set(listed[:expected]) <= set(candidates)
                best = alpha[num_sink_tokens:].sort(descending=True).values[:expected]
                torch.testing.assert_close(weights[:expected], best, atol=1e-6, rtol=1e-5)
                own = torch.stack([alpha[j - begin] for j in listed[:expected]]) if expected else best
                torch.testing.assert_close(weights[:expected], own, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [(3, 3), (6, 3), (7, 1), (8, 2)])
@pytest.mark.parametrize(
    ("past", "num_queries", "first", "sinks", "kappa"),
    [(0, 5, [0], 2, 8), (11, 5, [0, 3], 4, 3), (3, 7, [0, 5], 0, 1), (0, 6, [2, 6], 10, 4)],
)
def test_lists_hold_the_strongest_keys_of_the_causal_row(past, num_queries, first, sinks, kappa, heads):
    check(*case(past, num_queries, first, heads), past, first, sinks, kappa)


def test_blocks_of_queries_agree_with_one_block(monkeypatch):
    arguments = (*case(5, 40, [0]), 5, [0], 3, 4)
    whole = run(*arguments)
    monkeypatch.setattr(causal_blocks, "SCORES_PER_BLOCK", 3 * 45 * 7)  # seven rows
    for a, b in zip(run(*arguments), whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 5.0, torch.inf])
def test_sink_logit_takes_its_part_of_every_weight(sink):
    check(*case(2, 6, [0, 1]), 2, [0, 1], 2, 3, torch.full((6,), sink))


def test_constant_keys_give_distinct_neighbours_of_equal_weight():
    query, key, value = case(0, 200, [0], heads=(2, 1), dim=8)
    key[:, :, :200] = 1.0
    first = run(query, key, value, 0, [0], 4, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, run(query, key, value, 0, [0], 4, 3), strict=True))
    for i in (6, 7, 100, 199):
        listed = first[1][0, 0, i].tolist()
        assert len(set(listed)) == 3
        assert all(4 <= j <= i for j in listed)
        torch.testing.assert_close(first[2][0, 0, i], torch.full((3,), 1 / (i + 1)))


@pytest.mark.parametrize("size", [5, 31, 128, 129, 1000, 4097])
@pytest.mark.parametrize("count", [1, 8])
def test_top_entries_equal_topk(size, count):
    scores = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size))
    scores[1] = scores[1].round()  # ties
    scores[2, 0, 3:] = -torch.inf
    values, columns = top_entries(scores, count)
    want = torch.topk(scores, min(count, size)).values
    assert torch.equal(values, want)
    assert torch.equal(scores.gather(-1, columns)[want > -torch.inf], want[want > -torch.inf])
    assert columns.sort(-1).values.diff(dim=-1).ne(0)[:2].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_scored_in_float32(dtype):
    query, key, value = case(0, 40, [0], dtype=dtype)
    low = run(query, key, value, 0, [0], 2, 4)
    exact = run(query.float(), key.float(), value.float(), 0, [0], 2, 4)
    assert torch.equal(low[1], exact[1])
    torch.testing.assert_close(low[2], exact[2])
    assert torch.equal(low[0], exact[0].to(dtype))


def test_kappa_below_one_raises():
    with pytest.raises(ValueError, match="kappa must be at least 1, got 0"):
        run(*case(0, 4, [0]), 0, [0], 2, 0)


def test_an_unknown_selection_raises():
    query, key, value = case(0, 4, [0])
    with pytest.raises(ValueError, match="topk must be 'fast' or 'exact', got 'best'"):
        topk_prefill(query, key, value, torch.tensor([0]), torch.tensor([0]), TICKET, 0.3, 2, 3, None, "best")


@pytest.mark.parametrize("topk", ["fast", "exact"])
def test_opcheck(topk):
    query, key, value = case(3, 5, [0, 2], dim=8)
    arguments = (torch.tensor([3]), torch.tensor([0, 2], dtype=torch.int32), TICKET, 0.3, 2, 3, None, topk)
    torch.library.opcheck(topk_prefill.default, (query, key.nan_to_num(), value.nan_to_num(), *arguments))
