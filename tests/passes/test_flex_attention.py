"""flex_attention: what is understood of its mask and its scores, and what is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ckv_compile.config import CommunityConfig
from ckv_compile.passes.match_attention import AttentionSite, Cache, find_sites
from ckv_compile.testing import RewrittenCache, capture_call, rewritten, rewritten_text

HEADS, KV_HEADS, DIM, PAST = 4, 2, 16, 6


def attend(query, key, value, past_key, past_value, block_mask, score_mod=None):
    keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
    out = flex_attention(query, keys, values, score_mod, block_mask, enable_gqa=True, scale=0.25)
    return out, keys, values


def block_mask(mask_mod, tokens: int, batch: int | None = None) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, tokens, PAST + tokens, device="cpu")


def causal(batch, head, query, key):
    return key <= query + PAST


def examine(mask_mod=causal, tokens: int = 3, function=attend, **arguments) -> AttentionSite | str:
    """The site of the only attention, or why it was refused."""
    new = [torch.randn(2, heads, tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    past = [torch.randn(2, KV_HEADS, PAST, DIM) for _ in range(2)]
    mask = None if mask_mod is None else block_mask(mask_mod, tokens)
    sites, refusals = find_sites(capture_call(function, *new, *past, mask, **arguments).gm)
    assert len(sites) + len(refusals) == 1
    return sites[0] if sites else refusals[0].reason


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_causal_block_mask_matches_and_names_its_block_lists(tokens):
    site = examine(tokens=tokens)
    assert (site.cache, site.is_decode, site.scale) == (Cache.DYNAMIC, tokens == 1, 0.25)
    assert (site.num_query_heads, site.num_kv_heads) == (HEADS, KV_HEADS)
    assert (site.offset, site.padding, site.mask) == (None, None, None)
    assert (site.blocks.query_block, site.blocks.key_block) == (128, 128)
    assert site.blocks.kv_indices.op == site.blocks.full_kv_indices.op == "placeholder"


def test_padding_is_a_tensor_that_the_mask_reads():
    padding = torch.ones(2, PAST + 3, dtype=torch.bool)
    site = examine(lambda batch, head, query, key: (key <= query + PAST) & padding[batch, key])
    assert tuple(site.padding.meta["example_value"].shape) == (2, PAST + 3)


MASKS = {
    "shifted": (lambda b, h, q, k: k <= q + PAST + 1, "shifted by 1"),
    "from the first key": (lambda b, h, q, k: k <= q, "sees keys 0..i"),
    "a window": (lambda b, h, q, k: (k <= q + PAST) & (k > q + PAST - 4), "only the last 4 tokens"),
    "of a head": (lambda b, h, q, k: (k <= q + PAST) & (k >= h), "not a causal rule"),
    "a prefix": (lambda b, h, q, k: (k <= q + PAST) | (k < 2), "more than the causal rule"),
    "none": (lambda b, h, q, k: (k >= 0) & (q >= 0), "also see keys after"),
}


@pytest.mark.parametrize("name", MASKS)
def test_another_mask_is_refused(name):
    mask_mod, reason = MASKS[name]
    found = examine(mask_mod)
    assert isinstance(found, str)
    assert reason in found


def test_no_block_mask_and_one_made_in_the_graph_are_refused():
    def made_here(query, key, value, past_key, past_value, _):
        mask = create_block_mask(causal, None, None, 3, PAST + 3, device="cpu")
        return attend(query, key, value, past_key, past_value, mask)

    assert "without a block mask" in examine(None)
    assert "made in the same graph" in examine(function=made_here)


def test_scores_that_a_score_mod_changes_are_refused():
    assert "softcapping" in examine(score_mod=lambda score, b, h, q, k: torch.tanh(score / 20) * 20)
    assert "score_mod" in examine(score_mod=lambda score, b, h, q, k: score + (q - k))


def with_logsumexp(query, key, value, past_key, past_value, block_mask, read: bool) -> tuple[Tensor, ...]:
    keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
    options = {"block_mask": block_mask, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    out, aux = flex_attention(query, keys, values, **options)
    logsumexp = aux.lse.to(value.dtype)
    return (out * torch.sigmoid(logsumexp)[..., None] if read else out), keys, values


def test_a_logsumexp_matters_only_if_it_is_read():
    assert isinstance(examine(function=with_logsumexp, read=False), AttentionSite)
    assert "logsumexp" in examine(function=with_logsumexp, read=True)


class Sinks:
    """Learned sinks as transformers adds them to flex_attention; its pieces can be replaced one at a time."""

    dtype = torch.float32

    def lse(self, lse: Tensor, value: Tensor) -> Tensor:
        return lse.to(value.dtype)

    def column(self, sinks: Tensor, out: Tensor) -> Tensor:
        return sinks.view(1, -1, 1, 1).expand(*out.shape[:3], 1)

    def joined(self, lse: Tensor, column: Tensor) -> Tensor:
        return torch.logsumexp(torch.cat([lse, column], dim=-1), dim=-1, keepdim=True)

    def factor(self, lse: Tensor, joined: Tensor) -> Tensor:
        return torch.exp(lse - joined)

    def scaled(self, out: Tensor, factor: Tensor) -> Tensor:
        return out * factor

    def __call__(self, query, key, value, past_key, past_value, block_mask, sinks) -> tuple[Tensor, ...]:
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        options = {"block_mask": block_mask, "enable_gqa": True, "scale": 0.25, "return_aux": AuxRequest(lse=True)}
        out, aux = flex_attention(query, keys, values, **options)
        lse = self.lse(aux.lse, value).unsqueeze(-1)
        factor = self.factor(lse, self.joined(lse, self.column(sinks, out)))
        return self.scaled(out, factor).to(query.dtype).transpose(1, 2).contiguous(), keys, values


def captured_sinks(tokens: int = 3, dtype: torch.dtype = torch.float32, sinks: Tensor | None = None, **methods):
    torch.manual_seed(0)
    new = [torch.randn(2, heads, tokens, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    past = [torch.randn(2, KV_HEADS, PAST, DIM, dtype=dtype) for _ in range(2)]
    attention = type("Variant", (Sinks,), methods)()
    sinks = torch.randn(HEADS, dtype=dtype) if sinks is None else sinks
    return capture_call(lambda *inputs: attention(*inputs), *new, *past, block_mask(causal, tokens), sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_learned_sinks_match(dtype, sink_dtype):
    (site,), refusals = find_sites(captured_sinks(dtype=dtype, sinks=torch.randn(HEADS, dtype=sink_dtype)).gm)
    assert not refusals
    assert (site.dtype, site.scale, site.sink_logits.op) == (dtype, 0.25, "placeholder")
    assert site.node.meta["example_value"].dtype == dtype
    assert tuple(site.sink_logits.meta["example_value"].shape) == (HEADS,)


OTHER_SINKS = {
    "logsumexp doubled": ({"lse": lambda self, lse, value: lse * 2}, "multiplied by 2, not by ln 2"),
    "logsumexp in powers of two": (
        {"lse": lambda self, lse, value: lse / math.log(2)}, "truediv stands where mul is expected"),
    "logsumexp rounded": ({"lse": lambda self, lse, value: lse.half().float()}, "half stands where mul is expected"),
    "logsumexp clamped": ({"lse": lambda self, lse, value: lse.clamp(max=4)}, "clamp stands where mul is expected"),
    "sinks of every query": (
        {"column": lambda self, sinks, out: sinks.view(1, -1, 1, 1).expand(*out.shape[:3], 1) * 1}, "one logit per head"),
    "sinks of rows": (
        {"column": lambda self, sinks, out: sinks[:2].view(-1, 1, 1, 1).expand(*out.shape[:3], 1)}, "one logit per head"),
    "two columns": (
        {"column": lambda self, sinks, out: sinks.view(1, -1, 1, 1).expand(*out.shape[:3], 2)}, "one logit per head"),
    "sinks twice": (
        {"joined": lambda self, lse, c: torch.logsumexp(torch.cat([lse, c, c], -1), -1, keepdim=True)},
        "is not the one that the sinks are joined to"),
    "sinks first": (
        {"joined": lambda self, lse, c: torch.logsumexp(torch.cat([c, lse], -1), -1, keepdim=True)},
        "is not the one that the sinks are joined to"),
    "over the queries": (
        {"joined": lambda self, lse, c: torch.logsumexp(torch.cat([lse, c], -1), -2, keepdim=True)[..., :1]},
        "getitem stands where logsumexp is expected"),
    "the sinks' share": (
        {"factor": lambda self, lse, joined: torch.exp(joined - lse)}, "stands where logsumexp is expected"),
    "a power of two": ({"factor": lambda self, lse, joined: torch.exp2(lse - joined)}, "exp2 stands where exp"),
    "sigmoid": ({"factor": lambda self, lse, joined: torch.sigmoid(lse - joined)}, "sigmoid stands where exp"),
    "added": ({"scaled": lambda self, out, factor: out + factor}, "read by add, not scaled"),
    "scaled twice": ({"scaled": lambda self, out, factor: out * factor * factor}, "is returned or read more than once"),
    "output read too": ({"scaled": lambda self, out, factor: out * factor + out}, "is returned or read more than once"),
    "logsumexp read too": ({"scaled": lambda self, out, factor: out * factor, "factor": lambda self, lse, joined: (
        torch.exp(lse - joined) + 0 * lse)}, "add stands where exp is expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SINKS)
def test_a_renormalization_that_differs_is_refused_with_the_reason(name):
    methods, reason = OTHER_SINKS[name]
    sites, refusals = find_sites(captured_sinks(**methods).gm)
    assert not sites
    assert reason in refusals[0].reason
    assert refusals[0].reason.startswith("the logsumexp of flex_attention is read, and not as learned sinks do")


def test_sinks_that_are_written_meanwhile_are_refused():
    def written(self, sinks, out):
        column = Sinks.column(self, sinks, out)
        sinks.add_(1)
        return column

    (refusal,) = find_sites(captured_sinks(column=written).gm)[1]
    assert "written in place in the middle" in refusal.reason


def test_decode_with_learned_sinks():
    result = rewritten(captured_sinks(tokens=1), CommunityConfig(min_context=0, num_sink_tokens=1, recent_window=2))
    text = rewritten_text(result, 0)
    assert_expected_inline(
        text[text.index("append_kv") :],
        """\
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', ckv_length, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=4096, num_sink_tokens=1, recent_window=2, has_log=False) -> [0] ->
    sparse_attention, [1] -> sparse_attention
