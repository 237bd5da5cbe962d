import pytest
import torch
import torch.nn.functional as F

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import nominal_cache, random_cache

prefill_attention = torch.ops.ckv.prefill_attention
TICKET = torch.tensor([-1, 0])


def oracle(query, key, value, past, first, scale, sink_logits=None):
    """Causal attention in float64, one query at a time."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    group_size = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            keys, values = key[row, head // group_size].double(), value[row, head // group_size].double()
            for i in range(query.shape[2]):
                begin, end = first[row], past + i + 1
                if begin >= end:
                    continue
                scores = keys[begin:end] @ query[row, head, i].double() * scale
                norm = torch.logsumexp(scores, 0)
                if sink_logits is not None:
                    norm = torch.logaddexp(norm, sink_logits[head].double())
                out[row, head, i] = torch.exp(scores - norm) @ values[begin:end]
    return out


def case(past, num_queries, first, heads=(6, 2), dim=80, dtype=torch.float32, layout="slab"):
    used = past + num_queries
    torch.manual_seed(0)
    query = torch.randn(len(first), heads[0], num_queries, dim).to(dtype)
    key = random_cache(len(first), heads[1], used + 5, dim, first, used, dtype, layout, seed=1)
    value = random_cache(len(first), heads[1], used + 5, dim, first, used, dtype, layout, seed=2)
    return query, key, value


def run(query, key, value, past, first, scale=0.3, sink_logits=None):
    return prefill_attention(
        query, nominal_cache(key), nominal_cache(value), torch.tensor([past], dtype=torch.int32),
        torch.tensor(first, dtype=torch.int32), TICKET, scale, sink_logits,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["slab", "static"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 3), (12, 4), (7, 1), (8, 2), (8, 1)])
@pytest.mark.parametrize(("past", "num_queries", "first"), [(0, 5, [0]), (32, 5, [0, 0]), (3, 7, [0, 5]), (9, 1, [2])])
def test_output_is_causal_attention_aligned_to_the_lower_right(past, num_queries, first, heads, layout):
    query, key, value = case(past, num_queries, first, heads, layout=layout)
    out = run(query, key, value, past, first)
    torch.testing.assert_close(out.double(), oracle(query, key, value, past, first, 0.3), atol=2e-6, rtol=1e-5)


def test_chunks_equal_the_whole(monkeypatch):
    from ckv_compile.reference import prefill_attention as reference

    query, key, value = case(0, 37, [0])
    whole = run(query, key, value, 0, [0])
    monkeypatch.setattr(reference, "MASK_BYTES", 1)  # one query row per mask
    last = run(query[:, :, 30:], key, value, 30, [0])
    torch.testing.assert_close(last, whole[:, :, 30:])


def test_plain_prompt_is_bit_equal_to_scaled_dot_product_attention():
    query, key, value = case(0, 70, [0, 0])
    want = F.scaled_dot_product_attention(
        query, key[:, :, :70], value[:, :, :70], is_causal=True, scale=0.3, enable_gqa=True
    )
    assert torch.equal(run(query, key, value, 0, [0, 0]), want)


def test_padded_row_equals_its_single_run():
    query, key, value = case(0, 20, [7, 0])
    both = run(query, key, value, 0, [7, 0])
    alone = run(query[:1, :, 7:], key[:1, :, 7:], value[:1, :, 7:], 0, [0])
    assert torch.equal(both[:1, :, 7:], alone)
    assert both[0, :, :7].eq(0).all()


@pytest.mark.parametrize("past", [0, 4])
def test_row_of_pads_only_gives_zeros(past):
    query, key, value = case(past, 3, [past + 3, 0])
    assert run(query, key, value, past, [past + 3, 0])[0].eq(0).all()


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 5.0, torch.inf])
@pytest.mark.parametrize(("past", "first"), [(0, [0, 3]), (6, [0, 8])])
def test_sink_logit_is_a_key_without_a_value(sink, past, first):
    query, key, value = case(past, 9, first)
    sinks = torch.full((6,), sink)
    sinks[0] = 0.5
    out = run(query, key, value, past, first, sink_logits=sinks)
    torch.testing.assert_close(out.double(), oracle(query, key, value, past, first, 0.3, sinks), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)], ids=str)
@pytest.mark.parametrize("sink", [-torch.inf, -3.0, 0.0, 5.0, torch.inf])
def test_sink_logits_keep_the_relative_error(sink, dtype, bound):
    query, key, value = case(6, 9, [0, 8], dtype=dtype)
    sinks = torch.full((6,), sink, dtype=dtype)
    got, want = run(query, key, value, 6, [0, 8], sink_logits=sinks), oracle(query, key, value, 6, [0, 8], 0.3, sinks)
    listed, _, _ = torch.ops.ckv.topk_prefill(
        query, nominal_cache(key), nominal_cache(value), torch.tensor([6]), torch.tensor([0, 8], dtype=torch.int32),
        TICKET, 0.3, 4, 8, sinks,
    )  # fmt: skip
    for out in (got, listed):
        assert (out.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [None, torch.zeros(6)])
def test_low_precision_error_is_bounded_by_one_rounding_of_probabilities_and_output(dtype, sinks):
    query, key, value = case(0, 33, [0], dtype=dtype)
    want = oracle(query, key, value, 0, [0], 0.3, sinks)
    error = (run(query, key, value, 0, [0], sink_logits=sinks).double() - want).abs().max()
    assert error <= 3 * torch.finfo(dtype).eps * value[:, :, :33].abs().max()


def test_output_is_token_major_in_memory():
    query, key, value = case(2, 5, [0])
    assert run(query, key, value, 2, [0]).transpose(1, 2).is_contiguous()


def test_query_heads_must_be_a_multiple_of_kv_heads():
    query, key, value = case(0, 4, [0], heads=(5, 2))
    with pytest.raises(ValueError, match="key must have a number of heads that divides the 5 query heads, got 2"):
        run(query, key, value, 0, [0])


@pytest.mark.parametrize("past", [0, 3])
def test_opcheck(past):
    query, key, value = case(past, 5, [0, 2], dim=8)
    key, value = key.nan_to_num(), value.nan_to_num()
    arguments = (torch.tensor([past]), torch.tensor([0, 2], dtype=torch.int32), TICKET, 0.3, torch.zeros(6))
    torch.library.opcheck(prefill_attention.default, (query, key, value, *arguments))
