"""How much of the attention of a real model lies on what a decode step attends to, while tokens follow a prompt.

The runtime's own publications, operators and refreshes run on captured keys and queries. Recall of a step and head is
the sum of its softmax probabilities (over all tokens up to its own) that lie on sinks, retrieved tokens, the recent
window and tokens that are not indexed yet: once over all keys, and once over the keys behind the sinks, whose share of
the probability is then the denominator. The budget of a step is a share of the tokens up to its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.capture import Captured
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import assigns_tokens
from ckv_compile.reference.approximate_edges import approximate_edges
from ckv_compile.reference.key_edges import key_edges
from ckv_compile.testing import assign_step, attend_step, bare_sequence, retrieve_step

# of a row, by step: means over heads of our recall, of StreamingLLM's and of the best list's
NAMES = ("recall", "recall_behind_sinks", "newest", "newest_behind_sinks", "best", "best_behind_sinks")


def attended(sequence, layer: int, tokens: Tensor, count: Tensor) -> Tensor:
    """bool [G, length + 1]: what a step attends to that has retrieved ``tokens`` (see ``reference.attended``)."""
    config, position = sequence.config, sequence.length
    indexed = int(sequence.index.n_indexed[layer, 0])
    mask = torch.zeros(tokens.shape[1], position + 1, dtype=torch.bool)
    mask[:, : config.num_sink_tokens] = True
    mask[:, max(0, min(indexed, position + 1 - config.recent_window)) :] = True
    for graph, number in enumerate(count[0].tolist()):
        mask[graph, tokens[0, graph, :number].long()] = True
    return mask


def probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Softmax [Hkv, Hq // Hkv, n] of one query [Hq, D] over keys [Hkv, n, D]."""
    query = query.view(key.shape[0], -1, query.shape[-1]) * scale
    return (query @ key.transpose(1, 2)).softmax(-1)


