"""Token graphs from the edge lists of a layer, built on the device that holds the lists (CommunityKV, eq. 2-4).

``community.graph`` builds the same graphs on the host, one by one, and is what defines them. Here the graphs of a layer
are built a bounded number at a time: on CUDA row by row, by ``kernels.token_graph``, which never holds a term in memory;
elsewhere by sorting terms, which is also what the kernels must equal to the bit.

A list of kappa keys gives T = kappa + kappa * (kappa - 1) / 2 terms (i, j, weight) with i < j: direct attention (eq. 2)
and pairs of keys that one query attends to (eq. 3). The terms of an edge are added as integers, which are associative:
equal inputs give equal bits, however the terms are divided. The unit is such that the sum of the largest possible terms
of an edge fits: 2^-42 for probabilities, lam 0.5 and the lists of 4 heads and 131,072 tokens. A weight of 1e-8 then keeps
some five digits, and one below 1e-13 may vanish that the host would keep.

Cost. 131,072 tokens, kappa 8 and 32 heads in 8 groups are 151 million terms a layer. Sorting them took some 500 ms of an
H200, since 64-bit radix sorts reach a quarter of what their bytes cost. By rows each term is made at both ends, in
registers: of a mean row, 36 lists and 288 terms that a warp sorts among 512, in some 6,000 instructions by the compiled
code, 6.3 billion a layer or 7-14 ms; lists, places and edges are 5 GB of memory traffic, another 3-6 ms. These are
estimates (bench.device_graph).

Lists are not merged. One list per position, of the strongest sums over a group's heads, would save terms before pairs are
formed, but on SmolLM2-135M (3 heads a group, 8 layers, 4,096 tokens of a prompt and 256 behind it, budget
1/16) attention-mass recall in prose / Python was .644 / .688 with every head's list, .628 / .678 with the 8 strongest,
.640 / .693 with 12 and .642 / .696 with 16: 8 lose 0.9-1.6 points, and 12 or more make 78 terms or more of the 144 of
four heads.

Memory of the torch form: BYTES_PER_TERM * (t + 2 * max(t, E)) bytes at most, of which the second part is needed only where
a graph has more than t terms. t: ``terms_at_once``, or the terms of one position of one graph where that is more. E: edges
of a graph before they are pruned. Of the kernels: BYTES_PER_TERM * t, or what one graph takes where that is more (350 MB
for 4 heads of 131,072 tokens, ``token_graph.bytes_per_graph``), and HUB_BYTES. Lists and results come on top.
"""

from __future__ import annotations

import atexit
import bisect
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ckv_compile.community.graph import TokenGraph, graph_of_joint_csr
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import in_blocks
from ckv_compile.runtime import outbox
from ckv_compile.runtime.outbox import Parcel

log = logging.getLogger(__name__)
TERMS_AT_ONCE = 1 << 23
BYTES_PER_TERM = 80  # with what a radix sort takes


class ArrivingGraphs:
    """The graphs of all rows of a layer, built on the device and on their way to the host."""

    def __init__(self, parcel: Parcel, first: list[int], graphs: int) -> None:
        self._parcel, self._first, self._graphs = parcel, first, graphs

    @classmethod
    def send(
        cls, neighbor: Tensor, weight: Tensor, key_neighbor: Tensor | None, first: list[int], graphs: int,
        config: CommunityConfig,
    ) -> ArrivingGraphs:  # fmt: skip
        """Have the graphs built beside what the current stream goes on with. The caller sends the lists themselves next."""

        def make() -> Iterator[tuple[Tensor, ...]]:
            built = build_graphs(
                neighbor, weight, first, graphs=graphs, lam=config.lam, prune=config.prune, key_neighbor=key_neighbor
            )
            return (some.tensors() for some in built)

        lists = [neighbor, weight] if key_neighbor is None else [neighbor, weight, key_neighbor]
        return cls(outbox.outbox_of(neighbor.device).send(lists, make, sent_again=True), first, graphs)

    def wait(self) -> None:
        self._parcel.wait()

    def of(self, graph: int) -> list[TokenGraph] | None:
        """One of the layer's graphs, ``[row]``; None where the device had no memory to build them in. Waits."""
        try:
            groups = self._parcel.arrays()
        except torch.OutOfMemoryError:
            log.warning("no memory on the device to build token graphs in; the host builds them")
            return None
        begins = list(itertools.accumulate((len(group[3]) for group in groups), initial=0))
        found = []
        for row, first in enumerate(self._first):
            place = row * self._graphs + graph
            number = bisect.bisect_right(begins, place) - 1
            indptr, indices, weights, dropped, key_scale = groups[number]
            own = place - begins[number], first
            found.append(graph_of_joint_csr(indptr, indices, weights, dropped, key_scale, *own))
        return found


