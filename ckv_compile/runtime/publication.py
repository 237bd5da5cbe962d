"""From what workers brought back to the index of a layer, between two steps, on the caller's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ckv_compile.runtime.sequence import Sequence
    from ckv_compile.runtime.work import Finished


def publish_layers(sequence: Sequence, most: int) -> None:
    """Publish what has come back and is next in order in its layer.

    most: layers of which anything is published that is not the newest prefill's; the others keep it for later.
    """
    for layer in sorted({layer for layer, _ in sequence.work.waiting} | set(sequence.work.joined)):
        most -= publish_layer(sequence, layer, later=most > 0)


def publish_layer(sequence: Sequence, layer: int, *, later: bool = True) -> bool:
    """Publish what is next in order in a layer; whether any of it is not the newest prefill's, which ``later`` allows."""
    index, published = sequence.index, False
    if sequence.in_blocks:
        while True:
            indexed = index.marks[layer][-1][0] if index.marks[layer] else 0
            finished = _next(sequence, (layer, indexed), later=later)
            if finished is None:
                break
            index.append_block(
                layer, finished.start, finished.stop, finished.packed, *_cached(sequence, layer), sequence.length
            )
            sequence.statistics.partitioned(layer, finished.packed.counts)
            sequence.turns.unjoined.add(layer)
            published |= finished.stop > sequence.prompt
        return (later and _publish_joined(sequence, layer)) or published
    finished = _next(sequence, (layer, 0), later=later)
    if finished is not None:
        _publish_whole(sequence, layer, finished)
    return finished is not None and finished.stop > sequence.prompt


def _next(sequence: Sequence, place: tuple[int, int], *, later: bool) -> Finished | None:
    """What waits for (layer, start), unless it is not the newest prefill's and ``later`` is false."""
    finished = sequence.work.waiting.get(place)
    if finished is None or (not later and finished.stop > sequence.prompt):
        return None
    return sequence.work.waiting.pop(place).arranged()


def _publish_whole(sequence: Sequence, layer: int, finished: Finished) -> None:
    """Put a partition of all positions in the place of what a layer has, unless that is better."""
    index = sequence.index
    if index.marks[layer] and finished.stop < index.marks[layer][-1][0]:
        return  # overtaken by a partition of more tokens
    if finished.errors and index.marks[layer]:
        return  # communities of fewer tokens are better than pages
    index.replace(layer, finished.stop, finished.packed, *_cached(sequence, layer), sequence.length)
    sequence.keep(finished)
    sequence.statistics.partitioned(layer, finished.packed.counts)


def _publish_joined(sequence: Sequence, layer: int) -> bool:
    """Put one partition in the place of several small blocks, where there is one; where it failed, they stay."""
    finished = sequence.work.joined.pop(layer, None)
    if finished is None:
        return False
    finished = finished.arranged()
    sequence.work.joining.discard(layer)
    sequence.closed[layer] = finished.stop
    sequence.turns.unjoined.add(layer)
    if not finished.errors:
        sequence.index.join_blocks(
            layer, finished.start, finished.stop, finished.packed, *_cached(sequence, layer), sequence.length
        )
    return True


def _cached(sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K of a layer, and V where the index keeps its means."""
    return sequence.keys(layer), sequence.values(layer) if sequence.config.centroid_budget else None
