"""``ckv::route_coarse`` on CUDA: one kernel scores groups of communities and lists the best, where there are many."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.config import GROUP
from ckv_compile.index_layout import DEVIATIONS, MOST_COVERAGE, coarse_parts
from ckv_compile.lowering.example_inputs import makers
from ckv_compile.lowering.route import num_programs
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, next_power_of_2, static_size

template = Template("route_coarse", lambda meta: (meta["PROGRAMS"], meta["BATCH"] * meta["GRAPHS"], 1))


def configs(constants: dict[str, Any]) -> list[Config]:
    """Groups that a program reads together: fewer where there are many products or many parts to hold."""
    wide = constants["BLOCK_D"] * constants["BLOCK_H"] > 8192
    shapes = ((32, 3, 4), (64, 2, 4)) if not wide and constants["PARTS"] == 1 else ((16, 2, 4),)
    return [
        {"BLOCK_K": block, "STAGES": stages, "CHUNK": 128, "num_warps": warps, "num_stages": stages}
        for block, stages, warps in shapes
    ]


@lowers(torch.ops.ckv.route_coarse.default)
def route_coarse(
    query: Any, coarse: Any, coarse_scale: Any, channel_scale: Any, num_grouped: Any, num_communities: Any,
    capacity: Any, coarse_scores: Any, scores: Any, layer: int, num_graphs: int, num_kv_heads: int, scale: float,
    least: int, start: int, slots: int,
) -> list[Any]:  # fmt: skip
    device = query.get_device()
    batch, heads, queries, dim = static_size(query)
    visit = empty([batch, num_graphs, slots], torch.int32, device)
    constants = constants_of(batch, heads, dim, num_graphs, num_kv_heads, scale, least, start, slots, queries)
    coarse_scores, scores = fixed(coarse_scores, scores)
    inputs = [
        *fixed(query, coarse, coarse_scale, channel_scale, num_grouped, num_communities, capacity), coarse_scores, scores,
        visit,
    ]  # fmt: skip
    count = template(
        inputs, ([batch, num_graphs], torch.int32), [coarse_scores, scores, visit], constants, configs(constants),
        makers(batch, num_graphs, constants["PARTS"] * dim, slots, budget=1),
    )  # fmt: skip
    return [visit, count]


def constants_of(
    batch: int, heads: int, dim: int, graphs: int, kv_heads: int, scale: float, least: int, start: int, slots: int,
    queries: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The template's constants; a query head counts once for each of its queries, as for ``route``."""
    parts = kv_heads if graphs == 1 else 1
    rows = heads * queries // (graphs * parts)
    return {
        "BATCH": batch, "GRAPHS": graphs, "PARTS": parts, "HEADS": rows, "QUERIES": queries, "D": dim, "SM_SCALE": scale,
        "BLOCK_D": max(32, next_power_of_2(dim)), "BLOCK_H": max(16, next_power_of_2(rows)),
        "PROGRAMS": min(num_programs(batch * graphs), coarse_parts(least)), "SLOTS": slots, "LEAST": least,
        "MOST": MOST_COVERAGE * least,
        "START": start, "GROUP": GROUP, "DEVIATIONS": DEVIATIONS,
    }  # fmt: skip
