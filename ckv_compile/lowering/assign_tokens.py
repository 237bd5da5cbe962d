"""``ckv::assign_tokens`` on CUDA: for each token all graphs plan, then each changes its own state if all of a row can."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.index_layout import ASSIGNED_AT_ONCE
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, next_power_of_2, static_size


def programs(meta: dict[str, Any]) -> tuple[int, int, int]:
    """One per graph of a layer; all layers at once."""
    return meta["BATCH"] * meta["GRAPHS"], meta["LAYERS"], 1


plan = Template("plan_tokens", programs)
commit = Template("assign_tokens", programs)


def plan_configs(constants: dict[str, Any]) -> list[Config]:
    """More warps where a program compares more pairs of entries."""
    lists, kappa = constants["BLOCK_L"], constants["BLOCK_K"]
    pairs = max(lists * kappa * kappa, lists * kappa * constants["CHUNK"])
    return [{"num_warps": 4 if pairs <= 4096 else 8 if pairs <= 8192 else 16, "num_stages": 1}]


def commit_configs() -> list[Config]:
    return [{"num_warps": 4, "num_stages": 1}]


@lowers(torch.ops.ckv.assign_tokens.default)
def assign_tokens(
    new_neighbor: Any, new_weight: Any, new_key: Any, centroid: Any, centroid_scale: Any, channel_scale: Any,
    log_mean: Any, mean_at: Any, start: Any, stored: Any, size: Any, num_communities: Any, n_indexed: Any,
    log_community: Any, log_first: Any, label: Any, community_weight: Any, total_weight: Any, edge_neighbor: Any,
    edge_weight: Any, gamma: Any, capacity: Any, length: Any, first: Any, num_layers: int, num_kv_heads: int,
    head_dim: int, num_lists: int, kappa: int, num_graphs: int, num_sink_tokens: int, lam: float,
    new_value: Any | None = None, mean_value: Any | None = None, log_value: Any | None = None,
) -> None:  # fmt: skip
    device = new_neighbor.get_device()
    (batch,) = static_size(first)
    plans = plan_constants(num_layers, batch, num_graphs, num_lists, kappa, num_sink_tokens, lam)
    entries = plans["BLOCK_L"] * plans["BLOCK_K"]
    graphs = [num_layers, batch, num_graphs]
    token, community = empty(graphs, torch.int32, device), empty([*graphs, entries], torch.int32, device)
    increment, tie = (empty([*graphs, entries], torch.float32, device) for _ in range(2))
    sums = empty([*graphs, 2], torch.float32, device)
    scratch = [token, community, increment, tie, sums]
    edges = fixed(edge_neighbor, edge_weight)
    read = fixed(
        new_neighbor, new_weight, label, community_weight, total_weight, gamma, num_communities, n_indexed, log_first,
        log_community, capacity, length, first,
    )  # fmt: skip
    state = fixed(
        centroid, centroid_scale, log_mean, mean_at, start, stored, size, num_communities, n_indexed, log_community,
        label, community_weight, total_weight,
    )  # fmt: skip
    new = fixed(new_key, channel_scale, log_first, capacity, length)
    commits = commit_constants(num_layers, batch, num_graphs, num_kv_heads, head_dim, entries)
    values = []
    if new_value is not None:
        commits["VALUES"] = True
        values = fixed(new_value, log_value, mean_value)
    for turn in range(ASSIGNED_AT_ONCE):
        later = {"LATER": turn > 0}
        planned = plan(
            [*read, *edges, *scratch], (graphs, torch.int32), [*edges, *scratch], plans | later, plan_configs(plans)
        )
        told = [*fixed(planned), token, community, increment, sums]
        commit(
            [*told, *new, *state, *values], ([num_layers, batch], torch.int32), [*state, *values[1:]], commits | later,
            commit_configs(),
        )  # fmt: skip
    return None


def plan_constants(
    layers: int, batch: int, graphs: int, lists: int, kappa: int, sinks: int, lam: float
) -> dict[str, Any]:
    """The plan kernel's constants; all pairs of entries of a graph are compared, CHUNK columns of them at a time."""
    block_l, block_k = next_power_of_2(lists // graphs), max(2, next_power_of_2(kappa))
    entries = block_l * block_k
    return {
        "LAYERS": layers, "BATCH": batch, "GRAPHS": graphs, "LISTS": lists // graphs, "KAPPA": kappa,
        "BLOCK_L": block_l, "BLOCK_K": block_k, "CHUNK": min(entries, max(8, 4096 // entries)), "SINKS": sinks, "LAM": lam,
        "LATER": False,
    }  # fmt: skip


def commit_constants(layers: int, batch: int, graphs: int, kv_heads: int, dim: int, entries: int) -> dict[str, Any]:
    parts = kv_heads if graphs == 1 else 1
    return {
        "LAYERS": layers, "BATCH": batch, "GRAPHS": graphs, "BLOCK_G": next_power_of_2(graphs), "KV_HEADS": kv_heads,
        "PARTS": parts, "D": dim, "BLOCK_D": max(32, next_power_of_2(parts * dim)), "ENTRIES": entries, "LATER": False,
    }  # fmt: skip
