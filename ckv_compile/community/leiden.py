"""A compiled Leiden (Traag, Waltman and van Eck, 2019) for modularity with a resolution (CommunityKV, eq. 5).

Everything runs without the GIL, in the caller's thread, and depends on nothing but its arguments: the same graph and
seed give the same labels in any thread, next to any number of others.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ckv_compile.community.graph import ExtendedGraph, TokenGraph

MAX_LEVELS = 32
# A node moves for a gain of at least this part of its strength: far above rounding, far below any gain that matters.
LEAST_GAIN = 1e-9
# Every move raises modularity, so moving ends by itself; this bound only keeps rounding from making a cycle endless.
MAX_VISITS_PER_NODE = 256
POLL_MASK = 1023  # the stop flag is read once in so many visits


@njit(nogil=True, cache=True)
def _compact(labels):
    """Renumber labels in place by first appearance; returns their number. Labels must be in [0, len(labels))."""
    n = len(labels)
    new = np.full(n, -1, np.int32)
    count = 0
    for i in range(n):
        label = labels[i]
        if new[label] < 0:
            new[label] = count
            count += 1
        labels[i] = new[label]
    return count


@njit(nogil=True, cache=True)
def _shuffle(order, seed):
    state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
    for i in range(len(order) - 1, 0, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        j = np.int64((state >> np.uint64(11)) % np.uint64(i + 1))
        order[i], order[j] = order[j], order[i]


@njit(nogil=True, cache=True)
def _add_toward(begin, end, indices, weights, labels, toward, touched, num_touched):
    """Add the weights of a row's entries to the communities that they lead to; returns how many communities those are."""
    for p in range(begin, end):
        c = labels[indices[p]]
        before = toward[c]
        touched[num_touched] = c  # kept when new; without a branch, which would be mispredicted half of the time
        num_touched += np.int64(before == 0.0)
        toward[c] = before + weights[p]
    return num_touched


@njit(nogil=True, cache=True)
def _enqueue(begin, end, indices, labels, target, queue, queued, head, count):
    """Queue the nodes of a row's entries that are outside of ``target``; returns how many are queued now."""
    n = len(queue)
    for p in range(begin, end):
        u = indices[p]
        if not queued[u] and labels[u] != target:
            queued[u] = True
            tail = head + count
            if tail >= n:
                tail -= n
            queue[tail] = u
            count += 1
    return count


@njit(nogil=True, cache=True)
def _move_nodes(
    indptr, indices, weights, later_indptr, later_indices, later_weights, strength, size, resolution, cap, labels, queue,
    count, stop,
):  # fmt: skip
    """Fast local moving: move each queued node to its best community and queue the neighbours that it leaves behind.

    later_indptr ...: further edges, which may repeat some of the first; no entries where there are none. resolution:
    gamma / 2m. size: int32, tokens per node. cap: largest community in tokens, 0 for none. labels: updated in place, in
    [0, n). queue: int32 [n], of which ``count`` are set. Returns the number of moves.
    """
    has_later = len(later_indices) > 0
    n = len(strength)
    community_strength = np.zeros(n, np.float64)
    community_size = np.zeros(n, np.int64)
    members = np.zeros(n, np.int32)
    for i in range(n):
        c = labels[i]
        community_strength[c] += strength[i]
        community_size[c] += size[i]
        members[c] += 1
    free = np.empty(n, np.int32)
    num_free = 0
    for c in range(n - 1, -1, -1):
        if members[c] == 0:
            free[num_free] = c
            num_free += 1
    queued = np.zeros(n, np.bool_)
    for q in range(count):
        queued[queue[q]] = True
    toward = np.zeros(n, np.float64)
    touched = np.empty(n + 1, np.int32)
    head = 0
    visits = 0
    moves = 0
    limit = np.int64(MAX_VISITS_PER_NODE) * n
    while count > 0 and visits < limit:
        visits += 1
        if visits & POLL_MASK == 0 and stop[0] != 0:
            break
        v = queue[head]
        head += 1
        if head == n:
            head = 0
        count -= 1
        queued[v] = False
        old = labels[v]
        num_touched = _add_toward(indptr[v], indptr[v + 1], indices, weights, labels, toward, touched, 0)
        if has_later:
            num_touched = _add_toward(
                later_indptr[v], later_indptr[v + 1], later_indices, later_weights, labels, toward, touched, num_touched
            )
        if num_touched == 0:
            continue
        pull = strength[v] * resolution
        stay = toward[old] - pull * (community_strength[old] - strength[v])
        least = stay + LEAST_GAIN * strength[v]
        best = least
        target = old
        for t in range(num_touched):
            c = touched[t]
            gain = toward[c] - pull * community_strength[c]
            toward[c] = 0.0
            if gain > best and c != old and (cap == 0 or community_size[c] + size[v] <= cap):
                best = gain
                target = c
        if members[old] > 1 and num_free > 0 and best < 0.0 and least < 0.0:
            target = free[num_free - 1]  # alone is better than anywhere
        if target == old:
            continue
        moves += 1
        if members[target] == 0:
            num_free -= 1
        community_strength[old] -= strength[v]
        community_size[old] -= size[v]
        members[old] -= 1
        if members[old] == 0:
            free[num_free] = old
            num_free += 1
        community_strength[target] += strength[v]
        community_size[target] += size[v]
        members[target] += 1
        labels[v] = target
        count = _enqueue(indptr[v], indptr[v + 1], indices, labels, target, queue, queued, head, count)
        if has_later:
            count = _enqueue(
                later_indptr[v], later_indptr[v + 1], later_indices, labels, target, queue, queued, head, count
            )
    return moves


