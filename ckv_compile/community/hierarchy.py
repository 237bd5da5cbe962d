"""The coarse level of a partition: communities that belong together get consecutive numbers.

Decode steps score groups of consecutive communities first where there are many (``ckv::route_coarse``): the more alike
those of a group, the better its mean and spread say whether one of them is wanted. The communities are the nodes of a
graph of their own, whose communities, of some ``GROUP`` nodes each, this numbers one after another.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ckv_compile.community.leiden import _aggregate, _leiden_of_size

TOLERANCE, CORRECTIONS, PASSES = 0.2, 2, 2  # groups are cut to one size anyway


@njit(nogil=True, cache=True)
def _coarse_numbers(indptr, indices, weights, strength, labels, count, gamma, mean_size, seed, stop):
    """A number for each of ``count`` communities, int32; labels int32 [n], -1 for what is no node."""
    part = np.maximum(labels, 0)  # what is no node has no edge and no strength
    sizes = np.ones(len(labels), np.int32)
    graph = _aggregate(indptr, indices, weights, strength, sizes, part, count)
    coarse = np.arange(count).astype(np.int32)
    _leiden_of_size(
        graph[0], graph[1], graph[2], graph[3], gamma, mean_size, TOLERANCE, CORRECTIONS, PASSES, 0, seed, coarse, stop
    )
    begin = np.zeros(count + 1, np.int32)
    for c in range(count):
        begin[coarse[c] + 1] += 1
    for c in range(count):
        begin[c + 1] += begin[c]
    number = np.empty(count, np.int32)
    for c in range(count):
        number[c] = begin[coarse[c]]
        begin[coarse[c]] += 1
    return number


@njit(nogil=True, cache=True)
def _renumber(number, labels, start, size, member):
    """Give community c the number ``number[c]``, in place."""
    old_start, old_size, old_member = start.copy(), size.copy(), member.copy()
    for c in range(len(number)):
        size[number[c]] = old_size[c]
    place = 0
    for c in range(len(number)):
        start[c] = place
        place += size[c]
    for c in range(len(number)):
        for i in range(old_size[c]):
            member[start[number[c]] + i] = old_member[old_start[c] + i]
    for i in range(len(labels)):
        if labels[i] >= 0:
            labels[i] = number[labels[i]]


def number_by_coarse_level(
    labels: np.ndarray,
    start: np.ndarray,
    size: np.ndarray,
    member: np.ndarray,
    indptr: np.ndarray,
    indices: np.ndarray,
    weights: np.ndarray,
    strength: np.ndarray,
    *,
    gamma: float,
    mean_size: int,
    seed: int,
    stop: np.ndarray,
) -> None:
    """Number the communities of a partition (see ``Partition``) anew, in place; which tokens share one stays.

    labels: int32 [n]. indptr: int64 [n + 1], indices, weights: the CSR graph over the same positions, of which what is
    no node has no edges. strength: float64 [n]. gamma: the resolution at which the communities were found; that of
    communities of ``mean_size`` communities is some mean_size times smaller. Within a coarse community, and of coarse
    communities, the order stays that of their first numbers. stop: int32 [1]; once it is not 0 the order may be any.
    """
    count = len(size)
    if count > 1 and gamma > 0:
        number = _coarse_numbers(
            indptr, indices, weights, strength, labels, count, gamma / mean_size, float(mean_size), seed, stop
        )
        _renumber(number, labels, start, size, member)
