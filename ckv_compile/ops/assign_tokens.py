"""``ckv::assign_tokens``: log a new token and give it, or older ones, a community in every layer (eq. 6 and 7).

It runs once, after the attention of all layers: that has written the keys and, through ``ckv::pick_edges``, the edges
which this one reads, so that no compiler moves it before an operator that still reads ``n_indexed`` or the communities
as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_first, require_length


def _check(
    new_neighbor: Tensor,
    new_weight: Tensor,
    length: Tensor,
    first: Tensor,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_lists: int,
    kappa: int,
    num_graphs: int,
    num_sink_tokens: int,
    lam: float,
    new_value: Tensor | None,
    mean_value: Tensor | None,
    log_value: Tensor | None,
) -> None:
    require(new_neighbor.dtype == torch.int32, "new_neighbor", "be int32", new_neighbor.dtype)
    require(new_weight.dtype == torch.float32, "new_weight", "be float32", new_weight.dtype)
    require_length(length)
    require(first.dim() == 1, "first", "be [batch], one per row", tuple(first.shape))
    require_first(first, first.shape[0])
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "kappa": kappa}
    for name, size in sizes.items():
        require_at_least(name, size, 1)
    require(
        num_graphs > 0 and num_lists > 0 and num_lists % num_graphs == 0,
        "num_graphs",
        f"divide the {num_lists} lists",
        num_graphs,
    )
    require(
        num_graphs == 1 or num_graphs % num_kv_heads == 0,
        "num_graphs",
        f"be 1 or a multiple of the {num_kv_heads} KV heads",
        num_graphs,
    )
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    for name, state in (("mean_value", mean_value), ("log_value", log_value)):
        require((state is None) == (new_value is None), name, "be given exactly where new_value is", state)
        if new_value is not None and state is not None:
            require(state.dtype == new_value.dtype, name, f"be {new_value.dtype}", state.dtype)
    require(0.0 <= lam <= 1.0, "lam", "be between 0 and 1", lam)


register_op(
    "assign_tokens(Tensor new_neighbor, Tensor new_weight, Tensor new_key, Tensor(a!) centroid, "
    "Tensor(m!) centroid_scale, Tensor channel_scale, Tensor(n!) log_mean, Tensor(p!) mean_at, "
    "Tensor(b!) start, Tensor(c!) stored, Tensor(d!) size, Tensor(e!) num_communities, Tensor(f!) n_indexed, "
    "Tensor(g!) log_community, Tensor log_first, Tensor(h!) label, Tensor(i!) community_weight, "
    "Tensor(j!) total_weight, Tensor(k!) edge_neighbor, Tensor(l!) edge_weight, Tensor gamma, Tensor capacity, "
    "Tensor length, Tensor first, int num_layers, int num_kv_heads, int head_dim, int num_lists, int kappa, "
    "int num_graphs, int num_sink_tokens, float lam, Tensor? new_value=None, Tensor(o!)? mean_value=None, "
    "Tensor(q!)? log_value=None) -> ()",
    _check,
)