@njit(nogil=True, cache=True)
def _refine(indptr, indices, weights, strength, resolution, labels):
    """Merge single nodes inside their communities into well-connected parts, greedily; returns the parts' labels.

    Greedy where the original draws at random: parts stay connected either way, and the result is reproducible.
    """
    n = len(strength)
    part = np.arange(n).astype(np.int32)
    part_strength = strength.copy()
    members = np.ones(n, np.int32)
    outward = np.zeros(n, np.float64)  # weight from a part to the rest of its community
    community_strength = np.zeros(n, np.float64)
    for i in range(n):
        community_strength[labels[i]] += strength[i]
        for p in range(indptr[i], indptr[i + 1]):
            if labels[indices[p]] == labels[i]:
                outward[i] += weights[p]
    toward = np.zeros(n, np.float64)
    touched = np.empty(n + 1, np.int32)
    for v in range(n):
        if part[v] != v or members[v] != 1:
            continue
        label = labels[v]
        pull = strength[v] * resolution
        if outward[v] < pull * (community_strength[label] - strength[v]):
            continue
        num_touched = 0
        for p in range(indptr[v], indptr[v + 1]):
            u = indices[p]
            if labels[u] == label:
                c = part[u]
                before = toward[c]
                touched[num_touched] = c
                num_touched += np.int64(before == 0.0)
                toward[c] = before + weights[p]
        best = 0.0
        target = -1
        shared = 0.0
        for t in range(num_touched):
            c = touched[t]
            gain = toward[c] - pull * part_strength[c]
            if gain > best and outward[c] >= resolution * part_strength[c] * (
                community_strength[label] - part_strength[c]
            ):
                best = gain
                target = c
                shared = toward[c]
            toward[c] = 0.0
        if target >= 0:
            part[v] = target
            part_strength[target] += strength[v]
            members[target] += 1
            members[v] = 0
            outward[target] += outward[v] - 2.0 * shared
    return part


@njit(nogil=True, cache=True)
def _aggregate(indptr, indices, weights, strength, size, part, num_parts):
    """The graph of the parts: CSR without self-loops; strengths keep the weight inside."""
    n = len(strength)
    begin = np.zeros(num_parts + 1, np.int64)
    for i in range(n):
        begin[part[i] + 1] += 1
    for c in range(num_parts):
        begin[c + 1] += begin[c]
    cursor = begin[:num_parts].copy()
    member = np.empty(n, np.int32)
    for i in range(n):
        member[cursor[part[i]]] = i
        cursor[part[i]] += 1
    new_indptr = np.zeros(num_parts + 1, np.int64)
    new_indices = np.empty(len(indices) + 1, np.int32)
    new_weights = np.empty(len(indices), np.float64)
    new_strength = np.zeros(num_parts, np.float64)
    new_size = np.zeros(num_parts, np.int32)
    toward = np.zeros(num_parts, np.float64)
    used = 0
    for a in range(num_parts):
        for x in range(begin[a], begin[a + 1]):
            v = member[x]
            new_strength[a] += strength[v]
            new_size[a] += size[v]
            for p in range(indptr[v], indptr[v + 1]):
                b = part[indices[p]]
                if b != a:
                    before = toward[b]
                    new_indices[used] = b
                    used += np.int64(before == 0.0)
                    toward[b] = before + weights[p]
        new_indptr[a + 1] = used
        for p in range(new_indptr[a], used):
            new_weights[p] = toward[new_indices[p]]
            toward[new_indices[p]] = 0.0
    return new_indptr, new_indices[:used], new_weights[:used], new_strength, new_size


