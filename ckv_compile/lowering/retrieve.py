"""``ckv::retrieve`` on CUDA: threshold of the shortlist and expansion of the communities beyond it in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.lowering.example_inputs import makers
from ckv_compile.lowering.route import num_programs
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, static_size

template = Template(
    "retrieve",
    lambda meta: (num_parts(meta), meta["BATCH"] * meta["GRAPHS"], 1),
    "attended",
    "threshold",
)


RESIDENT = 264  # programs of 4 warps that run at once on an H200: their registers leave room for two a multiprocessor


def configs(slots: int, rows: int = 1, has_log: bool = False) -> list[Config]:
    """Programs of a graph and their warps, for ``rows`` rows and graphs: as many as run at once.

    A few programs more than that, and the kernel takes twice as long. The log has a program of its own where there is
    room for one, else the last one of a graph reads it, too. Four warps hold 2,048 slots: a bisection step is a reduction,
    which takes longer over more warps (28.9 us for one layer's attention, 29.2 with 8 and 30.1 with 2 on an H200).
    Members are fetched while the threshold is looked for, up to as many as most communities have: 27.5 us with 32.
    """

    def config(parts: int, warps: int) -> Config:
        own = slots // parts
        return {
            "PARTS": parts,
            "OWN": own,
            "BLOCK_J": max(8, min(32, 1024 * warps // own)),  # first members of each entry, in registers from the start
            "LOG_PART": parts if has_log and (parts + 1) * rows * warps <= 4 * RESIDENT else parts - 1,
            "num_warps": warps,
            "num_stages": 1,
        }

    warps = 4 * max(1, slots // 2048)
    parts, least = 16, max(4, slots // 512)
    while parts > least and (parts + (has_log and rows <= 8)) * rows * warps > 4 * RESIDENT:
        parts //= 2
    return [config(parts, warps), config(max(least, parts // 2), warps), config(parts, 2 * warps)]


def num_parts(constants: dict[str, Any]) -> int:
    """Programs of a graph: those of the list, and one of the log where it has its own."""
    return max(constants["PARTS"], constants["LOG_PART"] + 1) if constants["HAS_LOG"] else constants["PARTS"]


@lowers(torch.ops.ckv.retrieve.default)
def retrieve(
    shortlist: Any, left_out: Any, scores: Any, start: Any, stored: Any, size: Any, member: Any, log_community: Any,
    log_first: Any, num_communities: Any, n_indexed: Any, capacity: Any, length: Any, first: Any, tally: Any,
    layer: int, batch: int, num_graphs: int, budget: int, num_sink_tokens: int, recent_window: int, has_log: bool,
    num_new: int = 1, reserved: int = 0,
) -> list[Any]:  # fmt: skip
    device = scores.get_device()
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
        inputs, ([batch, num_graphs], torch.int32), [tally, tokens], constants, configs(slots, batch * num_graphs, has_log),
        makers(batch, num_graphs, 1, slots, budget),
    )  # fmt: skip
    return [tokens, count]


def constants_of(
    batch: int, graphs: int, budget: int, sinks: int, window: int, has_log: bool, slots: int, queries: int = 1,
    reserved: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {
        "BATCH": batch, "GRAPHS": graphs, "BUDGET": budget, "SINKS": sinks, "WINDOW": window, "QUERIES": queries,
        "SLOTS": slots, "LOG_N": 512, "CHUNK": 512, "PROGRAMS": num_programs(batch * graphs), "HAS_LOG": has_log,
        **({"SUMMARIES": reserved} if reserved else {}),
    }  # fmt: skip
