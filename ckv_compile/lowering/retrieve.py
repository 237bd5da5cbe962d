"""``ckv::retrieve`` on CUDA: threshold of the shortlist and expansion of the communities beyond it in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, register_lowering

from ckv_compile.lowering.example_inputs import makers
from ckv_compile.lowering.route import num_programs
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, static_size

_op = torch.ops.ckv.retrieve.default

template = Template(
    "retrieve",
    lambda meta: (meta["PARTS"] + meta["HAS_LOG"], meta["BATCH"] * meta["GRAPHS"], 1),
    "attended",
    "threshold",
)


def configs(slots: int, rows: int = 1) -> list[Config]:
    """Programs of a graph and their warps; where rows and graphs are many, fewer programs fill the device."""
    shapes: tuple[tuple[int, int], ...] = ((16, 4), (32, 4), (16, 8)) if slots <= 1024 else ((16, 8), (32, 8))
    if rows > 16 and slots <= 2048:
        shapes = ((8, 8), (16, 8), (16, 4))
    return [
        {"PARTS": parts, "OWN": slots // parts, "BLOCK_J": 16, "num_warps": warps, "num_stages": 1}
        for parts, warps in shapes
    ]


@register_lowering(_op, type_promotion_kind=None)
def retrieve(
    shortlist: Any, left_out: Any, scores: Any, start: Any, stored: Any, size: Any, member: Any, log_community: Any,
    log_first: Any, num_communities: Any, n_indexed: Any, capacity: Any, length: Any, first: Any, tally: Any,
    layer: int, batch: int, num_graphs: int, budget: int, num_sink_tokens: int, recent_window: int, has_log: bool,
    num_new: int = 1, reserved: int = 0,
) -> list[Any]:  # fmt: skip
    device = scores.get_device()
    if device.type != "cuda":
        return fallback_handler(_op)(
            shortlist, left_out, scores, start, stored, size, member, log_community, log_first, num_communities,
            n_indexed, capacity, length, first, tally, layer, batch, num_graphs, budget, num_sink_tokens,
            recent_window, has_log, num_new, reserved,
        )  # fmt: skip
    batch, _, _, slots = static_size(shortlist)
    tokens = empty([batch, num_graphs, budget], torch.int32, device)
    log = fixed(log_community, log_first) if has_log else []
    lists = [start, stored, size, member] if has_log else [start, size, member]
    (tally,) = fixed(tally)
    inputs = [
        *fixed(shortlist, left_out, scores, *lists), *log,
        *fixed(num_communities, n_indexed, capacity, length, first), tally, tokens,
    ]  # fmt: skip
    constants = constants_of(
        batch, num_graphs, budget, num_sink_tokens, recent_window, has_log, slots, num_new, reserved
    )
    count = template(
        inputs, ([batch, num_graphs], torch.int32), [tally, tokens], constants, configs(slots, batch * num_graphs),
        makers(batch, num_graphs, 1, slots, budget),
    )  # fmt: skip
    return [tokens, count]


def constants_of(
    batch: int, graphs: int, budget: int, sinks: int, window: int, has_log: bool, slots: int, queries: int = 1,
    reserved: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {
        "BATCH": batch, "GRAPHS": graphs, "BUDGET": budget, "SINKS": sinks, "WINDOW": window, "QUERIES": queries,
        "SLOTS": slots, "PROGRAMS": num_programs(batch * graphs), "HAS_LOG": has_log,
        **({"SUMMARIES": reserved} if reserved else {}),
    }  # fmt: skip