@njit(nogil=True, cache=True)
def _levels(indptr, indices, weights, strength, size, resolution, cap, labels, stop):
    """The levels above the first: move, refine, aggregate until nothing merges. Labels in and out, compact."""
    node_of = np.arange(len(strength)).astype(np.int32)  # the node that stands for a node of the first level
    current = labels.copy()
    for _ in range(MAX_LEVELS):
        n = len(strength)
        queue = np.arange(n).astype(np.int32)
        _move_nodes(
            indptr, indices, weights, indptr, indices[:0], weights[:0], strength, size, resolution, cap, current, queue,
            n, stop,
        )  # fmt: skip
        if _compact(current) == n or stop[0] != 0:
            break
        part = _refine(indptr, indices, weights, strength, resolution, current)
        num_parts = _compact(part)
        if num_parts == n:
            break
        upper = np.empty(num_parts, np.int32)
        for i in range(n):
            upper[part[i]] = current[i]
        for i in range(len(node_of)):
            node_of[i] = part[node_of[i]]
        indptr, indices, weights, strength, size = _aggregate(indptr, indices, weights, strength, size, part, num_parts)
        current = upper
    for i in range(len(labels)):
        labels[i] = current[node_of[i]]


@njit(nogil=True, cache=True)
def _connected_labels(indptr, indices, labels):
    """Give every connected piece of every community its own label, numbered by first position; O(E)."""
    n = len(labels)
    piece = np.full(n, -1, np.int32)
    stack = np.empty(n, np.int32)
    count = 0
    for root in range(n):
        if piece[root] >= 0:
            continue
        piece[root] = count
        stack[0] = root
        top = 1
        while top > 0:
            top -= 1
            v = stack[top]
            for p in range(indptr[v], indptr[v + 1]):
                u = indices[p]
                if piece[u] < 0 and labels[u] == labels[v]:
                    piece[u] = count
                    stack[top] = u
                    top += 1
        count += 1
    return piece, count


@njit(nogil=True, cache=True)
def _break_oversized(labels, cap):
    """Make single nodes of the members of communities above the cap, in place (labels must be compact)."""
    n = len(labels)
    count = np.zeros(n, np.int32)
    number = 0
    for i in range(n):
        count[labels[i]] += 1
        number = max(number, labels[i] + 1)
    kept = np.zeros(n, np.bool_)
    broken = 0
    for i in range(n):
        label = labels[i]
        if count[label] > cap:
            broken += 1
            if kept[label]:
                labels[i] = number
                number += 1
            kept[label] = True
    return broken


@njit(nogil=True, cache=True)
def _leiden(indptr, indices, weights, strength, gamma, passes, cap, seed, labels, stop):
    """Improve labels in place (in [0, n)); returns the number of communities, which are connected and compact."""
    n = len(strength)
    double_m = strength.sum()
    if n == 0:
        return 0
    _compact(labels)
    if double_m > 0.0:
        resolution = gamma / double_m
        size = np.ones(n, np.int32)
        if cap > 0:
            _break_oversized(labels, cap)
        queue = np.empty(n, np.int32)
        for number in range(passes):
            for i in range(n):
                queue[i] = i
            if seed != 0:
                _shuffle(queue, seed + number)
            moves = _move_nodes(
                indptr, indices, weights, indptr, indices[:0], weights[:0], strength, size, resolution, cap, labels,
                queue, n, stop,
            )  # fmt: skip
            if stop[0] != 0 or (number > 0 and moves == 0):
                break
            num_communities = _compact(labels)
            if num_communities < n:
                part = _refine(indptr, indices, weights, strength, resolution, labels)
                num_parts = _compact(part)
                if num_parts < n:
                    upper = np.empty(num_parts, np.int32)
                    for i in range(n):
                        upper[part[i]] = labels[i]
                    coarse = _aggregate(indptr, indices, weights, strength, size, part, num_parts)
                    _levels(coarse[0], coarse[1], coarse[2], coarse[3], coarse[4], resolution, cap, upper, stop)
                    for i in range(n):
                        labels[i] = upper[part[i]]
            if stop[0] != 0:
                break
    piece, count = _connected_labels(indptr, indices, labels)
    labels[:] = piece
    return count


