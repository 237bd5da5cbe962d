"""Modularity of a partition that follows generated tokens, against one of all tokens from scratch at the same gamma.

Attention graphs: local moves every ``repair_interval`` and a warm pass every ``refresh_interval`` tokens, or one of the
two. Key graphs: small blocks, joined into full ones, against blocks of the whole.
"""

from __future__ import annotations

import time

import numpy as np
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.community.graph import attention_graph, key_graph
from ckv_compile.community.leiden import leiden, modularity
from ckv_compile.community.partition import partition_attention, partition_repaired
from ckv_compile.community.resolution import ResolutionMemory, SearchPlan
from ckv_compile.config import CommunityConfig
from ckv_compile.testing import bare_sequence, extend_sequence, members_of


def causal(ids: np.ndarray) -> np.ndarray:
    """Lists [H, n, kappa] without the entries that point ahead."""
    return np.where(ids <= np.arange(ids.shape[1])[:, None], ids, -1).astype(np.int32)


def ratio(reached: float, cold: float) -> float:
    """reached / cold; where modularity is negative (graphs of hubs), above 1 is better too."""
    return 1 + (reached - cold) / abs(cold)


def stream_attention(
    name: str, ids: np.ndarray, alphas: np.ndarray, prompt: int, tokens: int, config: CommunityConfig
) -> dict:
    """Stream ``tokens`` tokens behind a prompt; ids, alphas: causal lists [H, >= prompt + tokens, kappa].

    The row holds the modularity of the streamed partition, that of a cold one of the same graph at the same gamma
    (the planned passes), and CPU seconds: of one repair and of one warm pass, medians.
    """
    first, memory = config.num_sink_tokens, ResolutionMemory()
    seconds: dict[str, list[float]] = {"repair": [], "warm": []}
    common = {"config": config, "memory": memory, "layer": 0, "graph": 0}
    partition = partition_attention(ids[:, :prompt], alphas[:, :prompt], first, **common)
    end, refreshed = prompt, prompt
    every = config.repair_interval or config.refresh_interval
    while end < prompt + tokens:
        begin, end = end, min(end + every, prompt + tokens)
        started = time.process_time()
        if end - refreshed >= config.refresh_interval:
            initial = np.concatenate([partition.labels, np.full(end - len(partition.labels), -1, np.int32)])
            partition = partition_attention(ids[:, :end], alphas[:, :end], first, initial=initial, **common)
            refreshed = end
            seconds["warm"].append(time.process_time() - started)
        else:
            partition = partition_repaired(partition, ids[:, begin:end], alphas[:, begin:end], config=config)
            seconds["repair"].append(time.process_time() - started)
    graph = attention_graph(ids[:, :end], alphas[:, :end], lam=config.lam, prune=config.prune, first=first)
    cold = leiden(
        graph, gamma=partition.gamma, passes=SearchPlan.of(config).passes, max_community_size=config.max_community_size
    )
    reached, best = (modularity(graph, labels, partition.gamma) for labels in (partition.labels[first:], cold))
    return {
        "graph": name, "prompt": prompt, "tokens": tokens, "repair_interval": config.repair_interval,
        "refresh_interval": config.refresh_interval, "gamma": partition.gamma, "modularity": reached,
        "cold_modularity": best, "ratio": ratio(reached, best),
        **{f"{kind}_cpu_s": float(np.median(values)) if values else None for kind, values in seconds.items()},
    }  # fmt: skip


def drifting_keys(tokens: int, dim: int, seed: int) -> torch.Tensor:
    """Keys [1, 1, 1, tokens, dim]: a topic begins every 12 tokens, and a token belongs to one of the latest, mostly."""
    rng = np.random.default_rng(seed)
    topics = rng.normal(size=(tokens // 12 + 1, dim))
    age = np.minimum(rng.geometric(0.3, tokens) - 1, np.arange(tokens) // 12)
    far = rng.random(tokens) < 0.1
    which = np.where(
        far, (rng.random(tokens) * (np.arange(tokens) // 12 + 1)).astype(int), np.arange(tokens) // 12 - age
    )
    keys = topics[which] + 0.6 * rng.normal(size=(tokens, dim))
    return torch.from_numpy(keys.astype(np.float32))[None, None, None]


def stream_keys(name: str, keys: torch.Tensor, prompt: int, tokens: int, config: CommunityConfig) -> dict:
    """Stream ``tokens`` tokens behind a prompt with ``graph="keys"``, through the runtime on the CPU.

    keys: float32 [1, 1, Hkv, >= prompt + tokens, D]. The modularities are those of the first head's graph of all
    tokens, in full blocks.
    """
    sequences = []
    n, first = prompt + tokens, config.num_sink_tokens
    keys = torch.nn.functional.pad(keys[:, :, :, :n], (0, 0, 0, 1))  # room for the step after the last
    for known in (prompt, n):
        sequence = bare_sequence(config, n + 1, keys=keys)
        sequence.offer(0, sequence.keys(0), 0, known, None, None)
        sequence.prefilled(known)
        extend_sequence(sequence, n - known)
        for _ in range(2):
            sequence.wait()
            sequence.publish()
        sequences.append(sequence)
    found = torch.ops.ckv.key_neighbors(
        sequences[0].keys(0), torch.zeros(1, dtype=torch.int32), 0, n, config.kappa, first, False, config.block_size
    ).numpy()[0, 0]  # fmt: skip
    begin = np.arange(n)[:, None] // config.block_size * config.block_size
    graph = key_graph(np.where(found >= 0, found + begin, -1), first=first)
    gamma = SearchPlan.of(config).start_gamma(n)
    values = []
    for sequence in sequences:
        labels = np.full(n, -1, np.int32)
        for community, members in enumerate(members_of(sequence.index, 0, 0, 0)):
            labels[members] = community
        values.append(modularity(graph, labels[first:], gamma))
    return {
        "graph": name, "prompt": prompt, "tokens": tokens, "append_block": config.append_block,
        "block_size": config.block_size, "gamma": gamma, "modularity": values[0], "cold_modularity": values[1],
        "ratio": ratio(*values),
        "blocks": [tokens for tokens, _ in sequences[0].index.marks[0]],
    }  # fmt: skip


def claims_of_stream(rows: list[dict]) -> dict[str, float]:
    claims: dict[str, float] = {}
    for row in rows:
        if "block_size" in row:
            name = "stream_modularity_ratio_keys"
        elif row["repair_interval"] and row["refresh_interval"] <= row["tokens"]:
            name = "stream_modularity_ratio_attention"
        else:
            name = "stream_modularity_ratio_attention_" + ("repairs_only" if row["repair_interval"] else "warm_only")
        claims[name] = min(row["ratio"], claims.get(name, np.inf))
    return claims
