"""``ckv::assign_token`` on CUDA: every graph plans, then each changes its own state if all of a row can."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, register_lowering

from ckv_compile.lowering.template_call import Config, Template, empty, fixed, next_power_of_2, static_size

_op = torch.ops.ckv.assign_token.default

plan = Template("plan_token", lambda meta: (meta["BATCH"] * meta["GRAPHS"], 1, 1))
commit = Template("assign_token", lambda meta: (meta["BATCH"] * meta["GRAPHS"], 1, 1))


def plan_configs(constants: dict[str, Any]) -> list[Config]:
    """More warps where a program compares more pairs of entries."""
    lists, kappa = constants["BLOCK_L"], constants["BLOCK_K"]
    pairs = max(lists * kappa * kappa, lists * kappa * constants["CHUNK"])
    return [{"num_warps": 4 if pairs <= 4096 else 8 if pairs <= 8192 else 16, "num_stages": 1}]


def commit_configs() -> list[Config]:
    return [{"num_warps": 4, "num_stages": 1}]


@register_lowering(_op, type_promotion_kind=None)
def assign_token(
    neighbor: Any, weight: Any, attended: Any, key_new: Any, centroid: Any, centroid_scale: Any, channel_scale: Any,
    centroid_mean: Any, start: Any, stored: Any, size: Any, num_communities: Any, n_indexed: Any, log_community: Any,
    log_first: Any, label: Any, community_weight: Any, total_weight: Any, edge_neighbor: Any, edge_weight: Any,
    gamma: Any, capacity: Any, length: Any, first: Any, layer: int, num_graphs: int, num_sink_tokens: int, lam: float,
) -> None:  # fmt: skip
    device = neighbor.get_device()
    if device.type != "cuda":
        return fallback_handler(_op)(
            neighbor, weight, attended, key_new, centroid, centroid_scale, channel_scale, centroid_mean, start, stored,
            size, num_communities, n_indexed, log_community, log_first, label, community_weight, total_weight,
            edge_neighbor, edge_weight, gamma, capacity, length, first, layer, num_graphs, num_sink_tokens, lam,
        )  # fmt: skip
    batch, lists, kappa = static_size(neighbor)
    kv_heads, dim = static_size(key_new)[1], static_size(key_new)[3]
    plans = plan_constants(batch, num_graphs, lists, kappa, num_sink_tokens, lam)
    entries = plans["BLOCK_L"] * plans["BLOCK_K"]
    community = empty([batch, num_graphs, entries], torch.int32, device)
    increment = empty([batch, num_graphs, entries], torch.float32, device)
    sums = empty([batch, num_graphs, 2], torch.float32, device)
    edges = fixed(edge_neighbor, edge_weight)
    read = fixed(
        neighbor, weight, label, community_weight, total_weight, gamma, num_communities, n_indexed, log_first, capacity,
        length, first,
    )  # fmt: skip
    planned = plan(
        [*read, *edges, community, increment, sums], ([batch, num_graphs], torch.int32),
        [*edges, community, increment, sums], plans, plan_configs(plans),
    )  # fmt: skip
    state = fixed(
        centroid, centroid_scale, centroid_mean, start, stored, size, num_communities, n_indexed, log_community, label,
        community_weight, total_weight,
    )  # fmt: skip
    read = [*fixed(planned), community, increment, sums, *fixed(key_new, channel_scale, log_first, capacity, length)]
    commits = commit_constants(batch, num_graphs, kv_heads, dim, entries)
    commit([*read, *state], ([batch], torch.int32), state, commits, commit_configs())
    return None


def plan_constants(batch: int, graphs: int, lists: int, kappa: int, sinks: int, lam: float) -> dict[str, Any]:
    """The plan kernel's constants; all pairs of entries of a graph are compared, CHUNK columns of them at a time."""
    block_l, block_k = next_power_of_2(lists // graphs), max(2, next_power_of_2(kappa))
    entries = block_l * block_k
    return {
        "BATCH": batch, "GRAPHS": graphs, "LISTS": lists // graphs, "KAPPA": kappa, "BLOCK_L": block_l, "BLOCK_K": block_k,
        "CHUNK": min(entries, max(8, 4096 // entries)), "SINKS": sinks, "LAM": lam,
    }  # fmt: skip


def commit_constants(batch: int, graphs: int, kv_heads: int, dim: int, entries: int) -> dict[str, Any]:
    parts = kv_heads if graphs == 1 else 1
    return {
        "BATCH": batch, "GRAPHS": graphs, "BLOCK_G": next_power_of_2(graphs), "KV_HEADS": kv_heads, "PARTS": parts, "D": dim,
        "BLOCK_D": max(32, next_power_of_2(parts * dim)), "ENTRIES": entries,
    }  # fmt: skip
