"""flex_attention: what is understood of its mask and its scores, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ckv_compile.passes.match_attention import AttentionSite, Cache, find_sites
from ckv_compile.testing import capture_call

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


def test_a_static_cache_is_refused():
    def static(query, key, value, past_key, past_value, block_mask):
        position = torch.arange(3)
        past_key.index_copy_(2, position, key)
        past_value.index_copy_(2, position, value)
        return flex_attention(query, past_key, past_value, None, block_mask, enable_gqa=True)

    new, past = [torch.randn(2, 2, 3, DIM) for _ in range(3)], [torch.zeros(2, 2, PAST, DIM) for _ in range(2)]
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 3, PAST, device="cpu")
    ((refusal,),) = find_sites(capture_call(static, *new, *past, mask).gm)[1:]
    assert refusal.reason.startswith("flex_attention over a static cache")


def test_a_mask_that_reads_what_the_graph_writes_is_refused():
    count = torch.tensor(PAST)

    def moving(query, key, value, past_key, past_value, block_mask):
        count.add_(1)
        return attend(query, key, value, past_key, past_value, block_mask)

    assert "which this graph changes" in examine(lambda b, h, q, k: k <= q + count, function=moving)