@njit(nogil=True, cache=True)
def _modularity(indptr, indices, weights, strength, labels, gamma):
    n = len(strength)
    double_m = strength.sum()
    if double_m <= 0.0:
        return 0.0
    inside = 0.0
    community_strength = np.zeros(n, np.float64)
    for i in range(n):
        community_strength[labels[i]] += strength[i]
        for p in range(indptr[i], indptr[i + 1]):
            if labels[indices[p]] == labels[i]:
                inside += weights[p]
    expected = 0.0
    for c in range(n):
        expected += (community_strength[c] / double_m) ** 2
    return inside / double_m - gamma * expected


@njit(nogil=True, cache=True)
def next_gamma(log_gammas, log_means, count, log_target):
    """Where to look for a mean size next: inside the tightest bracket, else along the last slope, in log-log.

    log_gammas, log_means: float64, the first ``count`` are what was tried. Returns a gamma.
    """
    last = count - 1
    low, high = -1, -1  # the largest gamma with too large a mean, the smallest with too small a one
    for k in range(count):
        if log_means[k] > log_target:
            if low < 0 or log_gammas[k] > log_gammas[low]:
                low = k
        elif high < 0 or log_gammas[k] < log_gammas[high]:
            high = k
    if low >= 0 and high >= 0 and log_gammas[low] < log_gammas[high]:
        part = (log_means[low] - log_target) / max(1e-12, log_means[low] - log_means[high])
        return np.exp(log_gammas[low] + min(0.9, max(0.1, part)) * (log_gammas[high] - log_gammas[low]))
    slope = -1.0  # on key graphs the mean size is about inversely proportional to gamma
    if count > 1 and log_gammas[last] != log_gammas[last - 1]:
        slope = (log_means[last] - log_means[last - 1]) / (log_gammas[last] - log_gammas[last - 1])
        slope = min(-0.25, max(-2.0, slope))
    step = (log_target - log_means[last]) / slope
    return np.exp(log_gammas[last] + min(3.0, max(-3.0, step)))


@njit(nogil=True, cache=True)
def _leiden_of_size(
    indptr, indices, weights, strength, gamma, mean_size, tolerance, corrections, passes, cap, seed, labels, stop
):
    """``_leiden`` at the gamma that gives connected nodes a mean community size; returns that gamma.

    corrections: evaluations after the first (0 keeps the gamma given). The search takes one pass per evaluation; the
    other passes start from its closest result.
    """
    n = len(strength)
    linked = 0
    for i in range(n):
        if indptr[i + 1] > indptr[i]:
            linked += 1
    if linked == 0:
        _leiden(indptr, indices, weights, strength, gamma, 1, cap, seed, labels, stop)
        return gamma
    if corrections == 0:
        _leiden(indptr, indices, weights, strength, gamma, passes, cap, seed, labels, stop)
        return gamma
    log_target = np.log(mean_size)
    log_gammas = np.zeros(corrections + 1, np.float64)
    log_means = np.zeros(corrections + 1, np.float64)
    start = labels.copy()
    trial = np.empty(n, np.int32)
    closest = np.inf
    chosen = gamma
    for k in range(corrections + 1):
        trial[:] = start
        count = _leiden(indptr, indices, weights, strength, gamma, 1, cap, seed, trial, stop)
        log_gammas[k] = np.log(gamma)
        log_means[k] = np.log(linked / max(1, count - (n - linked)))
        miss = abs(log_means[k] - log_target)
        if miss < closest:
            closest = miss
            chosen = gamma
            labels[:] = trial
        if stop[0] != 0 or closest <= np.log(1.0 + tolerance):
            break
        gamma = next_gamma(log_gammas, log_means, k + 1, log_target)
    if passes > 1 and stop[0] == 0:
        _leiden(indptr, indices, weights, strength, chosen, passes - 1, cap, seed, labels, stop)
    return chosen


