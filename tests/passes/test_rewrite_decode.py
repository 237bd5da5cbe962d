"""Decode graphs after rewriting: what is in them, what is not, and that they compute what dynamo's graph computed.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from ckv_compile import backend
from ckv_compile.config import CommunityConfig
from ckv_compile.passes import graph_edit, rewrite_plan
from ckv_compile.passes.match_attention import Cache, find_sites
from ckv_compile.testing import (
    FULL_ATTENTION_FAMILIES,
    Captured,
    RewrittenCache,
    capture_call,
    capture_generate,
    captured_turns,
    prompt,
    rewritten,
    rewritten_text,
    tiny_model,
)

ckv = torch.ops.ckv
DECODE = 1  # number of the decode step among the calls of ``captured_turns``
SMALL = {"min_context": 0, "workers": 0, "num_sink_tokens": 1, "recent_window": 2}
EXACT = {**SMALL, "budget": 64}  # the whole context fits, so nothing is lost


# Half of the families with left padding: after rewriting it is state and shows no more.
FIRST = {"llama": [3, 0], "qwen2": [0, 0], "qwen3": [3, 0], "mistral": [0, 0]}


def turns(family: str, cache: str, lengths: tuple[int, ...] = (40, 1, 5)) -> tuple[Captured, ...]:
    sizes = {} if family == "llama" else {"num_hidden_layers": 1}
    return captured_turns(family, cache, any(FIRST[family]), lengths, **sizes)


def decode_text(cache: str, graph: str, **options) -> str:
    """The same text for every layer of every family: they differ outside of attention only."""
    texts = {}
    for family in FULL_ATTENTION_FAMILIES:
        result = rewritten(
            turns(family, cache)[DECODE], CommunityConfig(**{"graph": graph, "hierarchy": "off", **EXACT, **options})
        )
        for layer in range(len(result.sites)):
            texts.setdefault(rewritten_text(result, layer), []).append(f"layer {layer} of {family}")
    assert len(texts) == 1, f"these differ: {'; '.join(', '.join(names) for names in texts.values())}"
    return texts.popitem()[0]


# ---------------------------------------------------------------------- what the graph is


def test_dynamic_decode_with_keys():
    assert_expected_inline(
        decode_text("dynamic", "keys"),
        """\
decode, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1]; ckv_centroid int8
    [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1]; ckv_stored int32
    [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first int32 [1];
    ckv_scores float32 [1]; ckv_tally int64 [1]
ckv_length.to(torch.int64) -> model
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', ckv_length, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=False) -> [0] ->
    sparse_attention, [1] -> sparse_attention
sparse_attention(query, ckv_key_L, ckv_value_L, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    ckv_length, ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2) -> model
ckv_length.add_(1)""",
    )


def test_decode_with_a_centroid_budget():
    assert_expected_inline(
        decode_text("dynamic", "keys", centroid_budget=4),
        """\
decode, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1]; ckv_centroid int8
    [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1]; ckv_stored int32
    [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first int32 [1];
    ckv_scores float32 [1]; ckv_tally int64 [1]; ckv_mean_value float32 [1]
ckv_length.to(torch.int64) -> model
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', ckv_length, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=False, num_new=1,
    reserved=4) -> [0] -> sparse_attention, [1] -> sparse_attention
select_summaries(ckv_scores, ckv_size, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length,
    ckv_first, ckv_tally, layer=L, batch=2, num_graphs=2, budget=64, reserved=4, num_sink_tokens=1,
    recent_window=2) -> sparse_attention
sparse_attention(query, ckv_key_L, ckv_value_L, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    ckv_length, ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2,
    select_summaries, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_mean_value) -> model
ckv_length.add_(1)""",
    )


def test_decode_that_may_score_groups_of_communities_first():
    assert_expected_inline(
        decode_text("dynamic", "keys", hierarchy="auto"),
        """\
