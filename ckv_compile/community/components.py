"""Components of a graph without its weakest edges."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _join(source, target, label, missing):
    """Unite the ends of edges in their order until ``missing`` unions were made. label: int32 [n], a forest; updated."""
    for edge in range(len(source)):
        if missing <= 0:
            return
        ends = (source[edge], target[edge])
        roots = [0, 0]
        for side in range(2):
            root = ends[side]
            while label[root] != root:
                label[root] = label[label[root]]
                root = label[root]
            roots[side] = root
        if roots[0] != roots[1]:
            label[max(roots[0], roots[1])] = min(roots[0], roots[1])
            missing -= 1


def strongest_components(neighbors: np.ndarray, weights: np.ndarray, first: int, groups: int) -> np.ndarray:
    """The components that the strongest edges leave, at the threshold at which there are ``groups`` of them.

    neighbors: int32 [n, kappa], -1 for none; weights: float32 [n, kappa]. Nodes are the positions from ``first`` on.
    Edges of equal weight come in the order of their ends. Returns int32 [n], the smallest position of a component for a
    label; there are more components only where the graph itself has more.
    """
    n, kappa = neighbors.shape
    source = np.repeat(np.arange(n, dtype=np.int64), kappa)
    target, weight = neighbors.reshape(-1).astype(np.int64), weights.reshape(-1)
    kept = (target >= first) & (source >= first)
    source, target, weight = source[kept], target[kept], weight[kept]
    order = np.lexsort((target, source, -weight))
    label = np.arange(n, dtype=np.int32)
    _join(source[order], target[order], label, max(0, n - first - groups))
    for node in range(n):  # a root is the smallest of its component, so it comes before them
        label[node] = label[label[node]]
    return label
