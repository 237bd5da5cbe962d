"""From what workers brought back to the index of a layer, between two steps, on the caller's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ckv_compile.runtime.sequence import Sequence


def publish_layer(sequence: Sequence, layer: int) -> None:
    """Publish what has come back for a layer and is next in order."""
    index = sequence.index
    if sequence.in_blocks:
        while True:
            indexed = index.marks[layer][-1][0] if index.marks[layer] else 0
            finished = sequence.waiting.pop((layer, indexed), None)
            if finished is None:
                break
            index.append_block(
                layer, finished.start, finished.stop, finished.packed, *_cached(sequence, layer), sequence.length
            )
            sequence.statistics.partitioned(layer, finished.packed.counts)
        _publish_joined(sequence, layer)
        return
    finished = sequence.waiting.pop((layer, 0), None)
    if finished is None or (index.marks[layer] and finished.stop < index.marks[layer][-1][0]):
        return  # nothing, or overtaken by a partition of more tokens
    if finished.errors and index.marks[layer]:
        return  # communities of fewer tokens are better than pages
    index.replace(layer, finished.stop, finished.packed, *_cached(sequence, layer), sequence.length)
    sequence.keep(finished)
    sequence.statistics.partitioned(layer, finished.packed.counts)


def _publish_joined(sequence: Sequence, layer: int) -> None:
    """Put one partition in the place of several small blocks; where it failed, they stay."""
    finished = sequence.joined.pop(layer, None)
    if finished is not None:
        sequence.joining.discard(layer)
        sequence.closed[layer] = finished.stop
        if not finished.errors:
            sequence.index.join_blocks(
                layer, finished.start, finished.stop, finished.packed, *_cached(sequence, layer), sequence.length
            )
    sequence.offer_joined(layer)


def _cached(sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K of a layer, and V where the index keeps its means."""
    return sequence.keys(layer), sequence.values(layer) if sequence.config.centroid_budget else None
