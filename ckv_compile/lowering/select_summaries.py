"""``ckv::select_summaries`` on CUDA: one program per graph bisects all scores, which is slow but for an ablation."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, next_power_of_2, static_size

template = Template("select_summaries", lambda meta: (meta["BATCH"] * meta["GRAPHS"], 1, 1), "attended", "threshold")


def configs() -> list[Config]:
    """Few long passes: a program has its whole multiprocessor."""
    return [{"SLOTS": 2048, "num_warps": 16, "num_stages": 1}]


@lowers(torch.ops.ckv.select_summaries.default)
def select_summaries(
    scores: Any, size: Any, num_communities: Any, n_indexed: Any, capacity: Any, length: Any, first: Any, tally: Any,
    layer: int, batch: int, num_graphs: int, budget: int, reserved: int, num_sink_tokens: int, recent_window: int,
) -> Any:  # fmt: skip
    device = scores.get_device()
    (batch,) = static_size(first)
    ids = empty([batch, num_graphs, reserved], torch.int32, device)
    (tally,) = fixed(tally)
    inputs = [*fixed(scores, size, num_communities, n_indexed, capacity, length, first), tally, ids]
    constants = constants_of(batch, num_graphs, budget, reserved, num_sink_tokens, recent_window)
    template(inputs, ([batch, num_graphs], torch.int32), [tally, ids], constants, configs())
    return ids


def constants_of(batch: int, graphs: int, budget: int, reserved: int, sinks: int, window: int) -> dict[str, Any]:
    return {
        "BATCH": batch, "GRAPHS": graphs, "BUDGET": budget, "SUMMARIES": reserved, "BLOCK_S": next_power_of_2(reserved),
        "SINKS": sinks, "WINDOW": window,
    }  # fmt: skip
