"""What gathers while tokens are generated, given to workers a few layers at a time.

The thread that launches steps is a little ahead of the device. What it does for one layer, some tenths of a
millisecond, is hidden by that; for all layers at once it is not, and the device waits. Nor may all cores be busy with
partitions, which slows that thread, too, for as long as it takes. So new tokens, blocks that are to
be joined and refreshes wait for their layer's turn, and so does what comes back for later than the newest prefill. Layers
are then indexed up to different tokens for some steps; each attends to what is not.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import in_blocks

if TYPE_CHECKING:
    from ckv_compile.runtime.sequence import Sequence

LAYERS = 1  # offered between two steps
PART = 2  # every layer has its turn within this part of the tokens after which there is more
# Repairs under way at a time. Each is many short native calls, after each of which a worker wants the GIL: with eleven at
# a time steps of Qwen3-8B at 131k tokens took 8 to 11 ms on an H200, with three 5.9, without any 5.7.
REPAIRS = 3


class Turns:
    """Layers that wait for their turn in one sequence.

    offered, published: most layers between two steps; with ``deterministic`` all, at fixed token counts. every: tokens
    between two steps that offer any.
    """

    def __init__(self, config: CommunityConfig, num_layers: int) -> None:
        blocks = in_blocks(config)
        interval = config.append_block if blocks else config.repair_interval or config.refresh_interval
        self.num_layers = num_layers
        self.offered = num_layers if config.deterministic else max(LAYERS, -(-num_layers * PART // interval))
        self.every = 1 if config.deterministic else max(1, interval * self.offered // (PART * num_layers))
        # Blocks of several layers are written by the same launches; a partition of everything takes its time by layer.
        self.published = 2 * self.offered if blocks else self.offered
        self.anew()

    def anew(self) -> None:
        """Nothing is under way."""
        self._offered_at = -self.every
        self.unjoined = set(range(self.num_layers))  # whose blocks changed, so that some may be joined
        self.refreshing: collections.deque[tuple[int, bool]] = collections.deque()  # (layer, whether all of it)

    def come(self, length: int) -> bool:
        """Whether it is time to offer again, now that there are ``length`` tokens."""
        return not 0 <= length - self._offered_at < self.every

    def taken(self, layers: int, length: int) -> None:
        """So many layers were offered now."""
        if layers:
            self._offered_at = length


def offer_gathered(sequence: Sequence) -> None:
    """After a decode step: index what has gathered behind the index ("keys") and join blocks, or refresh it."""
    if sequence.length <= sequence.config.min_context or not sequence.turns.come(sequence.length):
        return
    layers, turns = 0, sequence.turns
    if not sequence.in_blocks:
        layers = _offer_refresh(sequence)
    elif not sequence.unseen_queries:
        layers = _offer_appended(sequence)
        if not sequence.config.deterministic:  # otherwise a publication offers them
            layers += offer_joined(sequence, turns.offered - layers)
    turns.taken(layers, sequence.length)


def _offer_appended(sequence: Sequence) -> int:
    """Offer new tokens of the layers that have enough of them; how many layers these were."""
    block, least, length = sequence.config.block_size, sequence.config.append_block, sequence.length
    due = [
        layer for layer, start in enumerate(sequence.submitted) if length - start >= min(least, block - start % block)
    ]
    due = due[: sequence.turns.offered]
    for layer in due:
        sequence.offer_blocks(layer, sequence.keys(layer), length, final=False)
    return len(due)


def offer_joined(sequence: Sequence, most: int) -> int:
    """Have published small blocks of at most so many layers partitioned together where it is time (``joinable``).

    Returns of how many layers some were.
    """
    config, unjoined, offered = sequence.config, sequence.turns.unjoined, 0
    if config.policy != "communities":
        unjoined.clear()
    for layer in sorted(unjoined):
        if offered >= most:
            break
        unjoined.discard(layer)  # until a publication changes its blocks
        ends = [tokens for tokens, _ in sequence.index.marks[layer]]
        span = None if layer in sequence.work.joining else joinable(ends, sequence.closed[layer], config.block_size)
        if span is not None:
            sequence.submit_joined(layer, *span)
            offered += 1
    return offered


def _offer_refresh(sequence: Sequence) -> int:
    """Bring generated tokens into the partition in the background, when it is time and nothing is under way.

    Returns of how many layers.

    Every ``refresh_interval`` tokens all of it is partitioned again, starting from the present communities; in
    between, every ``repair_interval``, new tokens and what they touch move.
    """
    config, length, turns = sequence.config, sequence.length, sequence.turns
    if not turns.refreshing:
        anew = length - sequence.refreshed_at >= config.refresh_interval
        if not anew and not 0 < config.repair_interval <= length - sequence.repaired_at:
            return 0
        if sequence.work.under_way():
            return 0  # later: the workers are behind
        sequence.repaired_at = length
        if anew:
            sequence.refreshed_at = length
        if sequence.unseen_queries or any(edges.tokens == 0 for edges in sequence.edges):
            return 0
        turns.refreshing.extend((layer, anew) for layer in range(turns.num_layers))
    layers = min(turns.offered, len(turns.refreshing))
    if not turns.refreshing[0][1] and not config.deterministic:
        layers = max(0, min(layers, REPAIRS - sequence.work.jobs_under_way()))
    for _ in range(layers):
        sequence.refresh(*turns.refreshing.popleft())
    return layers


def joinable(ends: list[int], closed: int, block: int) -> tuple[int, int] | None:
    """First position and end of the earliest several blocks that are worth one partition; None where none are.

    ends: where each block ends, ascending; full blocks begin at multiples of ``block``, and none reaches into the next.
    Small blocks are joined when they fill a block, and before that whenever they have added a third to the first of
    them, which was joined from earlier ones: what is open is then never far from one partition, and every token is
    partitioned a few times. Those that end at or before ``closed`` stay as they are.
    """
    for stop in sorted({-(-end // block) * block for end in ends if end > closed}):
        start = stop - block
        own = [end for end in ends if start < end <= stop]
        if len(own) > 1 and own[-1] > closed and (own[-1] == stop or 3 * (own[-1] - own[0]) >= own[0] - start):
            return start, own[-1]
    return None