sparse_attention(query, ckv_key_L, ckv_value_L, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    ckv_length, ckv_first, l_inputs_6_, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2) -> model
ckv_length.add_(1)""",
    )
    left = [node.name for node in result.gm.graph.nodes if "flex" in node.name or "exp" in str(node.target)]
    assert not left


def test_the_rewritten_step_computes_what_the_graph_did():
    captured, config = captured_sinks(tokens=1), CommunityConfig(min_context=0, workers=0)
    result = rewritten(captured, config)
    cache = RewrittenCache(config, result.plan, [0, 0])
    cache.fill([captured.inputs[i] for i in result.plan.past])
    expected = captured.gm.forward(*captured.inputs)
    shape = (2, 1, HEADS, DIM)
    (expected,) = [tensor for tensor in expected if tensor.shape == shape]
    (got,) = [tensor for tensor in cache.run(result, captured.inputs) if tensor.shape == shape]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


class Static:
    """A step over transformers' static cache, which advances its counter before flex_attention reads the mask."""

    def advance(self, counter: Tensor, tokens: int) -> None:
        counter.add_(tokens)

    def afterwards(self, counter: Tensor, tokens: int) -> None:
        pass

    def __call__(self, query, key, value, past_key, past_value, counter, block_mask) -> Tensor:
        position = torch.arange(query.shape[2]) + counter
        self.advance(counter, query.shape[2])
        past_key.index_copy_(2, position, key)
        past_value.index_copy_(2, position, value)
        out = flex_attention(query, past_key, past_value, None, block_mask, enable_gqa=True, scale=0.25)
        self.afterwards(counter, query.shape[2])
        return out