def terms_of(kappa: int) -> int:
    """Terms of one list."""
    return kappa + kappa * (kappa - 1) // 2


@dataclasses.dataclass(frozen=True)
class JointGraphs:
    """Some graphs of a layer over n positions each, in one symmetric CSR without self-loops.

    indptr: int64 [G * n + 1], a row per graph and position; positions that are not nodes have no entry. indices: int32
    [nnz], nodes of the same graph, counted from its first, ascending in a row. weights: float32 [nnz], bit-equal in both
    directions. dropped: int64 [G], unusable entries. key_scale: float64 [G], see ``community.graph.TokenGraph``.
    """

    indptr: Tensor
    indices: Tensor
    weights: Tensor
    dropped: Tensor
    key_scale: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.indptr, self.indices, self.weights, self.dropped, self.key_scale


def prepare(geometry: Any, config: CommunityConfig) -> None:
    """A prefill of that geometry is about to be compiled: have what it needs compiled, too, if it builds token graphs."""
    if not in_blocks(config):
        graphs = geometry.num_graphs(config.graph_aggregation)
        warm_up(geometry.device, geometry.num_query_heads // graphs, config.kappa)


@functools.cache
def warm_up(device: torch.device, lists: int, kappa: int) -> threading.Thread | None:
    """Have the kernels compiled in the background: while the model is, so that no prefill waits for them.

    lists: that share a graph. None where there are no kernels to compile. The process waits at its end for the kernel
    that is being compiled, and for no other.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    ending = threading.Event()

    def compile_kernels() -> None:
        try:
            from ckv_compile.kernels import token_graph

            if not token_graph.applies(1, lists, kappa):
                return
            with torch.cuda.device(device):
                for compile_one in token_graph.warm_ups(lists, kappa):
                    if ending.is_set():
                        return
                    compile_one()
        except Exception:  # the first graph meets it then
            log.warning("the kernels of token graphs were not compiled ahead", exc_info=True)

    thread = threading.Thread(target=compile_kernels, name="ckv-warm-up", daemon=True)
    thread.start()
    atexit.register(thread.join)
    atexit.register(ending.set)  # the last that is registered is called first
    return thread


def build_graphs(
    neighbor: Tensor,
    weight: Tensor,
    first: list[int],
    *,
    graphs: int,
    lam: float,
    prune: float,
    key_neighbor: Tensor | None = None,
    terms_at_once: int = TERMS_AT_ONCE,
    kernels: bool | None = None,
) -> Iterator[JointGraphs]:
    """The graphs of a layer, by rows and then by graphs, some at a time: ``attention_graph`` or ``mixed_graph`` of each.

    neighbor, weight: int32 and float32 [B, H, n, kappa], lists of all positions with their probabilities (others lose
    their small terms to the largest, see above); H / graphs heads share a graph. first: [B], the first position of a row
    that is a node. key_neighbor: int32 [B, graphs, n, k], positions, for mixed graphs. kernels: whether
    ``kernels.token_graph`` does it; None: on CUDA, where it can.
    Waits for the device, to learn how many edges there are: not for a thread that launches steps.
    """
    batch, heads, n, kappa = neighbor.shape
    heads //= graphs
    neighbor = neighbor.reshape(batch * graphs, heads, n, kappa)
    weight = weight.reshape(neighbor.shape)
    nodes = torch.tensor(first, device=neighbor.device).clamp_(0, n).repeat_interleave(graphs)
    if key_neighbor is not None:
        key_neighbor = key_neighbor.reshape(batch * graphs, 1, n, key_neighbor.shape[3])
    if neighbor.is_cuda if kernels is None else kernels:
        from ckv_compile.kernels import token_graph

        kernels = token_graph.applies(n, heads, kappa)
    if kernels:
        most = BYTES_PER_TERM * terms_at_once // token_graph.bytes_per_graph(n, heads, kappa)
    else:
        most = terms_at_once // max(1, heads * n * terms_of(kappa))
    parts = -(-batch * graphs // max(1, most))
    together = max(1, -(-batch * graphs // max(1, parts)))
    for begin in range(0, batch * graphs, together):
        some = slice(begin, begin + together)
        given = neighbor[some], weight[some], nodes[some]
        if kernels:
            joint = _joint_by_kernels(*given, lam, prune)
            if key_neighbor is None:
                yield joint
                continue
            edges = _Edges.of_joint(joint, nodes[some])
        else:
            edges = _Edges.of_attention(*given, lam, terms_at_once).pruned(prune)
        if key_neighbor is not None:
            edges = edges.mixed(_Edges.of_keys(key_neighbor[some], nodes[some], terms_at_once))
        yield edges.csr()


def _joint_by_kernels(neighbor: Tensor, weight: Tensor, first: Tensor, lam: float, prune: float) -> JointGraphs:
    from ckv_compile.kernels import token_graph

    scale = _scale(neighbor, weight, lam)
    lists = token_graph.cleaned(neighbor, weight, first)
    numbers = torch.stack([0.5 * lam * scale, (1.0 - lam) * scale, scale, torch.full_like(scale, prune)], 1)
    indptr, indices, weights, dropped = token_graph.joint_csr(lists, first, numbers)
    return JointGraphs(indptr, indices, weights, dropped, torch.ones_like(scale))


@dataclasses.dataclass(frozen=True)
class _Edges:
    """Every edge of G graphs over n positions once, in order of graph, low and high end.

    key: int64 [E], (graph * n + low) * n + high, ascending. weight: float32 [E], positive and finite. first: int64 [G].
    """

    n: int
    first: Tensor
    key: Tensor
    weight: Tensor
    dropped: Tensor
    key_scale: Tensor

    @classmethod
    def of_attention(cls, neighbor: Tensor, weight: Tensor, first: Tensor, lam: float, terms_at_once: int) -> _Edges:
        """Eq. 2-4 summed over heads. neighbor, weight: [G, H, n, kappa]."""
        graphs, heads, n, kappa = neighbor.shape
        dropped = torch.zeros_like(first)
        scale = _scale(neighbor, weight, lam)
        half, rest = (part * scale.view(-1, 1, 1, 1) for part in (0.5 * lam, 1.0 - lam))

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for begin, end in _ranges(n, graphs * heads * terms_of(kappa), terms_at_once):
                lists = neighbor[:, :, begin:end], weight[:, :, begin:end]
                ids, kept, bad = _clean_lists(*lists, first, begin, n)
                dropped.add_(bad)
                alpha = lists[1].masked_fill(~kept, 0).double()
                yield _terms(ids, alpha, begin, n, half, rest, direct=lam > 0, pairs=lam < 1)

        key, total = _accumulated(blocks(), first, terms_at_once)
        graph_of = key // max(1, n * n)
        sums = (total.double() / scale[graph_of]).float()
        dropped.add_(torch.bincount(graph_of[sums == torch.inf], minlength=graphs))
        fine = (sums > 0) & (sums < torch.inf)
        return cls(n, first, key[fine], sums[fine], dropped, torch.ones_like(scale))

    @classmethod
    def of_keys(cls, neighbor: Tensor, first: Tensor, terms_at_once: int) -> _Edges:
        """Edges of nearest keys, 1/2 for each direction in which they are listed. neighbor: [G, 1, n, kappa]."""
        graphs, _, n, kappa = neighbor.shape
        one = torch.ones(1, dtype=torch.float64, device=first.device)

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for begin, end in _ranges(n, graphs * kappa, terms_at_once):
                ids, kept, _ = _clean_lists(neighbor[:, :, begin:end], None, first, begin, n)
                yield _terms(ids, kept.double(), begin, n, one, one, direct=True, pairs=False)

        key, count = _accumulated(blocks(), first, terms_at_once)
        none = torch.zeros_like(first)
        return cls(n, first, key, 0.5 * count.float(), none, none.double())

    @classmethod
    def of_joint(cls, joint: JointGraphs, first: Tensor) -> _Edges:
        """The edges of graphs that are there already."""
        rows = len(joint.indptr) - 1
        n = rows // len(first)
        row = torch.arange(rows, device=first.device)
        row = row.repeat_interleave(joint.indptr.diff(), output_size=len(joint.indices))
        graph = row // n
        other = joint.indices + first[graph]
        upper = other > row - graph * n
        key = (row * n + other)[upper]
        return cls(n, first, key, joint.weights[upper], joint.dropped, joint.key_scale)

    @property
    def rows(self) -> int:
        return len(self.first) * self.n

    def ends(self) -> tuple[Tensor, Tensor]:
        """Row ``graph * n + position`` of each edge's lower end, ascending, and of its higher one. int64 [E]."""
        n = max(1, self.n)
        low = self.key // n
        return low, self.key - low * n + low // n * n

    def pruned(self, prune: float) -> _Edges:
        """Without edges below ``prune`` times the smaller of their ends' strongest edges."""
        if prune <= 0:
            return self
        low, high = self.ends()
        ordered, order = torch.sort(high.int(), stable=True)
        strongest = torch.maximum(
            _segment_max(self.weight, low, self.rows), _segment_max(self.weight[order], ordered, self.rows)
        )
        weaker_end = torch.minimum(strongest[low], strongest[high]).double()
        strong = self.weight.double() >= prune * weaker_end
        return dataclasses.replace(self, key=self.key[strong], weight=self.weight[strong])

    def mixed(self, keys: _Edges) -> _Edges:
        """With key edges, scaled to the same total weight where neither set is empty."""
        own, other = self._totals(), keys._totals()
        scale = torch.where(torch.minimum(own, other) > 0, own / other, 1.0)
        scaled = (scale[keys.key // max(1, self.n * self.n)] * keys.weight.double()).float()
        key, order = torch.sort(torch.cat([self.key, keys.key]), stable=True)  # attention before keys
        weight = torch.cat([self.weight, scaled])[order]
        again = key[1:] == key[:-1]  # at most once, as either set has an edge once
        weight[:-1] += torch.where(again, weight[1:], 0)
        begins = torch.ones_like(key, dtype=torch.bool)
        begins[1:] = ~again
        return dataclasses.replace(self, key=key[begins], weight=weight[begins], key_scale=scale)

    def csr(self) -> JointGraphs:
        low, high = self.ends()
        ordered, order = torch.sort(high.int(), stable=True)
        grid = torch.arange(self.rows + 1, device=low.device)
        start_low, start_high = torch.searchsorted(low, grid), torch.searchsorted(ordered, grid.int())
        indptr = start_low + start_high
        indices = torch.empty(2 * len(low), dtype=torch.int32, device=low.device)
        weights = torch.empty(2 * len(low), dtype=torch.float32, device=low.device)
        node_0 = (torch.arange(len(self.first), device=low.device) * self.n + self.first)[low // max(1, self.n)]
        edge = torch.arange(len(low), device=low.device)
        # A row's lower neighbours come first; edges are in order of the lower end already.
        place = indptr[ordered] - start_high[ordered] + edge
        indices[place] = (low - node_0)[order].int()
        weights[place] = self.weight[order]
        place = indptr[low] + start_high.diff()[low] - start_low[low] + edge
        indices[place] = (high - node_0).int()
        weights[place] = self.weight
        return JointGraphs(indptr, indices, weights, self.dropped, self.key_scale)

    def _totals(self) -> Tensor:
        """Twice the weight of each graph, float64 [G], added in a fixed order."""
        bounds = torch.arange(len(self.first) + 1, device=self.key.device) * (self.n * self.n)
        ends = torch.searchsorted(self.key, bounds).tolist()
        return 2 * torch.stack([self.weight[begin:end].double().sum() for begin, end in itertools.pairwise(ends)])


def _scale(neighbor: Tensor, weight: Tensor, lam: float) -> Tensor:
    """Units that a weight of 1 has, a power of 2, float64 [G]; of lists [G, H, n, kappa]."""
    heads, n = neighbor.shape[1:3]
    largest = weight.masked_fill((neighbor < 0) | ~_usable(weight), 0).flatten(1)
    largest = (largest.amax(1) if largest.shape[1] else largest.sum(1)).double()
    largest = torch.maximum(0.5 * lam * largest, (1.0 - lam) * largest.square())
    # The list of i gives edge ij at most a direct term and one for the pair: sums stay below 2^62.
    room = 62 - (2 * heads * n).bit_length()
    return torch.exp2((room - torch.frexp(largest).exponent).double())


def _ranges(n: int, terms_per_position: int, terms_at_once: int) -> Iterator[tuple[int, int]]:
    step = max(1, terms_at_once // max(1, terms_per_position))
    return ((begin, min(begin + step, n)) for begin in range(0, n, step))


def _usable(weight: Tensor) -> Tensor:
    return (weight >= 0) & (weight < torch.inf)


def _clean_lists(
    neighbor: Tensor, weight: Tensor | None, first: Tensor, begin: int, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which entries count: those of nodes that list a node, of equal ones the first with a usable weight above 0.

    neighbor, weight: [G, H, q, kappa], of positions ``begin ...`` of n. Returns positions int32, 0 where they do not
    count, a mask of those that do, and the number of unusable weights, int64 [G].
    """
    node = first.view(-1, 1, 1, 1)
    query = torch.arange(begin, begin + neighbor.shape[2], device=neighbor.device).view(-1, 1)
    kept = (neighbor >= node) & (neighbor < n) & (query >= node)
    dropped = torch.zeros_like(first)
    if weight is not None:
        usable = _usable(weight)
        dropped = (kept & ~usable).flatten(1).sum(1)
        kept &= usable & (weight > 0)
    ids = neighbor.masked_fill(~kept, -1)
    for slot in range(1, ids.shape[3]):
        kept[..., slot] &= (ids[..., :slot] != ids[..., slot : slot + 1]).all(-1)
    return ids.masked_fill_(~kept, 0), kept, dropped


def _terms(
    ids: Tensor, alpha: Tensor, begin: int, n: int, half: Tensor, rest: Tensor, *, direct: bool, pairs: bool
) -> tuple[Tensor, Tensor]:
    """Terms of cleaned lists: direct ones of weight half * alpha, pairs of weight rest * alpha * alpha.

    ids: int32 [G, H, q, kappa]. alpha: float64, 0 where an entry does not count. Returns edges and integer weights,
    int64 [G * H * q * T]; a term of weight 0 may stand at any edge.
    """
    graphs, heads, queries, kappa = ids.shape
    first, second = torch.triu_indices(kappa, kappa, 1, device=ids.device)
    split = kappa if direct else 0
    shape = (graphs, heads, queries, split + (len(first) if pairs else 0))
    key = torch.empty(shape, dtype=torch.int64, device=ids.device)
    value = torch.empty(shape, dtype=torch.int64, device=ids.device)
    if direct:
        query = torch.arange(begin, begin + queries, dtype=torch.int32, device=ids.device).view(-1, 1)
        key[..., :split] = torch.minimum(ids, query)
        key[..., :split].mul_(n).add_(torch.maximum(ids, query))
        value[..., :split] = (half * alpha).masked_fill_(ids == query, 0).round_()
    if pairs:
        one, other = ids.index_select(3, first), ids.index_select(3, second)
        key[..., split:] = torch.minimum(one, other)
        key[..., split:].mul_(n).add_(torch.maximum(one, other))
        del one, other
        value[..., split:] = alpha.index_select(3, first).mul_(alpha.index_select(3, second)).mul_(rest).round_()
    key += (torch.arange(graphs, device=ids.device) * (n * n)).view(-1, 1, 1, 1)
    return key.view(-1), value.view(-1)


def _accumulated(blocks: Iterable[tuple[Tensor, Tensor]], like: Tensor, terms_at_once: int) -> tuple[Tensor, Tensor]:
    """Edges in ascending order, each once, with the sum of its terms; edges whose sum is 0 are left out."""
    merged = like.new_empty(0), like.new_empty(0)
    parts: list[tuple[Tensor, Tensor]] = []
    waiting = 0
    for key, value in blocks:
        parts.append(_summed(key, value))
        del key, value
        waiting += len(parts[-1][0])
        if waiting > max(terms_at_once, len(merged[0])):
            merged = _summed(*_joined([merged, *parts]))
            parts, waiting = [], 0
    return _summed(*_joined([merged, *parts])) if parts else merged


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([key for key, _ in parts]), torch.cat([value for _, value in parts])


def _summed(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    key, order = torch.sort(key)
    total = value[order].cumsum_(0)  # may wrap around; the differences below do not
    del order
    last = torch.ones_like(key, dtype=torch.bool)
    torch.ne(key[1:], key[:-1], out=last[:-1])
    key, total = key[last], total[last]
    total[1:] -= total[:-1].clone()
    there = total > 0
    return key[there], total[there]


def _segment_max(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Largest of the positive values of each row, 0 where it has none. rows: ascending, [E]."""
    lengths = torch.searchsorted(rows, torch.arange(count + 1, device=rows.device, dtype=rows.dtype)).diff()
    return torch.segment_reduce(values, "max", lengths=lengths, initial=0, unsafe=True)
