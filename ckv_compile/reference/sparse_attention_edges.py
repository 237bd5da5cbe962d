"""Sparse attention of a new token, and the edges of that token for the end of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import candidate_slots, edge_lists, rest_slots
from ckv_compile.reference.approximate_edges import approximate_edges
from ckv_compile.reference.key_edges import key_edges
from ckv_compile.reference.nominal import cache_prefix, layer_state
from ckv_compile.reference.pick_edges import NO_ENTRY, edge_entries
from ckv_compile.reference.sparse_attention import sparse_attention


def sparse_attention_edges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    sink_logits: Tensor | None,
    candidate: Tensor,
    candidate_score: Tensor,
    candidate_rest: Tensor,
    candidate_norm: Tensor,
    new_key: Tensor,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    source: str,
    summaries: Tensor | None = None,
    centroid: Tensor | None = None,
    centroid_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
    size: Tensor | None = None,
    mean_value: Tensor | None = None,
    new_value: Tensor | None = None,
) -> Tensor:
    """``sparse_attention`` of one query per row, whose output [B, Hq, 1, Dv] it returns.

    source: "keys" for the lists of ``key_edges`` (H = G, P = G), "attention" for those of ``approximate_edges`` (H = Hq,
    P = max(G, Hkv)), both of tokens alone.
    Mutated flat state, of which the layer's part is written: candidate int32 [L, B, P, E], candidate_score float32
    [L, B, H, E], candidate_rest int64 [L, B, H, R] and candidate_norm float32 [L, B, H], of which ``pick_edges`` makes
    these lists (E is ``candidate_slots``, R ``rest_slots``; which candidate takes which place is left open: here all
    go to candidate_rest); new_key [L, B, Hkv, D] (key dtype), the keys at position ``length``, and, with summaries,
    new_value [L, B, Hkv, Dv], the values there.
    The other arguments, and the errors, are those of ``sparse_attention``.
    """
    attended = (tokens, count, n_indexed, capacity, length, first, layer)
    graphs = tokens.shape[1]
    batch, kv_heads, _, dim = key.shape
    places, _ = edge_lists(source == "keys", graphs, query.shape[1], kv_heads)
    if source == "keys":
        neighbor, _ = key_edges(key, *attended, num_sink_tokens, recent_window, kappa, graphs)
        score, places = (
            torch.arange(kappa, 0, -1, dtype=torch.float32, device=key.device).expand(neighbor.shape),
            graphs,
        )
    else:
        neighbor, weight = approximate_edges(query, key, *attended, scale, num_sink_tokens, recent_window, kappa)
        score = weight.log2().clamp(min=-1e30)
    position, slots = int(length), candidate_slots(tokens.shape[2], num_sink_tokens)
    layer_state(candidate, layer, (batch, places, slots), "candidate").fill_(-1)
    rest = layer_state(candidate_rest, layer, (*neighbor.shape[:2], rest_slots(kappa)), "candidate_rest")
    rest.fill_(NO_ENTRY)[:, :, :kappa].copy_(edge_entries(score, neighbor))
    layer_state(candidate_norm, layer, tuple(neighbor.shape[:2]), "candidate_norm").zero_()
    new = cache_prefix(key, position + 1, "key")[:, :, position]
    layer_state(new_key, layer, (batch, kv_heads, dim), "new_key").copy_(new)
    if new_value is not None:
        new = cache_prefix(value, position + 1, "value")[:, :, position]
        layer_state(new_value, layer, (batch, kv_heads, value.shape[3]), "new_value").copy_(new)
    return sparse_attention(
        query, key, value, tokens, count, n_indexed, capacity, length, first, sink_logits, layer, scale,
        num_sink_tokens, recent_window, summaries, centroid, centroid_scale, channel_scale, size, mean_value,
    )  # fmt: skip