CAPACITY = PAST + 6


def captured_static(mask_of, tokens: int = 1, **methods):
    """mask_of(counter, padding) is a mask_mod."""
    torch.manual_seed(0)
    counter, padding = torch.tensor(PAST), (torch.arange(CAPACITY) < PAST + tokens).repeat(2, 1)
    new = [torch.randn(2, heads, tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    past = [torch.zeros(2, KV_HEADS, CAPACITY, DIM) for _ in range(2)]
    for cache in past:
        cache[:, :, :PAST] = torch.randn(2, KV_HEADS, PAST, DIM)
    mask = create_block_mask(mask_of(counter, padding), 2, None, tokens, CAPACITY, device="cpu")
    step = type("Variant", (Static,), methods)()
    return capture_call(lambda *inputs: step(*inputs), *new, *past, counter, mask)


def counted(counter: Tensor, padding: Tensor):
    return lambda batch, head, query, key: key <= query + counter


def counted_and_padded(counter: Tensor, padding: Tensor):
    return lambda batch, head, query, key: (key <= query + counter) & padding[batch, key]


def test_a_static_cache_whose_counter_moved_before_the_mask_reads_it():
    (site,), refusals = find_sites(captured_static(counted_and_padded).gm)
    assert not refusals
    assert (site.cache, site.is_decode, site.ahead, site.mask) == (Cache.STATIC, True, 1, None)
    assert tuple(site.padding.meta["example_value"].shape) == (2, CAPACITY)
    assert site.blocks.kv_indices.op == "placeholder"


def test_a_static_cache_whose_counter_moves_afterwards():
    late = {"advance": Static.afterwards, "afterwards": Static.advance}
    for tokens in (1, 3):
        (site,), refusals = find_sites(captured_static(counted, tokens, **late).gm)
        assert not refusals
        assert (site.cache, site.is_decode, site.ahead, site.padding) == (Cache.STATIC, tokens == 1, 0, None)


OTHER_COUNTERS = {
    "no padding": (counted, 1, {}, "where nothing was written, and no padding mask hides that"),
    "several tokens": (counted_and_padded, 3, {}, "queries see later tokens of the same call"),
    "doubled": (counted_and_padded, 1, {"advance": lambda self, c, n: c.mul_(2)}, "after it was written in place"),
    "scaled on the way": (
        counted_and_padded, 1, {"advance": lambda self, c, n: c.add_(n, alpha=2)}, "after it was written in place"),
    "not moved": (counted_and_padded, 1, {"advance": lambda self, c, n: c.sub_(1)}, "after it was written in place"),
    "behind": (
        lambda counter, padding: lambda b, h, q, k: (k <= q + counter - 2) & padding[b, k], 1, {}, "shifted by -1"),
    "a window": (
        lambda counter, padding: lambda b, h, q, k: (k <= q + counter) & (k > q + counter - 4) & padding[b, k], 1, {},
        "sees only the last 3 tokens"),
    "from the first key": (
        lambda counter, padding: lambda b, h, q, k: k <= q, 3, {}, "written elsewhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_COUNTERS)
def test_another_mask_over_a_static_cache_is_refused(name):
    mask_of, tokens, methods, reason = OTHER_COUNTERS[name]
    sites, refusals = find_sites(captured_static(mask_of, tokens, **methods).gm)
    assert not sites
    assert reason in refusals[0].reason


def test_decode_over_a_static_cache():
    captured, config = captured_static(counted_and_padded), CommunityConfig(min_context=0, workers=0)
    result = rewritten(captured, config)
    text = rewritten_text(result, 0)
    assert_expected_inline(
        text[text.index("route(") :],
        """\
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', position, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, position, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=4096, num_sink_tokens=10, recent_window=64, has_log=False) -> [0]
    -> sparse_attention, [1] -> sparse_attention
sparse_attention(query, key_cache, value_cache, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    position, ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=10, recent_window=64) -> model""",
    )
    blocks = result.plan.blocks
    assert (blocks.ahead, blocks.starts_empty, len([i for i in blocks.lists if i is not None])) == (1, False, 4)


def test_a_mask_that_reads_what_the_graph_writes_is_refused():
    count = torch.tensor(PAST)

    def moving(query, key, value, past_key, past_value, block_mask):
        count.add_(1)
        return attend(query, key, value, past_key, past_value, block_mask)

    assert "which this graph changes" in examine(lambda b, h, q, k: k <= q + count, function=moving)
