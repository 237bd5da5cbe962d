"""Assignment of new tokens to communities, one after the other (CommunityKV, eq. 6 and 7)."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _assign(labels, new_labels, community_weight, total_weight, num_communities, neighbors, weights, first, gamma, lam):
    heads, count, kappa = neighbors.shape
    toward = np.zeros(len(community_weight), np.float64)
    candidates = np.empty(heads * kappa, np.int32)
    slot_label = np.empty(kappa, np.int32)  # -1: not a node, -2: the token itself
    slot_weight = np.empty(kappa, np.float64)
    for t in range(count):
        token = first + t
        own_weight = 0.0  # w_i
        num_candidates = 0
        for h in range(heads):
            own_alpha = 0.0
            for slot in range(kappa):
                j = neighbors[h, t, slot]
                alpha = np.float64(weights[h, t, slot])
                label = -1
                if j == token:
                    label = -2
                elif j >= first and j < token:
                    label = new_labels[j - first]
                elif j >= 0 and j < first and j < len(labels):
                    label = labels[j]
                if not (alpha > 0.0 and alpha < np.inf) or label >= len(community_weight):
                    label = -1
                if label != -1:
                    for earlier in range(slot):
                        if neighbors[h, t, earlier] == j and slot_label[earlier] != -1:
                            label = -1  # a list is a set
                            break
                if label == -2:
                    own_alpha = alpha
                slot_label[slot] = label
                slot_weight[slot] = alpha
            for slot in range(kappa):
                label = slot_label[slot]
                if label < 0:
                    continue
                alpha = slot_weight[slot]
                # The edge to the new token: direct attention, and co-attention with the token's own slot.
                edge = 0.5 * lam * alpha + (1.0 - lam) * (own_alpha * alpha)
                own_weight += edge
                if toward[label] == 0.0 and edge > 0.0:
                    candidates[num_candidates] = label
                    num_candidates += 1
                toward[label] += edge
                community_weight[label] += edge
                total_weight[0] += 2.0 * edge
                # Co-attention of its pairs of keys: each adds to the strength of both ends, so to both communities.
                for other in range(slot):
                    if slot_label[other] >= 0:
                        pair = (1.0 - lam) * (alpha * slot_weight[other])
                        community_weight[label] += pair
                        community_weight[slot_label[other]] += pair
                        total_weight[0] += 2.0 * pair
        best = 0.0  # the gain of staying alone
        target = -1
        for c in range(num_candidates):
            label = candidates[c]
            gain = toward[label] - gamma * own_weight * community_weight[label] / total_weight[0]
            full = num_communities >= len(community_weight)
            if gain > best or (full and target < 0) or (gain == best and target >= 0 and label < target):
                best = gain
                target = label
        for c in range(num_candidates):
            toward[candidates[c]] = 0.0
        if target < 0 and num_communities < len(community_weight):
            target = num_communities
            num_communities += 1
            community_weight[target] = 0.0
        new_labels[t] = target
        if target >= 0:
            community_weight[target] += own_weight
    return num_communities


def assign_greedily(
    labels: np.ndarray,
    community_weight: np.ndarray,
    total_weight: np.ndarray,
    neighbors: np.ndarray,
    weights: np.ndarray,
    first_position: int,
    *,
    gamma: float,
    lam: float,
    num_communities: int | None = None,
) -> np.ndarray:
    """The communities of m new tokens, each chosen by the largest gain in modularity while all others stay (eq. 7).

    labels: int32 [at least first_position], communities of earlier positions, -1 for one that is not in the graph.
    community_weight: float64 [capacity], w_C = sum of the strengths of C's members; updated. total_weight: float64 [1],
    2m; updated. neighbors, weights: int32 and float32 [H, m, kappa], the top lists of the new tokens over what was
    retrieved (eq. 6; -1 for an empty slot), which give direct edges to the new token and co-attention edges between
    earlier ones. first_position: position of the first new token. num_communities: communities in use, labels.max() + 1
    when None.

    Returns int32 [m]; a new singleton gets the next free number. When ``community_weight`` has no room for one, the
    token joins its best neighbour, or gets -1 if it has none. Ties go to staying alone, then to the lower community.
    Edges with a NaN, infinite or negative weight, or to positions outside the graph, are ignored.
    """
    neighbors = np.ascontiguousarray(neighbors, np.int32)
    weights = np.ascontiguousarray(weights, np.float32)
    if neighbors.ndim != 3 or neighbors.shape != weights.shape:
        raise ValueError(f"neighbors and weights must be [H, m, kappa], got {neighbors.shape} and {weights.shape}")
    for name, array in (("community_weight", community_weight), ("total_weight", total_weight)):
        if array.dtype != np.float64:
            raise TypeError(f"{name} must be float64 because it is updated in place, got {array.dtype}")
    labels = np.ascontiguousarray(labels, np.int32)
    if num_communities is None:
        num_communities = int(labels[:first_position].max(initial=-1)) + 1
    new_labels = np.full(neighbors.shape[1], -1, np.int32)
    _assign(
        labels, new_labels, community_weight, total_weight, num_communities, neighbors, weights, int(first_position),
        float(gamma), float(lam),
    )  # fmt: skip
    return new_labels


@njit(nogil=True, cache=True)
def _weights_by_label(strength, labels, out):
    for i in range(len(strength)):
        if labels[i] >= 0:
            out[labels[i]] += strength[i]


def community_weights(strength: np.ndarray, labels: np.ndarray, capacity: int) -> np.ndarray:
    """w_C of every community of a partition, float64 [capacity], for ``assign_greedily``; labels: int32 [n]."""
    out = np.zeros(capacity, np.float64)
    _weights_by_label(strength, labels, out)
    return out
