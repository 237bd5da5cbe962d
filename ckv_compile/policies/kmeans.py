"""k-means on keys: ClusterKV (Liu et al. 2024, cosine) and Multipole (Hooper et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from ckv_compile.community import partition as partitions
from ckv_compile.community.kmeans import kmeans
from ckv_compile.policies.base import GroupPolicy, graph_keys


class KMeans(GroupPolicy):
    """Clusters of keys, ``mean_size`` tokens on average and ``max_community_size`` at most, in blocks as communities are.

    They are scored by their mean key and taken whole, as communities are: the partition is all that differs.
    """

    def __init__(self, *, cosine: bool) -> None:
        self.cosine = cosine

    def block_input(
        self, key: Tensor, first: Tensor, start: int, stop: int, size: int, graphs: int, config: Any
    ) -> Tensor:
        return graph_keys(key[:, :, start:stop], graphs)

    def partition(
        self,
        given: np.ndarray,
        first: list[int],
        config: Any,
        memory: Any,
        layer: int,
        backlog: Callable[[], int] | None,
        stop: np.ndarray,
        context: int = 0,
    ) -> list[list[partitions.Partition]]:
        rows = []
        for row, begin in enumerate(first):
            begin, n = min(begin, given.shape[2]), given.shape[2]
            labels = np.zeros((given.shape[1], n), np.int32)
            for graph in range(given.shape[1]):
                labels[graph, begin:] = kmeans(
                    given[row, graph, begin:], max(1, round((n - begin) / config.mean_size)), cosine=self.cosine,
                    largest=config.max_community_size, seed=config.seed, stop=stop,
                )  # fmt: skip
            rows.append(partitions.partitions_of(labels, begin, config))
        return rows
