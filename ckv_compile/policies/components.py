"""Connected components of the token graph: the first control of CommunityKV's table 7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckv_compile.community import partition as partitions
from ckv_compile.community.components import strongest_components
from ckv_compile.policies.base import GroupPolicy, graph_keys
from ckv_compile.policies.communities import nearest_keys


class Components(GroupPolicy):
    """Edges of the key graph below a threshold go; the components that are left are retrieved whole.

    The edges are those that communities are made of, here with the cosine of the two keys for a weight: the graph of
    nearest keys is unweighted and has no edges below a threshold. The threshold is the one at which groups have
    ``mean_size`` tokens on average, for each graph and block; nothing limits the largest, as in the paper.
    """

    def block_input(
        self, key: Tensor, first: Tensor, start: int, stop: int, size: int, graphs: int, config: Any
    ) -> Tensor:
        """float32 [B, G, n, 2 * kappa]: neighbours (positions in the block, -1 for none), and behind them their cosines."""
        near = nearest_keys(key, first, start, stop, size, config)
        graphs = near.shape[1]
        unit = torch.nn.functional.normalize(graph_keys(key[:, :, start:stop], graphs), dim=-1)
        begin = torch.arange(stop - start, device=near.device) // size * size
        cosines = []
        for slot in range(near.shape[-1]):  # one at a time: all of them would be kappa copies of the keys
            other = (near[..., slot].clamp(min=0) + begin).long()[..., None].expand(-1, -1, -1, unit.shape[-1])
            cosines.append((unit * unit.gather(2, other)).sum(-1))
        return torch.cat([near.to(torch.float32), torch.stack(cosines, -1)], -1)

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
        kappa = given.shape[-1] // 2
        near, cosine = given[..., :kappa].astype(np.int32), given[..., kappa:]
        rows = []
        for row, begin in enumerate(first):
            begin = min(begin, near.shape[2])
            groups = max(1, round((near.shape[2] - begin) / config.mean_size))
            labels = [strongest_components(near[row, g], cosine[row, g], begin, groups) for g in range(near.shape[1])]
            rows.append(partitions.partitions_of(np.stack(labels), begin, config))
        return rows
