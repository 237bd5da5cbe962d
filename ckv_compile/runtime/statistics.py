"""Counters of one cache or one model, for the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass
class LayerPartition:
    """The latest partitions of one layer, summed over rows, graphs and blocks."""

    communities: int = 0
    members: int = 0
    largest: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, partitions: Iterable[Any]) -> LayerPartition:
        counts = cls()
        for partition in partitions:
            counts.communities += len(partition.size)
            counts.members += int(partition.size.sum())
            counts.largest = max(counts.largest, int(partition.size.max(initial=0)))
            counts.dropped += partition.dropped
        return counts


@dataclasses.dataclass
class RunStatistics:
    """What the steps over one cache did. Tokens are summed over rows, graphs and layers on the device (tally)."""

    num_layers: int
    prefills: int = 0
    decode_steps: int = 0
    sparse_steps: int = 0
    adopted: int = 0  # caches that were copied or met without their prefill
    reordered: int = 0  # caches whose rows are those of an earlier one, so that its index followed
    tokens_attended: int = 0  # summed over rows, graphs, layers and steps
    tokens_in_context: int = 0
    partition_seconds: float = 0.0  # CPU seconds of the workers
    waited_seconds: float = 0.0  # seconds that the caller waited for a partition
    index_lag_seconds: list[float] = dataclasses.field(default_factory=list)  # end of a prefill to its index
    dense_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)  # steps whose mask or counter was found to be another
    layers: list[LayerPartition] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.grow_to(self.num_layers)

    def grow_to(self, num_layers: int) -> None:
        self.layers += [LayerPartition() for _ in range(num_layers - len(self.layers))]

    def dense(self, reason: str) -> None:
        self.dense_reasons[reason] = self.dense_reasons.get(reason, 0) + 1

    def collect(self, tally) -> None:
        """Add and clear the device counters of an index, int64 [L, 2]."""
        attended, context = tally.sum(0).tolist()
        self.tokens_attended += attended
        self.tokens_in_context += context
        tally.zero_()

    def partitioned(self, layer: int, counts: LayerPartition) -> None:
        entry = self.layers[layer]
        entry.communities += counts.communities
        entry.members += counts.members
        entry.largest = max(entry.largest, counts.largest)
        entry.dropped += counts.dropped
