"""``ckv::route`` on CUDA: one kernel scores and shortlists; score "softmax" has a pass for its statistics before.

That kernel appends the step's keys and values to the cache, too, where ``append_kv`` comes right before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import V

from ckv_compile.config import GROUP, RUN
from ckv_compile.index_layout import PROGRAMS
from ckv_compile.lowering.append_kv import left_to
from ckv_compile.lowering.example_inputs import makers
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, next_power_of_2, static_size

template = Template("route", lambda meta: (meta["PROGRAMS"], meta["BATCH"] * meta["GRAPHS"], 1))


def num_programs(rows: int) -> int:
    """Programs that share a graph, of so many rows and graphs: enough to fill the device, each with as much as can be."""
    return max(16, min(PROGRAMS, next_power_of_2(512 // rows)))


def configs(score: str, parts: int = 1, dim: int = 128, rows: int = 0, *, listed: bool = False) -> list[Config]:
    """The second pass of score "softmax" holds more per program, so it gets more warps.

    Centroids of several parts are that much wider: fewer at a time, or they would not fit shared memory. So are the
    products with several queries per head: ``rows`` of them for each centroid, 0 for one query.
    """
    if rows:
        block = max(16, min(64, (4096 if parts == 1 else 1024) // rows))
        return [{"BLOCK_C": block, "STAGES": 2, "num_warps": warps, "num_stages": 2} for warps in (8, 4)]
    if parts > 1:
        block, stages = (32, 2) if parts * dim <= 2048 else (16, 1)
        return [
            {"BLOCK_C": block, "STAGES": stages, "num_warps": warps, "num_stages": stages}
            for warps in ((8, 4) if listed else (4, 8))  # with four, the ids of listed groups spill
        ]
    least = 4 if score == "softmax" else 2
    return [
        {"BLOCK_C": block, "STAGES": stages, "num_warps": max(least, warps), "num_stages": stages}
        for block, stages, warps in ((64, 3, 2), (64, 3, 4), (128, 3, 4), (256, 3, 8))
    ]


@lowers(torch.ops.ckv.route.default)
def route(
    query: Any, centroid: Any, centroid_scale: Any, channel_scale: Any, size: Any, start: Any, stored: Any,
    num_communities: Any, capacity: Any, scores: Any, layer: int, num_graphs: int, num_kv_heads: int, scale: float,
    score: str, length: Any, slots: int, visit: Any = None, visit_count: Any = None,
) -> list[Any]:  # fmt: skip
    device = query.get_device()
    batch, heads, queries, dim = static_size(query)
    shortlist = empty([batch, num_graphs, 5, slots], torch.int32, device)
    constants = constants_of(batch, heads, dim, num_graphs, num_kv_heads, scale, score, slots, queries)
    rows = constants["BLOCK_H"] if queries > 1 else 0
    tuned = configs(score, constants["PARTS"], dim, rows, listed=visit is not None)
    examples = makers(batch, num_graphs, constants["PARTS"] * dim, slots, budget=1)
    sizes, places, counts = fixed(size), fixed(start, stored), fixed(num_communities, capacity)
    (scores,) = fixed(scores)
    left_out = ([batch, num_graphs, PROGRAMS], torch.float32)
    new: list[Any] = []
    written = [scores, shortlist]
    if (appended := left_to(V.graph.current_node)) is not None:
        new = [appended.length, appended.key_new, appended.value_new, appended.key, appended.value]
        written += [appended.key, appended.value]
        constants |= appended.constants()
    if score in ("recency", "random"):
        inputs = [*fixed(query), *sizes, *places, *counts, scores, shortlist, *(new or fixed(length))]
        return [shortlist, template(inputs, left_out, written, constants, tuned, examples)]
    scored = [*fixed(query, centroid, centroid_scale, channel_scale), *sizes]
    inputs = [*scored, *places, *counts]
    if score == "softmax":
        statistics = [batch, heads * queries, constants["PROGRAMS"]]
        mass = empty(statistics, torch.float32, device)
        first_pass = {**constants, "STATISTICS": True}
        top = template(
            [*scored, *counts, mass], (statistics, torch.float32), [mass], first_pass, tuned, examples
        )  # fmt: skip
        inputs += [*fixed(top), mass]
    inputs += [scores, shortlist]
    if visit is not None:
        inputs += fixed(visit, visit_count)
        constants["LISTED"] = True
    return [shortlist, template([*inputs, *new], left_out, written, constants, tuned, examples)]


def constants_of(
    batch: int, heads: int, dim: int, graphs: int, kv_heads: int, scale: float, score: str, slots: int, queries: int = 1
) -> dict[str, Any]:
    """The template's constants; one graph over several KV heads reads its centroids in as many parts.

    A query head counts once for each of its queries.
    """
    parts, programs = kv_heads if graphs == 1 else 1, num_programs(batch * graphs)
    rows = heads * queries // (graphs * parts)
    return {
        "BATCH": batch, "GRAPHS": graphs, "PARTS": parts, "HEADS": rows, "QUERIES": queries, "D": dim, "SM_SCALE": scale,
        "BLOCK_D": max(32, next_power_of_2(dim)), "BLOCK_H": max(8, next_power_of_2(rows)),
        "PROGRAMS": programs, "QUOTA": slots // programs, "RUN": RUN, "CHUNK": 512, "ATTEMPTS": 24,
        "SOFTMAX": score == "softmax", "RECENCY": score == "recency", "RANDOM": score == "random", "STATISTICS": False,
        "LISTED": False, "APPEND": False, "GROUP": GROUP, "RELATIVE": score == "relative",
    }  # fmt: skip
