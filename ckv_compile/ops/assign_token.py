"""``ckv::assign_token``: give a new token its community and update the index (eq. 6 and 7).

``attended`` is the output of the layer's ``sparse_attention`` and is not read. That operator reads ``n_indexed``, which
this one advances, and Inductor moves operators towards their consumers: without the tie it would attend after the
assignment, and Inductor would keep a copy of the old ``n_indexed`` for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import (
    INT_DTYPES,
    register_op,
    require,
    require_at_least,
    require_first,
    require_length,
)


def _check(
    neighbor: Tensor,
    weight: Tensor,
    key_new: Tensor,
    length: Tensor,
    first: Tensor,
    num_graphs: int,
    num_sink_tokens: int,
    lam: float,
) -> None:
    require(neighbor.dim() == 3, "neighbor", "be [batch, lists, kappa]", tuple(neighbor.shape))
    require(neighbor.dtype in INT_DTYPES, "neighbor", "be int32 or int64", neighbor.dtype)
    require(weight.shape == neighbor.shape, "weight", f"be {tuple(neighbor.shape)}", tuple(weight.shape))
    require(weight.dtype == torch.float32, "weight", "be float32", weight.dtype)
    require(
        num_graphs > 0 and neighbor.shape[1] % num_graphs == 0,
        "num_graphs",
        f"divide the {neighbor.shape[1]} lists",
        num_graphs,
    )
    require(
        key_new.dim() == 4 and key_new.shape[0] == neighbor.shape[0] and key_new.shape[2] == 1,
        "key_new",
        f"be [{neighbor.shape[0]}, num_kv_heads, 1, head_dim]",
        tuple(key_new.shape),
    )
    require(
        num_graphs == 1 or num_graphs % key_new.shape[1] == 0,
        "num_graphs",
        f"be 1 or a multiple of the {key_new.shape[1]} KV heads",
        num_graphs,
    )
    require_length(length)
    require_first(first, neighbor.shape[0])
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require(0.0 <= lam <= 1.0, "lam", "be between 0 and 1", lam)


def _assign_token(
    neighbor: Tensor,
    weight: Tensor,
    attended: Tensor,
    key_new: Tensor,
    centroid: Tensor,
    centroid_scale: Tensor,
    channel_scale: Tensor,
    centroid_mean: Tensor,
    start: Tensor,
    stored: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    log_community: Tensor,
    log_first: Tensor,
    label: Tensor,
    community_weight: Tensor,
    total_weight: Tensor,
    edge_neighbor: Tensor,
    edge_weight: Tensor,
    gamma: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    num_graphs: int,
    num_sink_tokens: int,
    lam: float,
) -> None:
    from ckv_compile.reference.assign_token import assign_token

    _check(neighbor, weight, key_new, length, first, num_graphs, num_sink_tokens, lam)
    assign_token(
        neighbor,
        weight,
        key_new,
        centroid,
        centroid_scale,
        channel_scale,
        centroid_mean,
        start,
        stored,
        size,
        num_communities,
        n_indexed,
        log_community,
        log_first,
        label,
        community_weight,
        total_weight,
        edge_neighbor,
        edge_weight,
        gamma,
        capacity,
        length,
        first,
        layer,
        num_graphs,
        num_sink_tokens,
        lam,
    )


def _assign_token_fake(
    neighbor: Tensor,
    weight: Tensor,
    attended: Tensor,
    key_new: Tensor,
    centroid: Tensor,
    centroid_scale: Tensor,
    channel_scale: Tensor,
    centroid_mean: Tensor,
    start: Tensor,
    stored: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    log_community: Tensor,
    log_first: Tensor,
    label: Tensor,
    community_weight: Tensor,
    total_weight: Tensor,
    edge_neighbor: Tensor,
    edge_weight: Tensor,
    gamma: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    num_graphs: int,
    num_sink_tokens: int,
    lam: float,
) -> None:
    _check(neighbor, weight, key_new, length, first, num_graphs, num_sink_tokens, lam)


register_op(
    "assign_token(Tensor neighbor, Tensor weight, Tensor attended, Tensor key_new, Tensor(a!) centroid, "
    "Tensor(m!) centroid_scale, Tensor channel_scale, Tensor(n!) centroid_mean, "
    "Tensor(b!) start, Tensor(c!) stored, Tensor(d!) size, Tensor(e!) num_communities, Tensor(f!) n_indexed, "
    "Tensor(g!) log_community, Tensor log_first, Tensor(h!) label, Tensor(i!) community_weight, "
    "Tensor(j!) total_weight, Tensor(k!) edge_neighbor, Tensor(l!) edge_weight, Tensor gamma, Tensor capacity, "
    "Tensor length, Tensor first, int layer, int num_graphs, int num_sink_tokens, float lam) -> ()",
    _assign_token,
    _assign_token_fake,
)
