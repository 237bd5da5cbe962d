"""The attended keys most similar to a new token's key."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.approximate_edges import listed_positions
from ckv_compile.reference.attended import attended_spans, equal_spans, gather_rows, grouped_scores, retrieved_tokens
from ckv_compile.reference.key_neighbors import unit_keys
from ckv_compile.reference.nominal import cache_prefix
from ckv_compile.reference.top_entries import top_entries


def key_edges(
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    num_graphs: int,
) -> tuple[Tensor, Tensor]:
    """Cosine nearest keys of the token at position ``length`` within its attended set.

    The key-graph counterpart of ``approximate_edges``, with its arguments; candidates are the attended positions
    without the leading sinks and without the token itself, as lists of ``key_neighbors`` hold earlier tokens only.
    With one graph over several KV heads the similarity is the sum of the heads' cosines.
    Returns neighbor int32 [B, G, kappa] (positions in order of similarity, -1 where there are fewer) and weight
    float32 of the same shape: 1 for a neighbour, 0 for none.
    """
    batch, num_kv_heads = key.shape[:2]
    position = int(length)
    spans = attended_spans(n_indexed, position, first, layer, num_sink_tokens, recent_window)
    key = cache_prefix(key, position + 1, "key")
    neighbor = torch.full((batch, num_graphs, kappa), -1, dtype=torch.int32, device=key.device)
    for rows, span in equal_spans(spans):
        if span.first == span.stop:
            continue
        begin = max(span.tail_start, min(span.first + num_sink_tokens, position))
        lists, valid = retrieved_tokens(tokens[rows], count[rows], span, num_kv_heads)
        new = unit_keys(key[rows, :, position:], False)[:, :, 0]  # [B, Hkv, D]
        parts = [grouped_scores(new, unit_keys(key[rows, :, begin:position], False))]
        if lists.shape[2]:
            parts.insert(0, grouped_scores(new, unit_keys(gather_rows(key[rows], lists), False)))
            parts[0].masked_fill_(~valid, -torch.inf)
        similarity = torch.cat(parts, -1)
        if num_graphs < num_kv_heads:
            similarity = similarity.sum(1, keepdim=True)
        best, columns = top_entries(similarity, kappa)
        filled = slice(0, columns.shape[-1])
        found = best > -torch.inf
        positions = listed_positions(columns, lists[:, :num_graphs], span._replace(tail_start=begin))
        neighbor[rows, :, filled] = positions.masked_fill(~found, -1).to(torch.int32)
    return neighbor, (neighbor >= 0).float()
