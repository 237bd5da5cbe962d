"""Communities as keys and values of attention: what their means are, and how many tokens each stands for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ckv_compile.reference.nominal import accumulate_dtype, capacities, layer_state


class SummaryEntries(NamedTuple):
    """One key, value and bias of the logit per community: [B, P, b, D], [B, P, b, Dv] and [B, P, b].

    P is the larger of the numbers of graphs and KV heads. The bias is log(size), -inf where there is no community.
    """

    key: Tensor
    value: Tensor
    bias: Tensor

    def of(self, rows: slice) -> SummaryEntries:
        return SummaryEntries(self.key[rows], self.value[rows], self.bias[rows])


def summary_entries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    summaries: Tensor,
    centroid: Tensor | None,
    centroid_scale: Tensor | None,
    channel_scale: Tensor | None,
    size: Tensor | None,
    mean_value: Tensor | None,
    capacity: Tensor,
    layer: int,
) -> SummaryEntries:
    """Gather the communities ``summaries`` int [B, G, b], of which negative ids are none; see ``sparse_attention``.

    Keys are in float32 (float64 for a query in float64), values in their own dtype.
    """
    assert centroid is not None
    assert centroid_scale is not None
    assert channel_scale is not None
    assert size is not None
    assert mean_value is not None
    batch, graphs, _ = summaries.shape
    kv_heads, dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
    room, parts = capacities(capacity)[0], kv_heads if graphs == 1 else 1
    sizes = layer_state(size, layer, (batch, graphs, room), "size")
    scales = layer_state(centroid_scale, layer, (batch, graphs, room), "centroid_scale")
    channels = layer_state(channel_scale, layer, (batch, graphs, parts, dim), "channel_scale")
    codes = layer_state(centroid, layer, (batch, graphs, room, parts, dim), "centroid")
    means = layer_state(mean_value, layer, (batch, graphs, room, parts, value_dim), "mean_value")

    ids = summaries.long().clamp(min=0)
    tokens = torch.where(summaries >= 0, sizes.gather(2, ids), 0)
    present = (tokens > 0)[..., None, None]
    row, graph = (torch.arange(count, device=ids.device) for count in (batch, graphs))
    at = (row[:, None, None], graph[None, :, None], ids)
    dtype = accumulate_dtype(query.dtype)
    keys = codes[at].to(dtype) * scales[at].to(dtype)[..., None, None] * channels[:, :, None].to(dtype)
    keys = torch.where(present, keys, 0).permute(0, 1, 3, 2, 4).flatten(1, 2)  # [B, P, b, D]
    values = torch.where(present, means[at], 0).permute(0, 1, 3, 2, 4).flatten(1, 2)
    bias = torch.where(tokens > 0, tokens.to(dtype).clamp(min=1).log(), -torch.inf)
    return SummaryEntries(keys, values, bias.repeat_interleave(parts, 1))
