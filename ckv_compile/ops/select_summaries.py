"""``ckv::select_summaries``: the best of the communities that ``ckv::retrieve`` leaves out, attended by their means."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_first, require_length


def _check(
    scores: Tensor,
    size: Tensor,
    length: Tensor,
    first: Tensor,
    batch: int,
    num_graphs: int,
    budget: int,
    reserved: int,
    num_sink_tokens: int,
    recent_window: int,
) -> None:
    require(scores.dtype == torch.float32, "scores", "be float32", scores.dtype)
    require(size.dtype == torch.int32, "size", "be int32", size.dtype)
    require_length(length)
    require_first(first, batch)
    require_at_least("num_graphs", num_graphs, 1)
    require_at_least("reserved", reserved, 1)
    require_at_least("budget", budget, reserved)
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("recent_window", recent_window, 1)


def _ids(scores: Tensor, batch: int, num_graphs: int, reserved: int) -> Tensor:
    return scores.new_empty((batch, num_graphs, reserved), dtype=torch.int32)


register_op(
    "select_summaries(Tensor scores, Tensor size, Tensor num_communities, Tensor n_indexed, Tensor capacity, "
    "Tensor length, Tensor first, Tensor(a!) tally, int layer, SymInt batch, int num_graphs, int budget, int reserved, "
    "int num_sink_tokens, int recent_window) -> Tensor",
    _check,
    _ids,
)
