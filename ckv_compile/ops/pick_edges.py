"""``ckv::pick_edges``: the edges of the new token in every layer, out of what its attention kept (eq. 6).

It runs once, after the attention of all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least
from ckv_compile.ops.sparse_attention_edges import EDGE_SOURCES, check_candidates


def _check(
    candidate: Tensor,
    candidate_score: Tensor,
    candidate_rest: Tensor,
    candidate_norm: Tensor,
    first: Tensor,
    num_layers: int,
    num_places: int,
    num_lists: int,
    budget: int,
    num_sink_tokens: int,
    kappa: int,
    source: str,
) -> None:
    check_candidates(candidate, candidate_score, candidate_rest, candidate_norm)
    require(first.dim() == 1, "first", "be [batch], one per row", tuple(first.shape))
    sizes = {"num_layers": num_layers, "num_places": num_places, "budget": budget, "kappa": kappa}
    for name, size in sizes.items():
        require_at_least(name, size, 1)
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require(num_lists > 0 and num_lists % num_places == 0, "num_places", f"divide the {num_lists} lists", num_places)
    require(source in EDGE_SOURCES, "source", f"be one of {EDGE_SOURCES}", source)


def _edges(candidate: Tensor, first: Tensor, num_layers: int, num_lists: int, kappa: int) -> tuple[Tensor, Tensor]:
    shape = (num_layers, first.shape[0], num_lists, kappa)
    return candidate.new_empty(shape, dtype=torch.int32), candidate.new_empty(shape, dtype=torch.float32)


register_op(
    "pick_edges(Tensor candidate, Tensor candidate_score, Tensor candidate_rest, Tensor candidate_norm, "
    "Tensor first, int num_layers, int num_places, int num_lists, int budget, int num_sink_tokens, int kappa, str source) "
    "-> (Tensor, Tensor)",
    _check,
    _edges,
)
