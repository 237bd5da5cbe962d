"""``ckv::route``: score every community for every row and graph of a decode step."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_graphs, require_length

SCORES = ("max", "softmax", "recency", "random")


def _check(query: Tensor, num_graphs: int, num_kv_heads: int, score: str, length: Tensor) -> None:
    require(query.dim() == 4 and query.shape[2] == 1, "query", "be [batch, heads, 1, head_dim]", tuple(query.shape))
    require(
        num_kv_heads > 0 and query.shape[1] % num_kv_heads == 0,
        "num_kv_heads",
        f"divide the {query.shape[1]} query heads",
        num_kv_heads,
    )
    require_graphs(num_graphs, query.shape[1], num_kv_heads)
    require(score in SCORES, "score", f"be one of {', '.join(map(repr, SCORES))}", repr(score))
    require_length(length)


def _route(
    query: Tensor,
    centroid: Tensor,
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
) -> None:
    from ckv_compile.reference.route import route

    _check(query, num_graphs, num_kv_heads, score, length)
    route(
        query, centroid, size, num_communities, capacity, scores, layer, num_graphs, num_kv_heads, scale, score, length
    )


def _route_fake(
    query: Tensor,
    centroid: Tensor,
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
) -> None:
    _check(query, num_graphs, num_kv_heads, score, length)


register_op(
    "route(Tensor query, Tensor centroid, Tensor size, Tensor num_communities, Tensor capacity, Tensor(a!) scores, "
    "int layer, int num_graphs, int num_kv_heads, float scale, str score, Tensor length) -> ()",
    _route,
    _route_fake,
)