@njit(nogil=True, cache=True)
def leiden_batch(
    indptr, indices, weights, strength, gammas, mean_size, tolerance, corrections, passes, cap, seed, labels, stop
):
    """Partition several graphs of one shape in one call.

    indptr: int64 [G, n + 1] into the joint indices and weights. strength: float64 [G, n]. gammas: float64 [G], updated
    to what the search of ``mean_size`` found (unchanged with 0 corrections). labels: int32 [G, n], to start from;
    updated.
    """
    for g in range(len(gammas)):
        gammas[g] = _leiden_of_size(
            indptr[g],
            indices,
            weights,
            strength[g],
            gammas[g],
            mean_size,
            tolerance,
            corrections,
            passes,
            cap,
            seed,
            labels[g],
            stop,
        )


def _check_gamma(gamma: float) -> float:
    gamma = float(gamma)
    if not (math.isfinite(gamma) and gamma >= 0.0):
        raise ValueError(f"gamma must be finite and at least 0, got {gamma}")
    return gamma


def start_labels(num_nodes: int, initial: np.ndarray | None) -> np.ndarray:
    """Labels in [0, num_nodes) to start from: single nodes, or ``initial`` with a single node for each -1."""
    if initial is None:
        return np.arange(num_nodes, dtype=np.int32)
    initial = np.asarray(initial)
    if initial.shape != (num_nodes,):
        raise ValueError(f"initial labels must have shape ({num_nodes},), got {initial.shape}")
    known = initial >= 0
    labels = np.empty(num_nodes, np.int32)
    distinct, labels[known] = np.unique(initial[known], return_inverse=True)
    labels[~known] = np.arange(len(distinct), len(distinct) + int(num_nodes - known.sum()), dtype=np.int32)
    return labels


@njit(nogil=True, cache=True)
def _with_singles(labels):
    """Labels in [0, n) from such labels, with a node of its own for each -1: in place."""
    taken = np.zeros(len(labels), np.bool_)
    for i in range(len(labels)):
        if labels[i] >= 0:
            taken[labels[i]] = True
    free = 0
    for i in range(len(labels)):
        if labels[i] < 0:
            while taken[free]:
                free += 1
            labels[i] = free
            free += 1


def stop_flag(stop: np.ndarray | None) -> np.ndarray:
    """The flag that kernels poll; one that is never raised when there is none."""
    return np.zeros(1, np.int32) if stop is None else stop


def leiden(
    graph: TokenGraph,
    *,
    gamma: float,
    passes: int = 1,
    initial: np.ndarray | None = None,
    seed: int = 0,
    max_community_size: int = 0,
    stop: np.ndarray | None = None,
) -> np.ndarray:
    """Communities of a graph that maximise modularity at a resolution (eq. 5): int32 [n], numbered by first position.

    Every community is connected; a node without an edge is alone. passes: full runs, each starting from the last.
    initial: labels to start from (-1 for a new node). seed: order in which nodes are visited first; 0 is by position.
    max_community_size: tokens; 0 for no limit. The limit holds during moving: a full community accepts no node, which
    then takes its next best choice. stop: int32 [1]; once it is not 0 the engine returns promptly with what it has.
    """
    gamma = _check_gamma(gamma)
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    labels = start_labels(graph.num_nodes, initial)
    _leiden(
        graph.indptr, graph.indices, graph.weights, graph.strength, gamma, int(passes), int(max_community_size),
        int(seed), labels, stop_flag(stop),
    )  # fmt: skip
    return labels


@njit(nogil=True, cache=True)
def _push_connected(begin, end, indices, labels, label, seen, stack, top):
    for p in range(begin, end):
        u = indices[p]
        if labels[u] == label and not seen[u]:
            seen[u] = True
            stack[top] = u
            top += 1
    return top


@njit(nogil=True, cache=True)
def _split_changed(indptr, indices, later_indptr, later_indices, before, labels):
    """Give the connected pieces of communities that lost or gained a node labels of their own, in place, in [0, n)."""
    n = len(labels)
    changed = np.zeros(n, np.bool_)
    taken = np.zeros(n, np.bool_)
    for i in range(n):
        taken[labels[i]] = True
        if labels[i] != before[i]:
            changed[labels[i]] = True
            changed[before[i]] = True
    seen = np.zeros(n, np.bool_)
    stack = np.empty(n, np.int32)
    piece = np.empty(n, np.int32)
    first = np.ones(n, np.bool_)  # whose first piece keeps the label
    free = 0
    for root in range(n):
        label = labels[root]
        if not changed[label] or seen[root]:
            continue
        seen[root] = True
        stack[0] = root
        top = 1
        size = 0
        while top > 0:
            top -= 1
            v = stack[top]
            piece[size] = v
            size += 1
            top = _push_connected(indptr[v], indptr[v + 1], indices, labels, label, seen, stack, top)
            if len(later_indices) > 0:
                top = _push_connected(
                    later_indptr[v], later_indptr[v + 1], later_indices, labels, label, seen, stack, top
                )
        if first[label]:
            first[label] = False
            continue
        while taken[free]:
            free += 1
        taken[free] = True
        for i in range(size):
            labels[piece[i]] = free  # not ``changed`` before, and all of it seen


