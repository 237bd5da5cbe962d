"""Sparse attention of a new token, and the edges of that token for the end of the step."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.reference.approximate_edges import approximate_edges
from ckv_compile.reference.key_edges import key_edges
from ckv_compile.reference.nominal import cache_prefix, layer_state
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
    new_neighbor: Tensor,
    new_weight: Tensor,
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

    source: "keys" for the lists of ``key_edges`` (H = G), "attention" for those of ``approximate_edges`` (H = Hq).
    Mutated flat state, of which the layer's part is written: new_neighbor int32 and new_weight float32
    [L, B, H, kappa], these lists, of tokens alone; new_key [L, B, Hkv, D] (key dtype), the keys at position ``length``,
    and, with summaries, new_value [L, B, Hkv, Dv], the values there.
    The other arguments, and the errors, are those of ``sparse_attention``.
    """
    attended = (tokens, count, n_indexed, capacity, length, first, layer)
    if source == "keys":
        graphs = tokens.shape[1]
        neighbor, weight = key_edges(key, *attended, num_sink_tokens, recent_window, kappa, graphs)
    else:
        neighbor, weight = approximate_edges(query, key, *attended, scale, num_sink_tokens, recent_window, kappa)
    batch, kv_heads, _, dim = key.shape
    position = int(length)
    layer_state(new_neighbor, layer, tuple(neighbor.shape), "new_neighbor").copy_(neighbor)
    layer_state(new_weight, layer, tuple(weight.shape), "new_weight").copy_(weight)
    new = cache_prefix(key, position + 1, "key")[:, :, position]
    layer_state(new_key, layer, (batch, kv_heads, dim), "new_key").copy_(new)
    if new_value is not None:
        new = cache_prefix(value, position + 1, "value")[:, :, position]
        layer_state(new_value, layer, (batch, kv_heads, value.shape[3]), "new_value").copy_(new)
    return sparse_attention(
        query, key, value, tokens, count, n_indexed, capacity, length, first, sink_logits, layer, scale,
        num_sink_tokens, recent_window, summaries, centroid, centroid_scale, channel_scale, size, mean_value,
    )  # fmt: skip
