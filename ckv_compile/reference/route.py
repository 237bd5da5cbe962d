"""Score every community for every row and graph of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import GROUP
from ckv_compile.reference.nominal import accumulate_dtype, capacities, layer_state


def route(
    query: Tensor,
    centroid: Tensor,
    centroid_scale: Tensor,
    channel_scale: Tensor,
    size: Tensor,
    num_communities: Tensor,
    capacity: Tensor,
    scores: Tensor,
    layer: int,
    num_graphs: int,
    num_kv_heads: int,
    scale: float,
    score: str,
    length: Tensor,
    visit: Tensor | None = None,
    visit_count: Tensor | None = None,
) -> None:
    """Fill ``scores``, flat float32 [B, G, C], with the score of each community for the queries from ``length`` on.

    query: [B, Hq, Q, D], the new tokens of each row; head h belongs to graph h // (Hq // G). The mean key of a community is
    centroid * centroid_scale * channel_scale (see ``encode_centroids``) with centroid flat int8 [L, B, G, C, D],
    centroid_scale flat float32 [L, B, G, C] and channel_scale flat float32 [L, B, G, D]. With one graph over several
    KV heads D is Hkv * D, the heads' keys side by side, and a head uses its KV head's part.
    size int32 [L, B, G, C], num_communities int32 [L, B, G]: flat. capacity: int32 [3]. length: int [1].
    score: "max" is the largest q . centroid * scale over the graph's heads and the Q queries, for which one retrieval
    serves, "relative" the same with each query divided by the length of q * channel_scale * scale: what its products
    deviate by over communities, if centroids are centred and channels independent. "softmax" is the sum over both of the
    softmax over communities, "recency" the community's id, "random" a hash of (id, length, layer) in [0, 1).
    Ids from ``num_communities`` on and empty communities get -inf. So do, where visit int32 [B, G, any] and visit_count
    int32 [B, G] of ``route_coarse`` are given, communities of groups that are not listed there; a count of -1 lists all.
    """
    batch = query.shape[0]
    room = capacities(capacity)[0]
    shape = (batch, num_graphs, room)
    out = layer_state(scores, 0, shape, "scores")
    number = layer_state(num_communities, layer, shape[:2], "num_communities")
    used = min(int(number.amax()), room) if number.numel() else 0
    out[..., used:] = -torch.inf
    if used == 0:
        return
    ids = torch.arange(used, device=query.device)
    sizes = layer_state(size, layer, shape, "size")[..., :used]
    absent = (ids >= number[..., None]) | (sizes <= 0)
    if visit is not None and visit_count is not None:
        absent |= ~_visited(visit, visit_count, used)
    if score == "recency":
        values = ids.to(out.dtype).expand(batch, num_graphs, used)
    elif score == "random":
        values = _hash(ids, int(length), layer).to(out.dtype).expand(batch, num_graphs, used)
    else:
        products = _products(
            query, centroid, centroid_scale, channel_scale, layer, num_graphs, num_kv_heads, room, used
        )  # [B, G, heads * Q, used]
        if score == "relative":
            parts = num_kv_heads if num_graphs == 1 else 1
            graphs, dim = (batch, num_graphs, parts), query.shape[3]
            weight = layer_state(channel_scale, layer, (*graphs, dim), "channel_scale")[:, :, :, None] * scale
            weight = query.to(products.dtype).reshape(*graphs, -1, dim) * weight
            length_of = torch.linalg.vector_norm(weight, dim=-1).clamp(min=1e-15).flatten(2)
            values = (products * scale / length_of[..., None]).amax(2)
        elif score == "max":
            values = products.amax(2) * scale if scale >= 0 else products.amin(2) * scale
        else:
            products = (products * scale).masked_fill_(absent[:, :, None], -torch.inf)
            values = torch.softmax(products, -1).sum(2)
    out[..., :used] = torch.where(absent, -torch.inf, values.to(out.dtype))


def _products(
    query: Tensor,
    centroid: Tensor,
    centroid_scale: Tensor,
    channel_scale: Tensor,
    layer: int,
    num_graphs: int,
    num_kv_heads: int,
    room: int,
    used: int,
) -> Tensor:
    """q . mean key in float32 for the first ``used`` communities: [B, G, Hq // G * Q, used]."""
    batch, _, _, dim = query.shape
    graphs, parts = (batch, num_graphs), num_kv_heads if num_graphs == 1 else 1
    codes = layer_state(centroid, layer, (*graphs, room, parts, dim), "centroid")[:, :, :used]
    scales = layer_state(centroid_scale, layer, (*graphs, room), "centroid_scale")[:, :, :used]
    channels = layer_state(channel_scale, layer, (*graphs, parts, dim), "channel_scale")
    queries = query.to(accumulate_dtype(query.dtype)).reshape(*graphs, parts, -1, dim) * channels[:, :, :, None]
    products = queries @ codes.permute(0, 1, 3, 4, 2).to(queries.dtype)  # [B, G, parts, heads * Q, used]
    return (products * scales[:, :, None, None]).flatten(2, 3)


def _visited(visit: Tensor, count: Tensor, used: int) -> Tensor:
    """bool [B, G, used]: communities of the listed groups."""
    groups = -(-used // GROUP)
    listed = (torch.arange(visit.shape[2], device=visit.device) < count[..., None]) & (visit >= 0) & (visit < groups)
    chosen = torch.zeros(*visit.shape[:2], groups + 1, dtype=torch.bool, device=visit.device)
    chosen.scatter_(2, torch.where(listed, visit, groups).long(), True)
    return (chosen[..., :groups] | (count < 0)[..., None]).repeat_interleave(GROUP, 2)[..., :used]


def _hash(ids: Tensor, length: int, layer: int) -> Tensor:
    """A 24-bit fraction in [0, 1) from three integers; arithmetic is modulo 2**32, so that kernels can repeat it."""
    word = 0xFFFFFFFF
    x = (ids.long() * 0x9E3779B1 + (length * 0x85EBCA77 + layer * 0xC2B2AE3D & word)) & word
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & word
    x = ((x ^ (x >> 15)) * 0x846CA68B) & word
    return ((x ^ (x >> 16)) >> 8).double() * 2.0**-24