@njit(nogil=True, cache=True)
def _seeded(
    indptr, indices, weights, later_indptr, later_indices, later_weights, strength, gamma, cap, labels, seeds, stop
):  # fmt: skip
    n = len(strength)
    double_m = strength.sum()
    _compact(labels)
    if double_m > 0.0:
        before = labels.copy()
        queue = np.empty(n, np.int32)
        queued = np.zeros(n, np.bool_)
        count = 0
        for s in range(len(seeds)):
            v = seeds[s]
            if v >= 0 and v < n and not queued[v]:
                queued[v] = True
                queue[count] = v
                count += 1
        size = np.ones(n, np.int32)
        _move_nodes(
            indptr, indices, weights, later_indptr, later_indices, later_weights, strength, size, gamma / double_m, cap,
            labels, queue, count, stop,
        )  # fmt: skip
        _split_changed(indptr, indices, later_indptr, later_indices, before, labels)
    return _compact(labels)


def seeded(
    graph: TokenGraph | ExtendedGraph,
    labels: np.ndarray,
    seeds: np.ndarray,
    *,
    gamma: float,
    max_community_size: int = 0,
    stop: np.ndarray | None = None,
) -> np.ndarray:
    """Labels after local moving that starts at given nodes only, and spreads from them where it helps.

    labels: int32 [n], in [0, n), -1 for a new node. seeds: nodes. Cheap repair of a partition after tokens were added:
    edges are read around nodes that move, and nowhere else. Communities that lose or gain a node are connected afterwards.
    """
    labels = np.array(labels, np.int32)
    _with_singles(labels)
    _seeded(
        *graph.both(), graph.strength, _check_gamma(gamma), int(max_community_size), labels,
        np.ascontiguousarray(seeds, np.int32), stop_flag(stop),
    )  # fmt: skip
    return labels


@njit(nogil=True, cache=True)
def _enforce(indptr, indices, weights, strength, gamma, cap, labels, stop):
    """Connected communities within the cap, from labels in [0, n); in place, returns their number."""
    piece, _ = _connected_labels(indptr, indices, labels)
    labels[:] = piece
    if cap > 0:
        sizes = np.zeros(len(labels), np.int64)
        for i in range(len(labels)):
            sizes[labels[i]] += 1
        if len(labels) > 0 and sizes.max() > cap:
            return _leiden(indptr, indices, weights, strength, gamma, 1, cap, 0, labels, stop)
    return _compact(labels)


def enforce_size(
    graph: TokenGraph, labels: np.ndarray, *, gamma: float, max_community_size: int, stop: np.ndarray | None = None
) -> np.ndarray:
    """Connected communities within a size limit from any labels: what ``leiden`` promises, for other engines.

    Communities above the limit are dissolved and their members settle again, under the limit, where modularity gains
    most. Nodes that hang on one full community only (leaves of a star) have nowhere to go and stay alone.
    """
    labels = start_labels(graph.num_nodes, labels)
    _enforce(
        graph.indptr, graph.indices, graph.weights, graph.strength, _check_gamma(gamma), int(max_community_size),
        labels, stop_flag(stop),
    )  # fmt: skip
    return labels


def modularity(graph: TokenGraph, labels: np.ndarray, gamma: float) -> float:
    """Eq. 5 for any labels; nodes labelled -1 count as alone, and a graph without an edge has modularity 0."""
    labels = start_labels(graph.num_nodes, labels)
    return float(_modularity(graph.indptr, graph.indices, graph.weights, graph.strength, labels, _check_gamma(gamma)))


def is_connected(graph: TokenGraph, labels: np.ndarray) -> bool:
    """Whether every community is connected by edges inside it."""
    labels = start_labels(graph.num_nodes, labels)
    _, pieces = _connected_labels(graph.indptr, graph.indices, labels)
    return pieces == len(np.unique(labels))
