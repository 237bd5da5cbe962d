"""Communities of a graph of tokens (CommunityKV): the default, and the only policy that ``graph`` says anything to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckv_compile.community import partition as partitions
from ckv_compile.policies.base import GroupPolicy


def nearest_keys(key: Tensor, first: Tensor, start: int, stop: int, size: int, config: Any) -> Tensor:
    """``ckv::key_neighbors`` as the options want it: int32 [B, G, stop - start, kappa], relative to each block."""
    joined = config.graph_aggregation == "layer"
    return torch.ops.ckv.key_neighbors(
        key, first, start, stop, config.kappa, config.num_sink_tokens, joined, size
    )  # fmt: skip


class Communities(GroupPolicy):
    """Leiden on the graph of nearest keys. With ``graph="attention"`` and ``"mixed"`` partitions come from the prefill."""

    def block_input(
        self, key: Tensor, first: Tensor, start: int, stop: int, size: int, graphs: int, config: Any
    ) -> Tensor:
        return nearest_keys(key, first, start, stop, size, config)

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
        common = {
            "config": config,
            "memory": memory,
            "layer": layer,
            "stop": stop,
            "backlog": backlog,
            "context": context,
        }
        return [partitions.partition_keys_block(given[row], first[row], **common) for row in range(len(first))]
