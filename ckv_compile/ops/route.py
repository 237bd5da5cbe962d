"""``ckv::route``: score every community for every row and graph of a decode step, and shortlist the best.

The shortlist is what spares ``retrieve`` from looking at every score. ``PROGRAMS`` parts of the communities each list
their best; how many is for the implementation to decide, and the largest score that a part left out says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import PROGRAMS
from ckv_compile.ops.library import register_op, require, require_graphs, require_length

SCORES = ("max", "relative", "softmax", "recency", "random")


def _check(
    query: Tensor,
    centroid: Tensor,
    num_graphs: int,
    num_kv_heads: int,
    score: str,
    length: Tensor,
    slots: int,
    visit: Tensor | None,
    visit_count: Tensor | None,
) -> None:
    require(query.dim() == 4, "query", "be [batch, heads, tokens, head_dim]", tuple(query.shape))
    require(
        num_kv_heads > 0 and query.shape[1] % num_kv_heads == 0,
        "num_kv_heads",
        f"divide the {query.shape[1]} query heads",
        num_kv_heads,
    )
    require_graphs(num_graphs, query.shape[1], num_kv_heads)
    require(score in SCORES, "score", f"be one of {', '.join(map(repr, SCORES))}", repr(score))
    require(centroid.dtype == torch.int8, "centroid", "be int8", centroid.dtype)
    require_length(length)
    require(slots >= PROGRAMS and slots & (slots - 1) == 0, "slots", f"be a power of 2 from {PROGRAMS} on", slots)
    require((visit is None) == (visit_count is None), "visit_count", "be given with visit", type(visit_count).__name__)
    if visit is not None and visit_count is not None:
        lists = (query.shape[0], num_graphs)
        allowed = score in ("max", "relative")
        require(allowed, "score", "be 'max' or 'relative' where visit is given", repr(score))
        require(
            visit.dim() == 3 and visit.shape[:2] == lists,
            "visit",
            f"be [{lists[0]}, {lists[1]}, any]",
            tuple(visit.shape),
        )
        require(visit_count.shape == lists, "visit_count", f"be {lists}", tuple(visit_count.shape))


def _shortlist(query: Tensor, num_graphs: int, slots: int) -> tuple[Tensor, Tensor]:
    batch = query.shape[0]
    return (
        query.new_empty((batch, num_graphs, 5, slots), dtype=torch.int32),
        query.new_empty((batch, num_graphs, PROGRAMS), dtype=torch.float32),
    )


def _route(
    query: Tensor, centroid: Tensor, centroid_scale: Tensor, channel_scale: Tensor, size: Tensor, num_communities: Tensor,
    capacity: Tensor, scores: Tensor, layer: int, num_graphs: int, num_kv_heads: int, scale: float, score: str,
    length: Tensor, slots: int, visit: Tensor | None, visit_count: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from ckv_compile.reference.route import route

    route(
        query, centroid, centroid_scale, channel_scale, size, num_communities, capacity, scores, layer, num_graphs,
        num_kv_heads, scale, score, length, visit, visit_count,
    )  # fmt: skip
    shortlist, left_out = _shortlist(query, num_graphs, slots)
    return shortlist.zero_(), left_out.fill_(torch.inf)  # nothing is listed


register_op(
    "route(Tensor query, Tensor centroid, Tensor centroid_scale, Tensor channel_scale, Tensor size, "
    "Tensor start, Tensor stored, Tensor num_communities, Tensor capacity, Tensor(a!) scores, int layer, "
    "int num_graphs, int num_kv_heads, float scale, str score, Tensor length, int slots, Tensor? visit=None, "
    "Tensor? visit_count=None) -> (Tensor, Tensor)",
    _check,
    _shortlist,
    _route,
)
