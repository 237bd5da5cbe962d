"""``ckv::route_coarse``: the groups of communities that ``route`` should score, where there are many.

Parts of the groups each list their best; how many is for the implementation to decide, up to ``coarse_parts``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import PROGRAMS
from ckv_compile.ops.library import register_op, require, require_at_least, require_graphs


def _check(
    query: Tensor, coarse: Tensor, num_graphs: int, num_kv_heads: int, least: int, start: int, slots: int
) -> None:
    require(query.dim() == 4, "query", "be [batch, heads, tokens, head_dim]", tuple(query.shape))
    require(
        num_kv_heads > 0 and query.shape[1] % num_kv_heads == 0,
        "num_kv_heads",
        f"divide the {query.shape[1]} query heads",
        num_kv_heads,
    )
    require_graphs(num_graphs, query.shape[1], num_kv_heads)
    require(coarse.dtype == torch.int8, "coarse", "be int8", coarse.dtype)
    require_at_least("least", least, 1)
    require_at_least("start", start, 0)
    require(slots >= least and slots % PROGRAMS == 0, "slots", f"be a multiple of {PROGRAMS} from {least} on", slots)


def _lists(query: Tensor, num_graphs: int, slots: int) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], num_graphs)
    return query.new_empty((*shape, slots), dtype=torch.int32), query.new_empty(shape, dtype=torch.int32)


register_op(
    "route_coarse(Tensor query, Tensor coarse, Tensor coarse_scale, Tensor channel_scale, Tensor num_grouped, "
    "Tensor num_communities, Tensor capacity, Tensor(a!) coarse_scores, Tensor(b!) scores, int layer, int num_graphs, "
    "int num_kv_heads, float scale, int least, int start, int slots) -> (Tensor, Tensor)",
    _check,
    _lists,
)
