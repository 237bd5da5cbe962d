"""``ckv::retrieve``: the tokens of the best-scoring whole communities that fit the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_first, require_length


def _check(
    scores: Tensor,
    length: Tensor,
    first: Tensor,
    batch: int,
    num_graphs: int,
    budget: int,
    num_sink_tokens: int,
    recent_window: int,
    num_new: int,
    reserved: int,
) -> None:
    require(scores.dtype == torch.float32, "scores", "be float32", scores.dtype)
    require_length(length)
    require_first(first, batch)
    require_at_least("num_graphs", num_graphs, 1)
    require_at_least("budget", budget, 1)
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("recent_window", recent_window, 1)
    require_at_least("num_new", num_new, 1)
    require_at_least("reserved", reserved, 0)


def _lists(scores: Tensor, batch: int, num_graphs: int, budget: int) -> tuple[Tensor, Tensor]:
    return (
        scores.new_empty((batch, num_graphs, budget), dtype=torch.int32),
        scores.new_empty((batch, num_graphs), dtype=torch.int32),
    )


register_op(
    "retrieve(Tensor shortlist, Tensor left_out, Tensor scores, Tensor start, Tensor stored, Tensor size, "
    "Tensor member, Tensor log_community, Tensor log_first, Tensor num_communities, Tensor n_indexed, "
    "Tensor capacity, Tensor length, Tensor first, Tensor(a!) tally, int layer, SymInt batch, int num_graphs, "
    "int budget, int num_sink_tokens, int recent_window, bool has_log, int num_new=1, int reserved=0) -> (Tensor, Tensor)",
    _check,
    _lists,
)