def recalls(probability: Tensor, mask: Tensor, sinks: int) -> Tensor:
    """[2, Hq]: recall over all keys, and over those behind the sinks. mask: bool [G, n], G a multiple or a part of Hkv."""
    heads = probability.flatten(0, 1)
    own = mask.repeat_interleave(len(heads) // len(mask), 0)
    kept = heads * own
    rest = heads[:, sinks:].sum(-1)
    return torch.stack([kept.sum(-1), kept[:, sinks:].sum(-1) / rest.clamp(min=1e-12)])


def newest(probability: Tensor, budget: int, sinks: int) -> Tensor:
    """What sinks and the newest tokens of a budget are: bool [Hkv, n]."""
    n = probability.shape[-1]
    mask = (torch.arange(n) < sinks) | (torch.arange(n) >= n - budget + sinks)
    return mask.expand(probability.shape[0], n)


def best(probability: Tensor, budget: int, sinks: int) -> Tensor:
    """Sinks and the tokens of most probability, summed over a group's heads: no list of a group recalls more."""
    total = probability.sum(1)
    total[:, :sinks] = torch.inf
    return torch.zeros_like(total, dtype=torch.bool).scatter_(1, total.topk(budget, -1).indices, True)


def compared(
    sequence, layer: int, query: Tensor, tokens: Tensor, count: Tensor, budget: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Recall over all keys and relative output error [B, Hq] of a step's list, against dense attention.

    query: [B, Hq, 1, D], of the token at position ``sequence.length``, whose key the cache holds.
    """
    stop = sequence.length + 1
    key, value = sequence.keys(layer)[:, :, :stop], sequence.values(layer)[:, :, :stop]
    grouped = query[:, :, 0].unflatten(1, (key.shape[1], -1)) * scale
    probability = (grouped @ key.transpose(2, 3)).softmax(-1)  # [B, Hkv, heads, n]
    dense = (probability @ value).flatten(1, 2)
    ours = attend_step(sequence, layer, query, tokens, count, budget, scale)[:, :, 0]
    recall = []
    for row in range(len(query)):
        mask = attended(sequence, layer, tokens[row : row + 1], count[row : row + 1])
        recall.append(recalls(probability[row], mask, sequence.config.num_sink_tokens)[0])
    return torch.stack(recall), (ours - dense).norm(dim=-1) / dense.norm(dim=-1).clamp(min=1e-12)


def assign(sequence, queries: list[Tensor], layer_lists: list[tuple[Tensor, Tensor]], scale: float) -> None:
    """The end of a step: edges of the new token to what was retrieved (eq. 6, or its nearest keys), and its community.

    queries: [B, Hq, 1, D] of each layer. layer_lists: tokens and count of each layer.
    """
    index, config = sequence.index, sequence.config
    edges = []
    for layer, (query, lists) in enumerate(zip(queries, layer_lists, strict=True)):
        where = (
            sequence.keys(layer), *lists, index.nominal["n_indexed"], index.nominal[f"capacity_{layer}"],
            sequence.length_device, sequence.first_device, layer,
        )  # fmt: skip
        sizes = config.num_sink_tokens, config.recent_window, config.kappa
        if config.graph == "keys":
            edges.append(key_edges(*where, *sizes, sequence.shape.graphs))
        else:
            edges.append(approximate_edges(query, *where, scale, *sizes))
    assign_step(sequence, *(torch.stack(parts) for parts in zip(*edges, strict=True)))


@torch.inference_mode()
def stream_recall(
    captured: Captured, tokens: int, config: CommunityConfig, *, share: int, every: int, advance: Callable[[], object]
) -> list[dict]:
    """Recall of every ``every``-th of ``tokens`` decode steps behind a prompt of ``captured.start``: a row per layer.

    share: a step at position p attends to at most (p + 1) // share tokens, unless sinks, recent window and what is not
    indexed are more. Rows hold the mean over heads by step; "newest" is StreamingLLM at that budget and "best" the list
    of tokens that recalls most, of those that a group's heads share.
    """
    prompt, sinks = captured.start, config.num_sink_tokens
    kv_heads, heads = captured.keys.shape[2], captured.queries.shape[2]
    sequence = bare_sequence(config, prompt + tokens, keys=captured.keys, group_size=heads // kv_heads)
    numbers = range(len(captured.layers))
    for layer in numbers:
        lists = (None, None)
        if not sequence.in_blocks:
            lists = tuple(torch.from_numpy(one[layer, :, :prompt])[None] for one in (captured.ids, captured.alphas))
        sequence.offer(layer, sequence.keys(layer), 0, prompt, *lists)
    sequence.prefilled(prompt)
    rows = [{"layer": layer, "attended": [], "budget": []} | {name: [] for name in NAMES} for layer in captured.layers]
    for position in range(prompt, prompt + tokens):
        advance()
        sequence.publish()
        budget, sampled = (position + 1) // share, (position + 1 - prompt) % every == 0
        found = []
        for layer in numbers if sampled or assigns_tokens(config) else ():
            query = captured.queries[layer, :, :, position - prompt, None]
            found.append(retrieve_step(sequence, layer, query, budget, captured.scale))
        for layer in numbers if sampled else ():
            row, query = rows[layer], captured.queries[layer, 0, :, position - prompt]
            probability = probabilities(query, captured.keys[layer, 0, :, : position + 1], captured.scale)
            mask = attended(sequence, layer, *found[layer])
            masks = mask, newest(probability, budget, sinks), best(probability, budget, sinks)
            values = torch.stack([recalls(probability, one, sinks).mean(1) for one in masks]).flatten().tolist()
            for name, value in zip(NAMES, values, strict=True):
                row[name].append(round(value, 5))
            row["attended"].append(round(float(mask.sum(1).float().mean()), 1))
            row["budget"].append(budget)
        if assigns_tokens(config):
            at = position - prompt
            own = [captured.queries[layer, :, :, at : at + 1] for layer in numbers]
            assign(sequence, own, found, captured.scale)
        sequence.length += 1
        sequence.length_device.fill_(sequence.length)
        sequence.offer_appended()
    assert not sequence.statistics.failures, sequence.statistics.failures
    sequence.close()
    return rows