decode, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1]; ckv_centroid int8
    [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1]; ckv_stored int32
    [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first int32 [1];
    ckv_scores float32 [1]; ckv_tally int64 [1]; ckv_num_grouped int32 [1]; ckv_coarse int8 [1];
    ckv_coarse_scale float32 [1]; ckv_coarse_scores float32 [1]
ckv_length.to(torch.int64) -> model
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
route_coarse(query, ckv_coarse, ckv_coarse_scale, ckv_channel_scale, ckv_num_grouped, ckv_num_communities,
    ckv_capacity_L, ckv_coarse_scores, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25, least=8,
    start=256, slots=64) -> [0] -> route, [1] -> route
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', ckv_length, slots=2048, route_coarse[0], route_coarse[1]) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=False) -> [0] ->
    sparse_attention, [1] -> sparse_attention
sparse_attention(query, ckv_key_L, ckv_value_L, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    ckv_length, ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2) -> model
ckv_length.add_(1)""",
    )


@pytest.mark.slow
def test_decode_with_a_centroid_budget_and_assignment():
    assert_expected_inline(
        decode_text("static", "attention", centroid_budget=4),
        """\
decode, static cache; past K and V are inputs, K and V are not outputs
ckv_first int32 [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1];
    ckv_centroid int8 [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1];
    ckv_stored int32 [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first
    int32 [1]; ckv_scores float32 [1]; ckv_tally int64 [1]; ckv_log_mean float32 [1]; ckv_mean_at int32 [1];
    ckv_label int32 [1]; ckv_community_weight float32 [1]; ckv_total_weight float32 [1]; ckv_gamma float32
    [1]; ckv_edge_neighbor int32 [1]; ckv_edge_weight float32 [1]; ckv_candidate int32 [1];
    ckv_candidate_score float32 [1]; ckv_candidate_rest int64 [1]; ckv_candidate_norm float32 [1]; ckv_new_key
    float32 [1]; ckv_mean_value float32 [1]; ckv_new_value float32 [1]; ckv_log_value float32 [1]
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', position, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, position, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=True, num_new=1,
    reserved=4) -> [0] -> sparse_attention_edges, [1] -> sparse_attention_edges
select_summaries(ckv_scores, ckv_size, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, position,
    ckv_first, ckv_tally, layer=L, batch=2, num_graphs=2, budget=64, reserved=4, num_sink_tokens=1,
    recent_window=2) -> sparse_attention_edges
sparse_attention_edges(query, key_cache, value_cache, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    position, ckv_first, sink_logits=None, ckv_candidate, ckv_candidate_score, ckv_candidate_rest,
    ckv_candidate_norm, ckv_new_key, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2, kappa=8,
    source='attention', select_summaries, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size,
    ckv_mean_value, ckv_new_value) -> model
pick_edges(ckv_candidate, ckv_candidate_score, ckv_candidate_rest, ckv_candidate_norm, ckv_first,
    num_layers=*, num_places=2, num_lists=4, budget=64, num_sink_tokens=1, kappa=8, source='attention') -> [0]
    -> assign_tokens, [1] -> assign_tokens
assign_tokens(pick_edges[0], pick_edges[1], ckv_new_key, ckv_centroid, ckv_centroid_scale, ckv_channel_scale,
    ckv_log_mean, ckv_mean_at, ckv_start, ckv_stored, ckv_size, ckv_num_communities, ckv_n_indexed,
    ckv_log_community, ckv_log_first, ckv_label, ckv_community_weight, ckv_total_weight, ckv_edge_neighbor,
    ckv_edge_weight, ckv_gamma, ckv_capacity_*, position, ckv_first, num_layers=*, num_kv_heads=2,
    head_dim=16, num_lists=4, kappa=8, num_graphs=2, num_sink_tokens=1, lam=0.5, ckv_new_value,
    ckv_mean_value, ckv_log_value)""",
    )


def test_dynamic_decode_with_attention():
    assert_expected_inline(
        decode_text("dynamic", "attention"),
        """\
decode, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1]; ckv_centroid int8
    [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1]; ckv_stored int32
    [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first int32 [1];
    ckv_scores float32 [1]; ckv_tally int64 [1]; ckv_log_mean float32 [1]; ckv_mean_at int32 [1]; ckv_label
    int32 [1]; ckv_community_weight float32 [1]; ckv_total_weight float32 [1]; ckv_gamma float32 [1];
    ckv_edge_neighbor int32 [1]; ckv_edge_weight float32 [1]; ckv_candidate int32 [1]; ckv_candidate_score
    float32 [1]; ckv_candidate_rest int64 [1]; ckv_candidate_norm float32 [1]; ckv_new_key float32 [1]
ckv_length.to(torch.int64) -> model
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', ckv_length, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=True) -> [0] ->
    sparse_attention_edges, [1] -> sparse_attention_edges
sparse_attention_edges(query, ckv_key_L, ckv_value_L, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    ckv_length, ckv_first, sink_logits=None, ckv_candidate, ckv_candidate_score, ckv_candidate_rest,
    ckv_candidate_norm, ckv_new_key, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2, kappa=8,
    source='attention') -> model
pick_edges(ckv_candidate, ckv_candidate_score, ckv_candidate_rest, ckv_candidate_norm, ckv_first,
    num_layers=*, num_places=2, num_lists=4, budget=64, num_sink_tokens=1, kappa=8, source='attention') -> [0]
    -> assign_tokens, [1] -> assign_tokens
assign_tokens(pick_edges[0], pick_edges[1], ckv_new_key, ckv_centroid, ckv_centroid_scale, ckv_channel_scale,
    ckv_log_mean, ckv_mean_at, ckv_start, ckv_stored, ckv_size, ckv_num_communities, ckv_n_indexed,
    ckv_log_community, ckv_log_first, ckv_label, ckv_community_weight, ckv_total_weight, ckv_edge_neighbor,
    ckv_edge_weight, ckv_gamma, ckv_capacity_*, ckv_length, ckv_first, num_layers=*, num_kv_heads=2,
    head_dim=16, num_lists=4, kappa=8, num_graphs=2, num_sink_tokens=1, lam=0.5)
ckv_length.add_(1)""",
    )


def test_static_decode_with_keys():
    assert_expected_inline(
        decode_text("static", "keys"),
        """\
decode, static cache; past K and V are inputs, K and V are not outputs
ckv_first int32 [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1];
    ckv_centroid int8 [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1];
    ckv_stored int32 [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first
    int32 [1]; ckv_scores float32 [1]; ckv_tally int64 [1]
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', position, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, position, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=False) -> [0] ->
    sparse_attention, [1] -> sparse_attention
sparse_attention(query, key_cache, value_cache, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    position, ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2) -> model""",
    )


def test_static_decode_with_attention():
    assert_expected_inline(
        decode_text("static", "attention"),
        """\
decode, static cache; past K and V are inputs, K and V are not outputs
ckv_first int32 [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1];
    ckv_centroid int8 [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1];
    ckv_stored int32 [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first
    int32 [1]; ckv_scores float32 [1]; ckv_tally int64 [1]; ckv_log_mean float32 [1]; ckv_mean_at int32 [1];
    ckv_label int32 [1]; ckv_community_weight float32 [1]; ckv_total_weight float32 [1]; ckv_gamma float32
    [1]; ckv_edge_neighbor int32 [1]; ckv_edge_weight float32 [1]; ckv_candidate int32 [1];
    ckv_candidate_score float32 [1]; ckv_candidate_rest int64 [1]; ckv_candidate_norm float32 [1]; ckv_new_key
    float32 [1]
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', position, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, position, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=True) -> [0] ->
    sparse_attention_edges, [1] -> sparse_attention_edges
sparse_attention_edges(query, key_cache, value_cache, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    position, ckv_first, sink_logits=None, ckv_candidate, ckv_candidate_score, ckv_candidate_rest,
    ckv_candidate_norm, ckv_new_key, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2, kappa=8,
    source='attention') -> model
pick_edges(ckv_candidate, ckv_candidate_score, ckv_candidate_rest, ckv_candidate_norm, ckv_first,
    num_layers=*, num_places=2, num_lists=4, budget=64, num_sink_tokens=1, kappa=8, source='attention') -> [0]
    -> assign_tokens, [1] -> assign_tokens
assign_tokens(pick_edges[0], pick_edges[1], ckv_new_key, ckv_centroid, ckv_centroid_scale, ckv_channel_scale,
    ckv_log_mean, ckv_mean_at, ckv_start, ckv_stored, ckv_size, ckv_num_communities, ckv_n_indexed,
    ckv_log_community, ckv_log_first, ckv_label, ckv_community_weight, ckv_total_weight, ckv_edge_neighbor,
    ckv_edge_weight, ckv_gamma, ckv_capacity_*, position, ckv_first, num_layers=*, num_kv_heads=2,
    head_dim=16, num_lists=4, kappa=8, num_graphs=2, num_sink_tokens=1, lam=0.5)""",
    )


def counts(gm: torch.fx.GraphModule) -> dict[str, int]:
    """Numbers of the nodes that rewriting is about; ``masks`` are bool tensors, ``repeats`` five-dimensional ones."""
    found = {"sdpa": 0, "joined": 0, "repeats": 0, "masks": 0, "symbols": 0, "sparse_attention": 0, "append_kv": 0}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        found["sdpa"] += node.target is F.scaled_dot_product_attention
        found["joined"] += node.target is torch.cat and value.dim() == 4 and node.kwargs.get("dim") == -2
        found["repeats"] += isinstance(value, Tensor) and value.dim() == 5
        found["masks"] += node.op != "placeholder" and isinstance(value, Tensor) and value.dtype == torch.bool
        found["symbols"] += graph_edit.has_symbol(value)
        found["sparse_attention"] += node.target in (ckv.sparse_attention.default, ckv.sparse_attention_edges.default)
        found["append_kv"] += node.target is ckv.append_kv.default
    return found


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_nothing_in_a_decode_step_draws_random_numbers(cache):
    """A seed cannot be read while a CUDA graph is recorded."""
    nodes = rewritten(turns("llama", cache)[DECODE], CommunityConfig(**EXACT)).gm.graph.nodes
    assert not [node for node in nodes if re.search("rand|dropout|bernoulli|multinomial|exponential", str(node.target))]
    ours = [node.target for node in nodes if getattr(node.target, "namespace", "") == "ckv"]
    assert ours
    assert not [operator for operator in ours if torch.Tag.nondeterministic_seeded in operator.tags]


@pytest.mark.parametrize("graph", ["keys", "attention", "mixed"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_nothing_of_the_old_attention_is_left(cache, graph):
    captured = turns("llama", cache)[DECODE]
    before = counts(captured.gm)
    assert (before["sdpa"], before["joined"], before["repeats"]) == (2, 4 if cache == "dynamic" else 0, 8)
    assert before["masks"] > 0
    assert before["symbols"] > 0
    result = rewritten(captured, CommunityConfig(graph=graph, **EXACT))
    after = counts(result.gm)
    assert after.pop("sparse_attention") == 2
    assert after.pop("append_kv") == (2 if cache == "dynamic" else 0)
    assert not any(after.values()), after
    assert result.plan.symbolic == []


def test_a_mask_that_generate_makes_beforehand_leaves_the_graph():
    captured = capture_generate(
        tiny_model("llama", num_hidden_layers=1), prompt(padded=True), cache="static", new_tokens=2
    )[-1]
    result = rewritten(captured, CommunityConfig(hierarchy="off", **EXACT))
    assert rewritten_text(result, 0) == decode_text("static", "keys")
    assert result.plan.mask not in result.plan.keep
    assert captured.inputs[result.plan.mask].shape == (2, 1, 1, 10)


def test_keys_and_values_leave_the_graph_of_a_dynamic_cache():
    captured = turns("llama", "dynamic")[DECODE]
    result = rewritten(captured, CommunityConfig(**EXACT))
    plan, inputs = result.plan, graph_edit.placeholders(captured.gm.graph)
    outputs = graph_edit.output_node(captured.gm.graph).args[0]
    assert len(outputs) == 5
    assert [outputs[i].name.rstrip("_0123456789") for i in plan.kept_outputs] == ["logits"]
    assert sorted([*plan.kept_outputs, *plan.kv_outputs]) == list(range(plan.num_outputs)) == list(range(5))
    names = [inputs[i].name for i in plan.past]
    assert [name.split("layers_")[1] for name in names] == ["0_keys", "0_values", "1_keys", "1_values"]
    assert not set(plan.past) & set(plan.keep)
    assert not any(isinstance(inputs[i].meta["example_value"], torch.SymInt) for i in plan.keep)
    kept = graph_edit.placeholders(result.gm.graph)
    assert [node.name for node in kept[: len(plan.keep)]] == [inputs[i].name for i in plan.keep]
    assert [node.name for node in kept[len(plan.keep) :]] == [f"ckv_{name}" for name in plan.state]


def test_a_static_cache_keeps_its_inputs_its_writes_and_its_outputs():
    captured = turns("llama", "static")[DECODE]
    result = rewritten(captured, CommunityConfig(**EXACT))
    plan, inputs = result.plan, graph_edit.placeholders(captured.gm.graph)
    assert plan.kept_outputs == list(range(plan.num_outputs))
    assert (plan.past, plan.kv_outputs, plan.static_in_outputs, plan.static_capacity([])) == ([], [], False, 48)
    assert [inputs[i].name[-len("0_keys") :] for i in plan.static_keys] == ["0_keys", "1_keys"]
    assert inputs[plan.static_length].name.endswith("layers_0_cumulative_length")
    assert inputs[plan.padding].meta["example_value"].shape == (2, 41)
    assert sum(node.target == "index_copy_" for node in result.gm.graph.nodes) == 4
    for index, site in enumerate(result.sites):
        assert site.write_key in site.write_key.graph.nodes, index


# ---------------------------------------------------------------------- what it computes


def both(
    graphs: tuple[Captured, ...], config: CommunityConfig, first: list[int], *, several: bool = False
) -> list[tuple[list, list]]:
    """Per call: what dynamo's graph returned or wrote, and what the rewritten one did, which all share one state."""
    cache, pairs = None, []
    for captured in graphs:
        result = rewritten(captured, config, several=several)
        plan = result.plan
        cache = cache or RewrittenCache(config, plan, first)
        theirs, ours = copy.deepcopy(captured.inputs), copy.deepcopy(captured.inputs)
        expected, got = list(captured.gm.forward(*theirs)), cache.run(result, ours)
        end = cache.sequence.length
        outputs = dict(zip(plan.kept_outputs, got, strict=True))
        if cache.slab is not None:
            outputs.update(zip(plan.kv_outputs, cache.slab.views(end), strict=True))
            assert cache.sequence.length_device.item() == end
        got = [outputs[i] for i in range(plan.num_outputs)]
        if plan.static_keys and not plan.static_in_outputs:
            expected, got = expected + theirs, got + ours  # buffers that were written in place
        new = plan.num_new(captured.inputs)
        pairs.append(([_real(x, first, end - new) for x in expected], [_real(x, first, end - new) for x in got]))
    return pairs


def _real(value: object, first: list[int], begin: int) -> object:
    """Without the rows of padding, in which nothing is defined: K or V [B, H, n, D], or logits [B, q, V]."""
    if not isinstance(value, Tensor) or value.dim() < 3:
        return value
    skip = first if value.dim() == 4 else [max(0, row - begin) for row in first]
    return [row[..., begin:, :] for row, begin in zip(value, skip, strict=True)]


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        *(({"graph": graph}, cache) for graph in ("keys", "attention", "mixed") for cache in ("dynamic", "static")),
        ({"append": "assign"}, "dynamic"),
        ({"graph_aggregation": "layer"}, "static"),
        ({"graph": "attention", "graph_aggregation": "head"}, "dynamic"),
        ({"policy": "streaming"}, "dynamic"),
        ({"policy": "random"}, "static"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "mistral"], ids=["padded", "unpadded"])
def test_every_turn_equals_the_graph_before(cache, family, options):
    for expected, got in both(turns(family, cache), CommunityConfig(**EXACT, **options), FIRST[family]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


SEVERAL = 2  # number of the call with several tokens, which specialises their number in what it is given
LENGTHS = (40, 1, 4)


@pytest.mark.parametrize(
    "options", [{}, {"score": "softmax"}, {"graph_aggregation": "layer"}, {"policy": "random"}], ids=str
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral"], ids=["padded", "unpadded"])
def test_a_step_of_several_tokens_equals_the_graph_before(family, cache, options):
    config = CommunityConfig(**EXACT, **options)
    assert rewritten(turns(family, cache, LENGTHS)[SEVERAL], config, several=True).plan.queries == 4
    for expected, got in both(turns(family, cache, LENGTHS), config, FIRST[family], several=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_step_of_several_tokens_is_a_decode_graph():
    result = rewritten(
        turns("qwen2", "dynamic", LENGTHS)[SEVERAL], CommunityConfig(hierarchy="off", **EXACT), several=True
    )
    assert (result.plan.phase, result.plan.symbolic) == ("decode", [])
    assert_expected_inline(
        rewritten_text(result, 0),
        """\
decode, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1]; ckv_centroid int8
    [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1]; ckv_stored int32
    [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first int32 [1];
    ckv_scores float32 [1]; ckv_tally int64 [1]
ckv_length.to(torch.int64) -> model
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', ckv_length, slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, ckv_length, ckv_first, ckv_tally,
    layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=False, num_new=4)
    -> [0] -> sparse_attention, [1] -> sparse_attention
sparse_attention(query, ckv_key_L, ckv_value_L, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    ckv_length, ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=1, recent_window=2) -> model
ckv_length.add_(4)""",
    )


def test_a_step_of_several_tokens_on_a_static_cache_reads_the_first_position():
    result = rewritten(
        turns("qwen2", "static", LENGTHS)[SEVERAL], CommunityConfig(hierarchy="off", **EXACT), several=True
    )
    assert (result.plan.phase, result.plan.symbolic) == ("decode", [])
    assert_expected_inline(
        rewritten_text(result, 0),
        """\
decode, static cache; past K and V are inputs, K and V are not outputs
ckv_first int32 [2]; ckv_capacity_L int32 [4]; ckv_n_indexed int32 [1]; ckv_num_communities int32 [1];
    ckv_centroid int8 [1]; ckv_centroid_scale float32 [1]; ckv_channel_scale float32 [1]; ckv_start int32 [1];
    ckv_stored int32 [1]; ckv_size int32 [1]; ckv_member int32 [1]; ckv_log_community int32 [1]; ckv_log_first
    int32 [1]; ckv_scores float32 [1]; ckv_tally int64 [1]
route(query, ckv_centroid, ckv_centroid_scale, ckv_channel_scale, ckv_size, ckv_start, ckv_stored,
    ckv_num_communities, ckv_capacity_L, ckv_scores, layer=L, num_graphs=2, num_kv_heads=2, scale=0.25,
    score='max', position.narrow(0, 0, 1), slots=2048) -> [0] -> retrieve, [1] -> retrieve
retrieve(route[0], route[1], ckv_scores, ckv_start, ckv_stored, ckv_size, ckv_member, ckv_log_community,
    ckv_log_first, ckv_num_communities, ckv_n_indexed, ckv_capacity_L, position.narrow(0, 0, 1), ckv_first,
    ckv_tally, layer=L, batch=2, num_graphs=2, budget=64, num_sink_tokens=1, recent_window=2, has_log=False,
    num_new=4) -> [0] -> sparse_attention, [1] -> sparse_attention
sparse_attention(query, key_cache, value_cache, retrieve[0], retrieve[1], ckv_n_indexed, ckv_capacity_L,
    position.narrow(0, 0, 1), ckv_first, sink_logits=None, layer=L, scale=0.25, num_sink_tokens=1,
    recent_window=2) -> model""",
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FULL_ATTENTION_FAMILIES)
def test_every_family_computes_the_same(family, cache):
    for expected, got in both(turns(family, cache), CommunityConfig(**EXACT), FIRST[family]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 80), ((6, 1), 24)])
def test_every_ratio_of_heads_computes_the_same(heads, head_dim):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    graphs = captured_turns("llama", "dynamic", False, (20, 1), num_hidden_layers=1, hidden_size=96, **sizes)
    for graph in ("keys", "attention"):
        for expected, got in both(graphs, CommunityConfig(graph=graph, **EXACT), [0, 0]):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graph", ["keys", "attention"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_one_head_that_all_query_heads_read_computes_the_same(cache, graph):
    """Falcon's: scaled_dot_product_attention broadcasts it, without being told of groups."""
    graphs = captured_turns("falcon", cache, True, (20, 1), num_hidden_layers=1)
    for expected, got in both(graphs, CommunityConfig(graph=graph, **EXACT), [3, 0]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_small_budget_makes_a_difference(cache):
    """Else the comparisons above would say nothing about retrieval."""
    expected, got = both(turns("mistral", cache), CommunityConfig(**SMALL, budget=8), [0, 0])[DECODE]
    logits = next(i for i, value in enumerate(expected) if value[0].dim() == 2 and value[0].shape[-1] == 128)
    assert not torch.allclose(got[logits][0], expected[logits][0], rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------- hand-written decoders


class Decoder(nn.Module):
    """One or two layers over K and V that the caller keeps; the pieces can be replaced one at a time."""

    heads, kv_heads, dim = 4, 2, 16

    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(64, 64), nn.Linear(64, 64)
        self.key, self.value = (nn.Linear(64, self.kv_heads * self.dim) for _ in range(2))
        self.table = nn.Parameter(torch.randn(64, 64))

    def positional(self, hidden: Tensor, past: int) -> Tensor:
        return self.table[torch.arange(hidden.shape[1]) + past]

    def finish(self, out: Tensor) -> Tensor:
        rows, _, tokens, _ = out.shape
        return self.output(out.transpose(1, 2).reshape(rows, tokens, 64))

    def join(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past, new], dim=-2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def layer(self, hidden: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = hidden.shape
        query, key, value = (
            part(hidden).view(rows, tokens, -1, self.dim).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        keys, values = self.join(keys, key), self.join(values, value)
        return self.finish(self.attend(query, keys, values)), keys, values

    def forward(self, hidden: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        hidden = hidden + self.positional(hidden, cache[0].shape[2])
        kept = []
        for keys, values in zip(cache[::2], cache[1::2], strict=True):
            out, *new = self.layer(hidden, keys, values)
            hidden = hidden + out
            kept += new
        return hidden, *kept


def decoder(**methods) -> nn.Module:
    torch.manual_seed(0)
    return type("Variant", (Decoder,), methods)()


def step(
    past: int = 7, rows: int = 2, dynamic: tuple[int, ...] = (2,), layers: int = 1, kv_heads: int = 2
) -> list[Tensor]:
    """A new token and past K and V, with the dimensions in ``dynamic`` marked as such."""
    torch.manual_seed(1)
    tensors = [torch.randn(rows, 1, 64), *(torch.randn(rows, kv_heads, past, 16) for _ in range(2 * layers))]
    for tensor in tensors:
        for dim in dynamic:
            if tensor.dim() == 4 or dim == 0:
                torch._dynamo.mark_dynamic(tensor, dim)
    return tensors


def assert_runs_right(captured: Captured, inputs: list[Tensor]) -> rewrite_plan.RewritePlan:
    """The rewritten graph gives what dynamo's graph gives, with inputs of other sizes than it was traced with."""
    config = CommunityConfig(**EXACT)
    result = rewritten(captured, config)
    plan = result.plan
    cache = RewrittenCache(config, plan, [0] * inputs[0].shape[0])
    cache.fill(inputs[1:])
    arguments = dynamo_arguments(captured, inputs)
    with torch.no_grad():
        expected = list(captured.gm.forward(*arguments))
        outputs = dict(zip(plan.kept_outputs, cache.run(result, arguments), strict=True))
    outputs.update(zip(plan.kv_outputs, cache.slab.views(cache.sequence.length), strict=True))
    torch.testing.assert_close([outputs[i] for i in range(plan.num_outputs)], expected, rtol=1e-4, atol=1e-4)
    return plan


def dynamo_arguments(captured: Captured, inputs: list[Tensor]) -> list:
    """The arguments of the graph for other inputs than those of its first run: ``hidden, *cache`` and their sizes."""
    names = ["l_hidden_", *(f"l_cache_{i}_" for i in range(len(inputs) - 1))]
    given, sizes, arguments = dict(zip(names, inputs, strict=True)), {}, []
    nodes = graph_edit.placeholders(captured.gm.graph)
    for node in nodes:
        if node.name in given:
            sizes.update(zip(map(str, node.meta["example_value"].shape), given[node.name].shape, strict=True))
    for node, traced in zip(nodes, captured.inputs, strict=True):
        value = node.meta["example_value"]
        arguments.append(sizes[str(value)] if isinstance(value, torch.SymInt) else given.get(node.name, traced))
    return arguments


def lookup(positions):
    return {"positional": lambda self, hidden, past: self.table[positions(past)]}


@pytest.mark.parametrize(
    ("methods", "freed"),
    [
        (lookup(lambda past: torch.arange(1) + past), True),
        (lookup(lambda past: past + torch.arange(1)), True),
        (lookup(lambda past: torch.add(torch.arange(1), past)), True),
        (lookup(lambda past: (torch.arange(1) + past) * 2), True),
        (lookup(lambda past: torch.arange(1, 2) * past), False),
        (lookup(lambda past: torch.arange(1) + past * 2), True),
        (lookup(lambda past: torch.arange(1) + (past + 1)), True),
        (lookup(lambda past: torch.arange(past, past + 1)), False),
        (lookup(lambda past: torch.arange(1, dtype=torch.int32) + past), False),
        (lookup(lambda past: torch.arange(1)[None] + past), True),
        (lookup(lambda past: torch.arange(1).add_(past)), False),
        (lookup(lambda past: past), False),
        ({"positional": lambda self, hidden, past: torch.ones(64) + past}, False),
        ({"positional": lambda self, hidden, past: self.table[torch.arange(1) + past] * past}, False),
        ({"positional": lambda self, hidden, past: self.table[:1] * float(past)}, False),
    ],
    ids=lambda value: None,
)
def test_only_position_arithmetic_reads_the_device_length(methods, freed):
    module = decoder(**methods)
    captured = capture_call(module, *step(7))
    plan = assert_runs_right(captured, step(11, dynamic=()))
    assert (plan.symbolic == []) == freed, plan.symbolic


def test_a_position_on_another_device_keeps_its_symbol():
    def forward(self, hidden, *cache):
        return *Decoder.forward(self, hidden, *cache), torch.arange(1, device="meta") + cache[0].shape[2]

    captured = capture_call(decoder(forward=forward), *step())
    result = rewritten(captured, CommunityConfig(**EXACT))
    node = graph_edit.output_node(result.gm.graph).args[0][-1]
    assert node.meta["example_value"].device.type == "meta"
    assert isinstance(node.args[1].meta["example_value"], torch.SymInt)


def test_the_length_of_any_layer_is_the_device_length():
    def forward(self, hidden, *cache):
        hidden, *kept = Decoder.forward(self, hidden, *cache)
        return hidden + self.table[torch.arange(1) + cache[-1].shape[2]], *kept

    module = decoder(forward=forward)
    plan = assert_runs_right(capture_call(module, *step(7, layers=2)), step(12, dynamic=(), layers=2))
    assert plan.symbolic == []


@pytest.mark.parametrize("dynamic", [(0,), (0, 2)], ids=str)
def test_a_symbolic_batch_size_stays_symbolic_and_runs(dynamic):
    module = decoder()
    captured = capture_call(module, *step(7, dynamic=dynamic))
    plan = assert_runs_right(captured, step(11 if 2 in dynamic else 7, rows=3, dynamic=()))
    assert plan.symbolic != []
    assert plan.batch(dynamo_arguments(captured, step(7, rows=5, dynamic=()))) == 5


def test_a_view_of_the_output_keeps_its_users():
    def finish(self, out):
        return self.output(out.view(2, 1, 64))

    module = decoder(finish=finish)
    captured = capture_call(module, *step(7))
    (out,) = [n for n in rewritten(captured, CommunityConfig(**EXACT)).gm.graph.nodes if "sparse_att" in n.name]
    (view,) = out.users
    assert (view.target, view.args[1:]) == ("view", (2, 1, 64))
    assert [user.target for user in view.users] == [torch._C._nn.linear]
    assert_runs_right(captured, step(9, dynamic=()))


# ---------------------------------------------------------------------- near misses


def test_layers_that_cannot_share_an_index_are_named():
    sites, _ = find_sites(turns("llama", "dynamic")[DECODE].gm)
    assert rewrite_plan.uniform(sites) is None
    others = {
        "num_query_heads": 8, "num_kv_heads": 4, "head_dim": 32, "dtype": torch.bfloat16, "cache": Cache.STATIC,
        "device": torch.device("meta"), "padding": None, "mask": sites[0].query, "is_decode": False, "batch": 3,
    }  # fmt: skip
    for field, value in others.items():
        reason = rewrite_plan.uniform([sites[0], dataclasses.replace(sites[1], **{field: value})])
        assert reason.startswith(f"the layers differ in {field}: "), reason
    assert rewrite_plan.uniform([sites[0], dataclasses.replace(sites[1], scale=1.0)]) is None


def why_not(captured: Captured) -> str | None:
    gm = graph_edit.copy_graph(captured.gm)
    with torch.no_grad():
        return backend._why_not(gm, *find_sites(gm))


def test_caches_of_different_length_stay_dense():
    tensors = step(7, dynamic=(), layers=2)
    tensors[3:] = [tensor[:, :, :5].contiguous() for tensor in tensors[3:]]
    assert why_not(capture_call(decoder(), *tensors)) == "the layers differ in the number of cached tokens: 5, 7"


def test_a_layer_that_is_refused_keeps_the_whole_graph_dense():
    def forward(self, hidden, *cache):
        hidden, *kept = Decoder.forward(self, hidden, *cache)
        memory = self.table.view(1, 4, 64, 16).expand(2, -1, -1, -1).detach()
        query = hidden.view(2, 1, 4, 16).transpose(1, 2)
        return hidden + self.finish(F.scaled_dot_product_attention(query.detach(), memory, memory)), *kept

    captured = capture_call(decoder(forward=forward), *step())
    reason = why_not(captured)
    assert reason.startswith("another layer of the same graph was refused (attention 1: cross-attention"), reason


def test_keys_that_change_after_they_were_cached_stay_dense():
    def layer(self, hidden, keys, values):
        key = self.key(hidden).view(2, 1, -1, 16).transpose(1, 2)
        query = self.query(hidden).view(2, 1, -1, 16).transpose(1, 2)
        keys, values = self.join(keys, key), self.join(values, key * 2)
        key.mul_(3)
        return self.finish(self.attend(query, keys, values)) + key.sum(), keys, values

    with pytest.raises(ValueError, match="written in place after it was added to the cache"):
        rewritten(capture_call(decoder(layer=layer), *step()), CommunityConfig(**EXACT))


def test_attention_that_autocast_gives_another_dtype_stays_dense():
    def attend(self, query, key, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Decoder.attend(self, query, key, value).float()

    with pytest.raises(ValueError, match=r"bfloat16 here \(autocast\?\)"):
        rewritten(capture_call(decoder(attend=attend), *step()), CommunityConfig(**EXACT))


def test_new_keys_of_another_dtype_stay_dense():
    def join(self, past, new):
        return torch.cat([past, new.bfloat16()], dim=-2)

    with pytest.raises(ValueError, match="key_new must have the cache's dtype"):
        rewritten(capture_call(decoder(join=join), *step()), CommunityConfig(**EXACT))


class StaticDecoder(Decoder):
    """Layers that write into buffers of 12 tokens at ``position`` of a counter each."""

    def position(self, count: Tensor) -> Tensor:
        return torch.arange(1) + count

    def forward(self, hidden: Tensor, *cache: Tensor) -> Tensor:
        for keys, values, count in zip(cache[::3], cache[1::3], cache[2::3], strict=True):
            query, key, value = (
                part(hidden).view(2, 1, -1, 16).transpose(1, 2) for part in (self.query, self.key, self.value)
            )
            position = self.position(count)
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            mask = (torch.arange(12)[None] <= position[:, None])[None, None]
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            hidden = hidden + self.finish(out)
        return hidden


def static_step(layers: int, count: Tensor | None = None) -> list[Tensor]:
    buffers = [[torch.zeros(2, 2, 12, 16), torch.zeros(2, 2, 12, 16)] for _ in range(layers)]
    counts = [torch.tensor(4) if count is None else count.clone() for _ in range(layers)]
    return [torch.randn(2, 1, 64), *(t for pair, own in zip(buffers, counts, strict=True) for t in (*pair, own))]


@pytest.mark.parametrize("count", [torch.tensor(4), torch.tensor([4])], ids=["scalar", "one element"])
def test_a_static_cache_with_one_counter_is_rewritten(count):
    captured = capture_call(StaticDecoder(), *static_step(1, count))
    plan = rewritten(captured, CommunityConfig(**EXACT)).plan
    assert captured.inputs[plan.static_length].equal(count)


@pytest.mark.parametrize(
    "position",
    [
        lambda self, count: torch.arange(1) + count * 2,
        lambda self, count: torch.arange(1) + count - 1,
        lambda self, count: torch.arange(1) + 4,
        lambda self, count: torch.arange(2, 3) + count,
    ],
)
def test_a_static_position_that_is_not_the_number_of_cached_tokens_stays_dense(position):
    module = type("Variant", (StaticDecoder,), {"position": position})()
    with pytest.raises(ValueError, match="not the value of one counter"):
        rewritten(capture_call(module, *static_step(1)), CommunityConfig(**EXACT))


def test_static_layers_that_count_on_their_own_stay_dense():
    with pytest.raises(ValueError, match="write at different positions"):
        rewritten(capture_call(StaticDecoder(), *static_step(2)), CommunityConfig(**EXACT))
