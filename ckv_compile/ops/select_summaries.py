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


def _select_summaries(
    scores: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    tally: Tensor,
    layer: int,
    batch: int,
    num_graphs: int,
    budget: int,
    reserved: int,
    num_sink_tokens: int,
    recent_window: int,
) -> Tensor:
    from ckv_compile.reference.select_summaries import select_summaries

    sizes = (batch, num_graphs, budget, reserved, num_sink_tokens, recent_window)
    _check(scores, size, length, first, *sizes)
    return select_summaries(scores, size, num_communities, n_indexed, capacity, length, first, tally, layer, *sizes)


def _select_summaries_fake(
    scores: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    tally: Tensor,
    layer: int,
    batch: int,
    num_graphs: int,
    budget: int,
    reserved: int,
    num_sink_tokens: int,
    recent_window: int,
) -> Tensor:
    _check(
        scores, size, length, first, batch, num_graphs, budget, reserved, num_sink_tokens, recent_window
    )  # fmt: skip
    return scores.new_empty((batch, num_graphs, reserved), dtype=torch.int32)


register_op(
    "select_summaries(Tensor scores, Tensor size, Tensor num_communities, Tensor n_indexed, Tensor capacity, "
    "Tensor length, Tensor first, Tensor(a!) tally, int layer, SymInt batch, int num_graphs, int budget, int reserved, "
    "int num_sink_tokens, int recent_window) -> Tensor",
    _select_summaries,
    _select_summaries_fake,
)
