"""``ckv::community_centroids``: mean key of every community."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.ops.library import INT_DTYPES, register_op, require


def _check(key: Tensor, member: Tensor, start: Tensor, size: Tensor) -> None:
    require(key.dim() == 4, "key", "have 4 dimensions [batch, heads, tokens, head_dim]", tuple(key.shape))
    require(
        member.dim() == 3 and member.shape[0] == key.shape[0], "member", "be [batch, graphs, any]", tuple(member.shape)
    )
    graphs, heads = member.shape[1], key.shape[1]
    require(graphs == 1 or graphs % heads == 0, "member", f"hold 1 graph or a multiple of {heads}", graphs)
    require(
        start.dim() == 3 and start.shape[:2] == member.shape[:2],
        "start",
        f"be [{key.shape[0]}, {graphs}, communities]",
        tuple(start.shape),
    )
    require(size.shape == start.shape, "size", f"have start's shape {tuple(start.shape)}", tuple(size.shape))
    for name, tensor in (("member", member), ("start", start), ("size", size)):
        require(tensor.dtype in INT_DTYPES, name, "be int32 or int64", tensor.dtype)


def _means(key: Tensor, start: Tensor) -> Tensor:
    batch, graphs, communities = start.shape
    dim = key.shape[3] if graphs > 1 else key.shape[1] * key.shape[3]
    return key.new_empty((batch, graphs, communities, dim))


register_op(
    "community_centroids(Tensor key, Tensor member, Tensor start, Tensor size) -> Tensor",
    _check,
    _means,
)
