"""Edges like those of real text, in the place of those of a prompt: a model of random weights attends to everything alike.

Such a graph has no communities; searching them takes far longer than it does on text. Here a token's strongest keys lie,
as measured on SmolLM2 and Qwen2.5-Coder, for the larger part within the last 64 tokens, and for the rest at earlier
tokens of its topic; a few are hubs. Every layer gets the same lists. All that costs time stays: the lists are still made
by the model's own kernel, then these go the same way to the graph, the partition and the index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ckv_compile.config import CommunityConfig
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.runtime.sequence import Sequence

LOCAL, HUBS = 0.55, 0.05  # parts of the slots of a list
NEAR = 64  # tokens
TOPIC = 32  # tokens of a topic, in the mean
SPAN = 4096  # tokens that a topic spreads over
DECAY = 0.6  # of the weight from slot to slot


def planted_lists(
    heads: int, kv_heads: int, tokens: int, kappa: int, first: int, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Neighbours int32 [1, heads, tokens, kappa], -1 where there is none, and weights float32, of the same shape.

    first: positions before it are no neighbours. The heads of a group share their topics. Lists hold no key twice.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    position = torch.arange(tokens, device=device)
    neighbor = torch.empty(1, heads, tokens, kappa, dtype=torch.int32, device=device)
    hubs = first + (random(8) * min(tokens, SPAN)).long().clamp_max(max(0, tokens - first - 1))
    group = heads // kv_heads
    for kv_head in range(kv_heads):
        window = (position + int(SPAN * random(1))) // SPAN
        topics = max(1, SPAN // TOPIC)
        topic = window * topics + (random(tokens) ** 1.5 * topics).long()  # of unequal sizes
        order = (topic * tokens + position).argsort()
        place = torch.empty_like(order)
        place[order] = position
        for head in range(kv_head * group, (kv_head + 1) * group):
            back = (
                random(tokens, kappa) ** 2 * 2 * kappa
            ).long() + 1  # earlier tokens of the topic, nearer ones rather
            earlier = place[:, None] - back
            same = order[earlier.clamp_min(0)]
            known = (earlier >= 0) & (topic[same] == topic[:, None])
            near = position[:, None] - 1 - (random(tokens, kappa) ** 2 * NEAR).long()
            kind = random(tokens, kappa)
            chosen = torch.where((kind >= LOCAL) & known, same, near)
            chosen = torch.where(kind < HUBS, hubs[(random(tokens, kappa) * len(hubs)).long()], chosen)
            usable = (chosen >= first) & (chosen < position[:, None])
            chosen = torch.where(usable, chosen, -1)
            ordered = chosen.sort(-1, descending=True).values
            again = torch.zeros_like(usable)
            again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
            neighbor[0, head] = torch.where(again, -1, ordered).int()
    weight = DECAY ** torch.arange(kappa, device=device) * 0.3 * (0.5 + random(1, heads, tokens, kappa))
    return neighbor, torch.where(neighbor >= 0, weight, 0.0)


_made: dict[tuple, tuple[Tensor, Tensor]] | None = None  # the newest, while lists are planted


def make_ready(geometry: AttentionGeometry, config: CommunityConfig, tokens: int) -> None:
    """Where lists are planted: make those of a prompt of so many tokens, a second's work, before a clock runs."""
    if _made is not None and config.graph != "keys":
        heads = geometry.num_query_heads, geometry.num_kv_heads
        _lists_of(*heads, tokens, config.kappa, config.num_sink_tokens, geometry.device)


def _lists_of(*wanted: Any) -> tuple[Tensor, Tensor]:
    assert _made is not None
    if wanted not in _made:
        _made.clear()
        _made[wanted] = planted_lists(*wanted)
    return _made[wanted]


@contextlib.contextmanager
def planted_edges() -> Iterator[None]:
    """Prompts that begin a cache are partitioned by planted lists instead of their own."""
    global _made
    original = Sequence.offer

    def offer(self: Sequence, layer: int, key: Tensor, length: int, num_new: int, neighbor, weight) -> None:
        if neighbor is not None and length == 0 and neighbor.shape[0] == 1:
            _, heads, tokens, kappa = neighbor.shape
            sinks = self.config.num_sink_tokens
            neighbor, weight = _lists_of(heads, self.geometry.num_kv_heads, tokens, kappa, sinks, neighbor.device)
        original(self, layer, key, length, num_new, neighbor, weight)

    Sequence.offer, _made = offer, {}  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sequence.offer, _made = original, None  # type: ignore[method-assign]
