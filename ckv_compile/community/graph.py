"""Token graphs as symmetric CSR arrays (CommunityKV, eq. 2-4), built natively from lists of neighbours."""

from __future__ import annotations

import dataclasses

import numpy as np
from numba import njit

Array = np.ndarray
TwoCSR = tuple[Array, Array, Array, Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class TokenGraph:
    """An undirected weighted graph of ``n`` tokens: symmetric CSR, both directions stored, no self-loops.

    Eq. 3 of the paper also holds for i = j. Those self-loops are left out (a deviation): they are 7-35 % of the weight
    of attention graphs, never influence which of its neighbours a token joins, and only shift the resolution.
    Columns of a row are in no particular order, each occurs once, and every weight is positive and finite.

    indptr: int64 [n + 1]. indices: int32 [nnz]. weights: float32 [nnz], bit-equal in both directions.
    strength: float64 [n], the sum of a row's weights (w_i of eq. 5).
    dropped: list entries that were left out because their weight was NaN, infinite, negative or out of range.
    key_scale: what a key edge of ``mixed_graph`` was multiplied with; 1 in other graphs.
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    strength: np.ndarray
    dropped: int = 0
    key_scale: float = 1.0

    @property
    def num_nodes(self) -> int:
        return len(self.strength)

    @property
    def num_edges(self) -> int:
        """Undirected edges."""
        return len(self.indices) // 2

    def both(self) -> TwoCSR:
        """Two CSRs, of which the second has no entry: what kernels read that also take an ``ExtendedGraph``."""
        return self.indptr, self.indices, self.weights, self.indptr, self.indices[:0], self.weights[:0]

    def alone(self) -> np.ndarray:
        """bool [n]: nodes without an edge."""
        return self.indptr[1:] == self.indptr[:-1]


@dataclasses.dataclass(frozen=True)
class ExtendedGraph:
    """A graph of n tokens that goes on from an earlier one of m: its edges, and those that later tokens brought.

    Nothing of the earlier graph is copied, however large it is. base: over the first m nodes. edge: int64 [E], later
    edges once each, ascending, low end times 2^32 plus high end; one may repeat an edge of base, and counts besides.
    weight: float64 [E]. later_indptr, later_indices, later_weights: those as a symmetric CSR over n nodes. strength:
    float64 [n], of both.
    """

    base: TokenGraph
    edge: np.ndarray
    weight: np.ndarray
    later_indptr: np.ndarray
    later_indices: np.ndarray
    later_weights: np.ndarray
    strength: np.ndarray
    dropped: int

    @property
    def num_nodes(self) -> int:
        return len(self.strength)

    @property
    def key_scale(self) -> float:
        return self.base.key_scale

    def _base_indptr(self) -> np.ndarray:
        """That of base over all nodes."""
        indptr = self.base.indptr
        return np.concatenate([indptr, np.full(self.num_nodes - self.base.num_nodes, indptr[-1])])

    def both(self) -> TwoCSR:
        return (
            self._base_indptr(), self.base.indices, self.base.weights, self.later_indptr, self.later_indices,
            self.later_weights,
        )  # fmt: skip

    def alone(self) -> np.ndarray:
        """bool [n]: nodes without an edge."""
        alone = self.later_indptr[1:] == self.later_indptr[:-1]
        alone[: self.base.num_nodes] &= self.base.alone()
        return alone

    def merged(self, prune: float = 0.0) -> TokenGraph:
        """All in one graph, without edges below ``prune`` times the weaker end's strongest."""
        indptr, indices, weights = _sum_of_graphs(
            self._base_indptr(), self.base.indices, self.base.weights, 1.0, self.later_indptr, self.later_indices,
            self.later_weights, 1.0,
        )  # fmt: skip
        used = _pruned(indptr, indices, weights, float(prune))
        if used < len(indices):
            indices, weights = indices[:used].copy(), weights[:used].copy()
        return TokenGraph(indptr, indices, weights, _row_sums(indptr, weights), self.dropped, self.key_scale)


@njit(nogil=True, cache=True)
def _clean_lists(neighbors, weights, first):
    """Copy lists with valid entries first and positions counted from ``first``.

    A list is a set: of equal entries the first valid one counts. Returns ids int32 [H * n, kappa] (-1 ends a list),
    alphas float32 [H * n, kappa] and the number of entries with an unusable weight.
    """
    heads, length, kappa = neighbors.shape
    n = length - first
    ids = np.empty((heads * n, kappa), np.int32)
    alphas = np.empty((heads * n, kappa), np.float32)
    dropped = 0
    for h in range(heads):
        for m in range(n):
            row = h * n + m
            filled = 0
            for slot in range(kappa):
                j = neighbors[h, first + m, slot] - first
                if j < 0 or j >= n:
                    continue
                alpha = weights[h, first + m, slot]
                if not (alpha >= 0.0 and alpha < np.inf):
                    dropped += 1
                    continue
                if alpha == 0.0:
                    continue
                seen = False
                for earlier in range(filled):
                    if ids[row, earlier] == j:
                        seen = True
                        break
                if not seen:
                    ids[row, filled] = j
                    alphas[row, filled] = alpha
                    filled += 1
            for slot in range(filled, kappa):
                ids[row, slot] = -1
                alphas[row, slot] = 0.0
    return ids, alphas, dropped


@njit(nogil=True, cache=True)
def _lists_by_key(ids, n):
    """Which lists concern a node: those that hold it and its own, in ascending list order (counting sort).

    Returns start int64 [n + 1], lists int32 and slots int32 (the node's place in the list, -1 when it is not in it).
    """
    rows, kappa = ids.shape
    start = np.zeros(n + 1, np.int64)
    for row in range(rows):
        own = row % n
        if kappa == 0 or ids[row, 0] < 0:
            continue
        start[own + 1] += 1
        for slot in range(kappa):
            j = ids[row, slot]
            if j < 0:
                break
            if j != own:
                start[j + 1] += 1
    for i in range(n):
        start[i + 1] += start[i]
    cursor = start[:n].copy()
    lists = np.empty(start[n], np.int32)
    slots = np.empty(start[n], np.int32)
    for row in range(rows):
        own = row % n
        if kappa == 0 or ids[row, 0] < 0:
            continue
        own_place = cursor[own]
        cursor[own] += 1
        lists[own_place] = row
        slots[own_place] = -1
        for slot in range(kappa):
            j = ids[row, slot]
            if j < 0:
                break
            if j == own:
                slots[own_place] = slot
            else:
                place = cursor[j]
                cursor[j] += 1
                lists[place] = row
                slots[place] = slot
    return start, lists, slots


@njit(nogil=True, cache=True)
def _grown(array, used):
    larger = np.empty(2 * len(array), array.dtype)
    larger[:used] = array[:used]
    return larger


@njit(nogil=True, cache=True)
def _attention_csr(ids, alphas, n, lam, dropped):
    """Eq. 4 row by row: a row gathers from the lists that concern it, so nothing but the result is materialised.

    Both rows of an edge add the same terms in the same order, which makes the result symmetric to the bit.
    """
    kappa = ids.shape[1]
    start, lists, slots = _lists_by_key(ids, n)
    indptr = np.zeros(n + 1, np.int64)
    room = max(16, 8 * n)
    indices = np.empty(room, np.int32)
    weights = np.empty(room, np.float32)
    total = np.zeros(n, np.float64)
    touched = np.empty(n + 1, np.int32)
    half, rest = 0.5 * lam, 1.0 - lam
    used = 0
    for i in range(n):
        count = 0
        for place in range(start[i], start[i + 1]):
            row = lists[place]
            slot = slots[place]
            query = row % n
            if half == 0.0:
                pass  # a term of weight zero would look like an untouched node
            elif query == i:
                for y in range(kappa):
                    j = ids[row, y]
                    if j < 0:
                        break
                    if j != i:
                        before = total[j]
                        touched[count] = j  # kept when new; without a branch, which would be mispredicted often
                        count += np.int64(before == 0.0)
                        total[j] = before + half * np.float64(alphas[row, y])
            else:
                before = total[query]
                touched[count] = query
                count += np.int64(before == 0.0)
                total[query] = before + half * np.float64(alphas[row, slot])
            if slot >= 0 and rest > 0.0:
                alpha = np.float64(alphas[row, slot])
                for y in range(kappa):
                    j = ids[row, y]
                    if j < 0:
                        break
                    if j != i:
                        before = total[j]
                        touched[count] = j
                        count += np.int64(before == 0.0)
                        total[j] = before + rest * (alpha * np.float64(alphas[row, y]))
        while used + count > room:
            indices = _grown(indices, used)
            weights = _grown(weights, used)
            room *= 2
        for t in range(count):
            j = touched[t]
            weight = np.float32(total[j])
            total[j] = 0.0
            if weight > 0.0 and weight < np.inf:
                indices[used] = j
                weights[used] = weight
                used += 1
            elif weight > 0.0 and j > i:
                dropped += 1
        indptr[i + 1] = used
    return indptr, indices[:used], weights[:used], dropped


@njit(nogil=True, cache=True)
def _pruned(indptr, indices, weights, prune):
    """Drop edges below ``prune`` times the smaller of their ends' strongest edges; in place, returns the new length."""
    n = len(indptr) - 1
    if prune > 0.0:
        strongest = np.zeros(n, np.float32)
        for i in range(n):
            for p in range(indptr[i], indptr[i + 1]):
                strongest[i] = max(strongest[i], weights[p])
        used = 0
        begin = indptr[0]
        for i in range(n):
            end = indptr[i + 1]
            for p in range(begin, end):
                j = indices[p]
                if weights[p] >= prune * min(strongest[i], strongest[j]):
                    indices[used] = j
                    weights[used] = weights[p]
                    used += 1
            begin = end
            indptr[i + 1] = used
    return indptr[n]


@njit(nogil=True, cache=True)
def _row_sums(indptr, weights):
    n = len(indptr) - 1
    strength = np.zeros(n, np.float64)
    for i in range(n):
        for p in range(indptr[i], indptr[i + 1]):
            strength[i] += weights[p]
    return strength


@njit(nogil=True, cache=True)
def key_graphs_csr(neighbors, first):
    """Unweighted kNN graphs of several key lists at once.

    neighbors: int32 [G, n, kappa], -1 for an empty slot. first: int32 [G]; earlier positions are not nodes (they stay
    in the arrays without an edge, so that every graph has the same shape). Returns indptr int64 [G, n + 1] into the
    joint indices int32 and weights float32, and strength float64 [G, n].
    """
    graphs, n, kappa = neighbors.shape
    indptr = np.zeros((graphs, n + 1), np.int64)
    indices = np.empty(max(1, 2 * graphs * n * kappa), np.int32)
    weights = np.empty(max(1, 2 * graphs * n * kappa), np.float32)
    strength = np.zeros((graphs, n), np.float64)
    start = np.empty(n + 1, np.int64)
    cursor = np.empty(n, np.int64)
    raw = np.empty(max(1, 2 * n * kappa), np.int32)
    slot_of = np.empty(n, np.int64)
    mark = np.full(n, -1, np.int64)
    used = 0
    for g in range(graphs):
        start[:] = 0
        for i in range(first[g], n):
            for slot in range(kappa):
                j = neighbors[g, i, slot]
                if j >= first[g] and j < n and j != i:
                    start[i + 1] += 1
                    start[j + 1] += 1
        for i in range(n):
            start[i + 1] += start[i]
            cursor[i] = start[i]
        for i in range(first[g], n):
            for slot in range(kappa):
                j = neighbors[g, i, slot]
                if j >= first[g] and j < n and j != i:
                    listed = False  # a list is a set
                    for earlier in range(slot):
                        if neighbors[g, i, earlier] == j:
                            listed = True
                            break
                    if not listed:
                        raw[cursor[i]] = j
                        cursor[i] += 1
                        raw[cursor[j]] = i
                        cursor[j] += 1
        indptr[g, 0] = used
        for i in range(n):
            stamp = g * n + i
            for p in range(start[i], cursor[i]):
                j = raw[p]
                if mark[j] != stamp:
                    mark[j] = stamp
                    slot_of[j] = used
                    indices[used] = j
                    weights[used] = 0.5
                    used += 1
                else:
                    weights[slot_of[j]] += np.float32(0.5)
                strength[g, i] += 0.5
            indptr[g, i + 1] = used
    return indptr, indices[:used].copy(), weights[:used].copy(), strength


@njit(nogil=True, cache=True)
def _sum_of_graphs(indptr_a, indices_a, weights_a, scale_a, indptr_b, indices_b, weights_b, scale_b):
    n = len(indptr_a) - 1
    indptr = np.zeros(n + 1, np.int64)
    indices = np.empty(len(indices_a) + len(indices_b), np.int32)
    weights = np.empty(len(indices_a) + len(indices_b), np.float32)
    place = np.empty(n, np.int64)
    mark = np.full(n, -1, np.int32)
    used = 0
    for i in range(n):
        for p in range(indptr_a[i], indptr_a[i + 1]):
            weight = np.float32(scale_a * weights_a[p])
            if weight > 0.0:
                j = indices_a[p]
                mark[j] = i
                place[j] = used
                indices[used] = j
                weights[used] = weight
                used += 1
        for p in range(indptr_b[i], indptr_b[i + 1]):
            j = indices_b[p]
            weight = np.float32(scale_b * weights_b[p])
            if mark[j] == i:
                weights[place[j]] += weight
            else:
                indices[used] = j
                weights[used] = weight
                used += 1
        indptr[i + 1] = used
    return indptr, indices[:used].copy(), weights[:used].copy()


def _lists(name: str, array: np.ndarray, dtype: type, ndim: int) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {array.shape}")
    return np.ascontiguousarray(array, dtype)


def attention_graph(
    neighbors: np.ndarray, weights: np.ndarray, *, lam: float, prune: float, first: int = 0
) -> TokenGraph:
    """The combined graph of direct attention and co-attention (eq. 2-4), summed over the lists of several heads.

    neighbors: int32 [H, n, kappa], the keys that each query attends to most; -1 for an empty slot, anywhere, entries in
    any order. weights: float32 [H, n, kappa], their attention probabilities; NaN, infinite and negative ones are
    dropped and counted. lam: weight of direct attention (lambda of eq. 4). prune: edges below this part of the smaller
    of their two ends' strongest edges are dropped (below 0.03 modularity changes by less than 0.0001). first: positions
    before it are not nodes; node i of the result is position ``first + i``.
    """
    neighbors = _lists("neighbors", neighbors, np.int32, 3)
    weights = _lists("weights", weights, np.float32, 3)
    if neighbors.shape != weights.shape:
        raise ValueError(f"neighbors and weights must have one shape, got {neighbors.shape} and {weights.shape}")
    first = min(max(0, int(first)), neighbors.shape[1])
    ids, alphas, dropped = _clean_lists(neighbors, weights, first)
    n = neighbors.shape[1] - first
    indptr, indices, values, dropped = _attention_csr(ids, alphas, n, float(lam), dropped)
    used = _pruned(indptr, indices, values, float(prune))
    indices, values = indices[:used].copy(), values[:used].copy()
    return TokenGraph(indptr, indices, values, _row_sums(indptr, values), int(dropped))


def key_graph(neighbors: np.ndarray, *, first: int = 0) -> TokenGraph:
    """The unweighted graph of nearest keys: an edge weighs 1/2 for each direction in which it is listed.

    neighbors: int32 [n, kappa], -1 for an empty slot. This is eq. 4 with lambda 1 and unit scores, hence without
    co-attention. first: positions before it are not nodes; node i of the result is position ``first + i``.
    """
    neighbors = _lists("neighbors", neighbors, np.int32, 2)
    first = min(max(0, int(first)), neighbors.shape[0])
    nodes = neighbors[first:] - np.int32(first)
    indptr, indices, weights, strength = key_graphs_csr(nodes[None], np.zeros(1, np.int32))
    return TokenGraph(indptr[0], indices, weights, strength[0], 0)


def mixed_graph(
    attention_neighbors: np.ndarray,
    attention_weights: np.ndarray,
    key_neighbors: np.ndarray,
    *,
    lam: float,
    prune: float,
    first: int = 0,
) -> TokenGraph:
    """Attention edges and key edges in one graph, each set with the same total weight.

    Arguments as for ``attention_graph`` and ``key_graph``. The key edges are scaled (not where there are no attention
    edges); those of attention are pruned and keep their weights, so that edges of later tokens need no scale.
    """
    attention = attention_graph(attention_neighbors, attention_weights, lam=lam, prune=prune, first=first)
    keys = key_graph(key_neighbors, first=first)
    n = attention.num_nodes
    if keys.num_nodes != n:
        raise ValueError(f"the key lists must cover the {n} nodes of the attention lists, got {keys.num_nodes}")
    totals = float(attention.strength.sum()), float(keys.strength.sum())
    scale = totals[0] / totals[1] if min(totals) > 0.0 else 1.0
    indptr, indices, weights = _sum_of_graphs(
        attention.indptr, attention.indices, attention.weights, 1.0, keys.indptr, keys.indices, keys.weights, scale
    )
    return TokenGraph(indptr, indices, weights, _row_sums(indptr, weights), attention.dropped, scale)


def graph_of_joint_csr(
    indptr: np.ndarray,
    indices: np.ndarray,
    weights: np.ndarray,
    dropped: np.ndarray,
    key_scale: np.ndarray,
    graph: int,
    first: int,
) -> TokenGraph:
    """One of the graphs of a CSR with a row per graph and position, as views of its entries.

    indptr: int64 [G * n + 1]. indices: int32 [nnz], nodes of the same graph. weights: float32 [nnz]. dropped, key_scale:
    [G]. first: the first position that is a node.
    """
    n = (len(indptr) - 1) // max(1, len(dropped))
    rows = indptr[graph * n + min(first, n) : (graph + 1) * n + 1]
    entries = slice(rows[0], rows[-1])
    own = rows - rows[0], indices[entries], weights[entries]
    return TokenGraph(*own, _row_sums(own[0], own[2]), int(dropped[graph]), float(key_scale[graph]))


@njit(nogil=True, cache=True)
def _edges_of_later_lists(neighbors, weights, position, first, lam):
    """Eq. 2-4 for the lists of tokens ``position ...`` alone, as edges between nodes that may occur more than once.

    Returns low and high int64 [E], weight float64 [E] with low < high, and the number of unusable weights.
    """
    heads, count, kappa = neighbors.shape
    n = position + count - first
    room = heads * count * (kappa + kappa * (kappa - 1) // 2)
    low = np.empty(room, np.int64)
    high = np.empty(room, np.int64)
    weight = np.empty(room, np.float64)
    ids = np.empty(kappa, np.int64)
    alphas = np.empty(kappa, np.float64)
    used = 0
    dropped = 0
    for h in range(heads):
        for m in range(count):
            own = position + m - first
            if own < 0:
                continue
            filled = 0
            for slot in range(kappa):
                j = np.int64(neighbors[h, m, slot]) - first
                alpha = weights[h, m, slot]
                if j < 0 or j >= n:
                    continue
                if not (alpha >= 0.0 and alpha < np.inf):
                    dropped += 1
                    continue
                listed = alpha == 0.0
                for earlier in range(filled):
                    listed = listed or ids[earlier] == j  # a list is a set
                if not listed:
                    ids[filled] = j
                    alphas[filled] = alpha
                    filled += 1
            for x in range(filled):
                for y in range(-1, x):
                    other = own if y < 0 else ids[y]
                    value = 0.5 * lam * alphas[x] if y < 0 else (1.0 - lam) * (alphas[x] * alphas[y])
                    if other != ids[x] and value > 0.0:
                        low[used] = min(other, ids[x])
                        high[used] = max(other, ids[x])
                        weight[used] = value
                        used += 1
    return low[:used], high[:used], weight[:used], dropped


@njit(nogil=True, cache=True)
def _joined_edges(edge, weight, low, high, more, base_strength, n):
    """What an ``ExtendedGraph`` holds, from the edges that it had and others that may occur more than once."""
    ids = np.concatenate((edge, (low << 32) + high))
    values = np.concatenate((weight, more))
    order = np.argsort(ids, kind="mergesort")
    joint = np.empty(len(ids), np.int64)
    total = np.empty(len(ids), np.float64)
    used = 0
    for t in order:
        if used > 0 and joint[used - 1] == ids[t]:
            total[used - 1] += values[t]
        else:
            joint[used] = ids[t]
            total[used] = values[t]
            used += 1
    joint, total = joint[:used].copy(), total[:used].copy()
    indptr = np.zeros(n + 1, np.int64)
    for e in joint:
        indptr[(e >> 32) + 1] += 1
        indptr[(e & 0xFFFFFFFF) + 1] += 1
    for i in range(n):
        indptr[i + 1] += indptr[i]
    cursor = indptr[:n].copy()
    indices = np.empty(2 * used, np.int32)
    weights = np.empty(2 * used, np.float32)
    strength = np.zeros(n, np.float64)
    strength[: len(base_strength)] = base_strength
    for t in range(used):
        i, j = joint[t] >> 32, joint[t] & 0xFFFFFFFF
        value = np.float32(total[t])
        for here, there in ((i, j), (j, i)):
            indices[cursor[here]] = there
            weights[cursor[here]] = value
            cursor[here] += 1
            strength[here] += value
    return joint, total, indptr, indices, weights, strength


def extended_graph(
    graph: TokenGraph | ExtendedGraph,
    neighbors: np.ndarray,
    weights: np.ndarray,
    *,
    lam: float,
    first: int = 0,
    key_neighbors: np.ndarray | None = None,
) -> ExtendedGraph:
    """A graph and the edges of later tokens: what ``attention_graph`` or ``mixed_graph`` of all lists is, unpruned.

    graph: over positions ``first ..``. neighbors, weights: int32 and float32 [H, m, kappa], lists of the m tokens that
    follow it, as for ``attention_graph``. key_neighbors: int32 [m, kappa] for a mixed graph, whose scale stays.
    """
    neighbors = _lists("neighbors", neighbors, np.int32, 3)
    weights = _lists("weights", weights, np.float32, 3)
    position, count = first + graph.num_nodes, neighbors.shape[1]
    low, high, weight, dropped = _edges_of_later_lists(neighbors, weights, position, first, float(lam))
    if key_neighbors is not None:
        keys = _lists("key_neighbors", key_neighbors, np.int32, 2)[None]
        more = _edges_of_later_lists(keys, np.ones(keys.shape, np.float32), position, first, 1.0)
        low, high = np.concatenate([low, more[0]]), np.concatenate([high, more[1]])
        weight = np.concatenate([weight, more[2] * graph.key_scale])
    if isinstance(graph, ExtendedGraph):
        base, edge, earlier = graph.base, graph.edge, graph.weight
    else:
        base, edge, earlier = graph, low[:0], weight[:0]
    edge, weight, indptr, indices, values, strength = _joined_edges(
        edge, earlier, low, high, weight, base.strength, graph.num_nodes + count
    )
    return ExtendedGraph(base, edge, weight, indptr, indices, values, strength, graph.dropped + int(dropped))
