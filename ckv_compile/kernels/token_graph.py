"""Token graphs of a layer on CUDA, row by row: no term is written to memory, and nothing is sorted outside of a program.

``runtime.device_graph`` says what the graphs are and has the same in torch; equal inputs give the same bits there. A node
gathers what the host gathers (``community.graph``): its own lists, and every list that holds it. The places where a node is
listed are brought together by a counting sort (``place_entries``), whose order within a node depends on atomics and does
not matter, since weights are integers. A program then holds all terms of a few rows, sorts them by their other end and adds
equal ones. Both ends of an edge add the same integers, so that the result is symmetric to the bit.

A node that many lists hold (a hub) has more terms than a program: its row is added up in dense memory by integer atomics,
as many hubs at a time as ``HUB_BYTES`` take.

Legend: M slots of a list, a power of two, -1 where there is no entry; L lists of a position; G graphs; n positions;
row = graph * n + position; entry = (list * n + position) * M + slot, counted within a graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckv_compile.lowering.template_call import next_power_of_2

ROW_TERMS = (128, 256, 512, 1024)  # terms that a program has room for per row, padding included
HUB_BYTES = 256 << 20
HUB_PARTS = 64  # programs that share a hub's places
PLACES: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4}
GATHERED_HUBS: dict[str, Any] = {"BLOCK": 2048, "num_warps": 8}
PRUNED_ROWS: dict[str, Any] = {"R": 8, "BLOCK": 64, "num_warps": 4}
PRUNED_HUBS: dict[str, Any] = {"R": 1, "BLOCK": 2048, "num_warps": 8}
MOST_SLOTS = 32
# A product and the sum that rounds it must stay two operations, as they are in torch.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of G graphs whose entries all count.

    ids, alpha: int32 and float32 [G, L, n, M], -1 and 0 where there is no entry; no position twice in a list. listed:
    int32 [G * n], how many lists hold a position. dropped: int64 [G], entries with an unusable weight.
    """

    ids: Tensor
    alpha: Tensor
    listed: Tensor
    dropped: Tensor


def applies(n: int, lists: int, kappa: int) -> bool:
    """Whether the kernels do it: entries and rows of a graph are counted in 32 bits, and lists fit a program."""
    slots = next_power_of_2(max(1, kappa))
    return 0 < kappa <= MOST_SLOTS and n > 0 and lists * n * slots < 1 << 31


def bytes_per_graph(n: int, lists: int, kappa: int) -> int:
    """Most memory that a graph takes while it is built, without hubs and the result: 19 bytes per term of 8 entries.

    Lists and places take 12 bytes per entry, rows some 64 each. A node that c lists hold, and its own lists, have
    M * (c + L) terms, each edge's from both ends, of which the row may keep all: 8 bytes each.
    """
    slots = next_power_of_2(max(1, kappa))
    entries = n * lists * slots
    return 12 * entries + 64 * n + 8 * slots * (entries + n * lists)


# ---------------------------------------------------------------------- lists


# Any number of positions and rows is one variant, and so is any alignment of rows, which are parts of one array.
FREE: dict[str, Any] = {"do_not_specialize": ["rows", "n", "entries"], "do_not_specialize_on_alignment": ["ROW"]}


@triton.jit(**FREE)
def clean_lists(
    NEIGHBOR, WEIGHT, FIRST, IDS, ALPHA, LISTED, DROPPED, n,
    LISTS: tl.constexpr, KAPPA: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per BLOCK positions, list and graph. Of equal entries the first usable one counts."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    graph = tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, M)
    first = tl.load(FIRST + graph)
    list_row = (graph * LISTS + tl.program_id(1)) * n + position
    inside = (position < n)[:, None] & (slot < KAPPA)[None, :]
    id = tl.load(NEIGHBOR + list_row[:, None] * KAPPA + slot[None, :], mask=inside, other=-1)
    weight = tl.load(WEIGHT + list_row[:, None] * KAPPA + slot[None, :], mask=inside, other=0.0)
    node = (id >= first) & (id < n) & (position >= first)[:, None] & inside
    usable = (weight >= 0) & (weight < float("inf"))
    bad = tl.sum(tl.sum((node & ~usable).to(tl.int64), 1), 0)
    tl.atomic_add(DROPPED + graph, bad, mask=bad > 0, sem="relaxed")
    kept = node & usable & (weight > 0)
    id = tl.where(kept, id, -1)
    earlier = (id[:, :, None] == id[:, None, :]) & (slot[None, None, :] < slot[None, :, None])
    kept = kept & (tl.sum(earlier.to(tl.int32), 2) == 0)
    place = list_row[:, None] * M + slot[None, :]
    tl.store(IDS + place, tl.where(kept, id, -1), mask=(position < n)[:, None])
    tl.store(ALPHA + place, tl.where(kept, weight, 0.0), mask=(position < n)[:, None])
    tl.atomic_add(LISTED + graph * n + id, 1, mask=kept, sem="relaxed")


@triton.jit(**FREE)
def place_entries(IDS, CURSOR, PLACED, entries, n, BLOCK: tl.constexpr):
    """A program per BLOCK entries and graph: each entry goes to the next free place of the node that it names."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    graph = tl.program_id(1).to(tl.int64)
    id = tl.load(IDS + graph * entries + entry, mask=entry < entries, other=-1)
    place = tl.atomic_add(CURSOR + graph * n + id, 1, mask=id >= 0, sem="relaxed")
    tl.store(PLACED + place.to(tl.int64), entry.to(tl.int32), mask=id >= 0)


# ---------------------------------------------------------------------- rows


@triton.jit
def rounded(x):
    """To the nearest integer, ties to even; x: float64, not negative."""
    return tl.where(x < 4503599627370496.0, (x + 4503599627370496.0) - 4503599627370496.0, x).to(tl.int64)


@triton.jit
def terms_of_places(
    IDS, ALPHA, PLACED, NUMBERS, graph, position, begin, end, c, n, inside, LISTS: tl.constexpr, M: tl.constexpr
):
    """(other end int32 or -1, weight int64) [R, C, M]: the terms of places c [R, C] of rows, own lists behind the others.

    A list that holds the node at a slot gives the pairs with its other entries, and at that slot the direct term to the
    list's own position; the node's own lists give direct terms to their entries.
    """
    at = begin[:, None] + c
    listed = (at < end[:, None]) & inside[:, None]
    own = at - end[:, None]
    is_own = (own >= 0) & (own < LISTS) & inside[:, None]
    entry = tl.load(PLACED + at, mask=listed, other=0).to(tl.int64)
    entry = tl.where(is_own, (own * n + position[:, None]) * M, entry)
    row_of_lists = entry // M
    slot = tl.where(is_own, -1, entry - row_of_lists * M)
    base = graph[:, None] * LISTS * n * M
    there = (listed | is_own)[:, :, None]
    y = tl.arange(0, M)[None, None, :]
    offset = (base + row_of_lists * M)[:, :, None] + y
    other = tl.load(IDS + offset, mask=there, other=-1)
    alpha = tl.load(ALPHA + offset, mask=there, other=0.0).to(tl.float64)
    mine = tl.load(ALPHA + base + entry, mask=listed, other=0.0).to(tl.float64)[:, :, None]
    half = tl.load(NUMBERS + graph * 4, mask=inside, other=0.0)[:, None, None]
    rest = tl.load(NUMBERS + graph * 4 + 1, mask=inside, other=0.0)[:, None, None]
    at_slot = y == slot[:, :, None]
    query = (row_of_lists % n).to(tl.int32)[:, :, None]
    other = tl.where(at_slot, query, other)
    value = rounded(tl.where(at_slot | is_own[:, :, None], half * alpha, mine * alpha * rest))
    valid = there & (other >= 0) & (other != position[:, None, None]) & (value > 0)
    return tl.where(valid, other, -1), tl.where(valid, value, 0)


@triton.jit
def add_equal(key, total, other_key, other_total):
    return other_key, tl.where(key == other_key, total + other_total, other_total)


@triton.jit(**FREE)
def sum_rows(
    ROW, IDS, ALPHA, PLACED, START, NUMBERS, OTHER, WEIGHT, LENGTH, STRONGEST, DROPPED, rows, n,
    LISTS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program per R rows of at most C places, 2^BITS = C * M terms: their edges, ascending, with weights.

    OTHER, WEIGHT: the edges of row r from M * (START[r] + LISTS * r) on, LENGTH[r] of them. WIDE: sort by 64 bits.
    """
    place = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = place < rows
    row = tl.load(ROW + place, mask=inside, other=0)
    graph = row // n
    position = (row - graph * n).to(tl.int32)
    begin = tl.load(START + row, mask=inside, other=0)
    end = tl.load(START + row + 1, mask=inside, other=0)
    c = tl.arange(0, C)[None, :]
    other, value = terms_of_places(
        IDS, ALPHA, PLACED, NUMBERS, graph, position, begin, end, c, n, inside, LISTS, M
    )  # fmt: skip
    other, value = tl.reshape(other, [R, C * M]), tl.reshape(value, [R, C * M])
    index = tl.arange(0, C * M)[None, :]
    number = tl.where(other < 0, n, other)
    if WIDE:
        number = number.to(tl.int64)
    ordered = tl.sort((number << BITS) | index, dim=1)
    id = (ordered >> BITS).to(tl.int32)
    value = tl.gather(value, (ordered & (C * M - 1)).to(tl.int32), 1)
    following = tl.gather(id, tl.minimum(index + 1, C * M - 1) + tl.zeros([R, C * M], tl.int32), 1)
    _, total = tl.associative_scan((id, value), 1, add_equal)
    last = (id < n) & ((id != following) | (index == C * M - 1))
    scale = tl.load(NUMBERS + graph * 4 + 2, mask=inside, other=1.0)
    weight = (total.to(tl.float64) / scale[:, None]).to(tl.float32)
    fine = last & (weight > 0) & (weight < float("inf"))
    over = tl.sum((last & (weight == float("inf")) & (id > position[:, None])).to(tl.int64), 1)
    tl.atomic_add(DROPPED + graph, over, mask=inside & (over > 0), sem="relaxed")
    out = (M * (begin + LISTS * row))[:, None] + tl.cumsum(fine.to(tl.int32), 1) - 1
    tl.store(OTHER + out, id, mask=fine)
    tl.store(WEIGHT + out, weight, mask=fine)
    tl.store(LENGTH + row, tl.sum(fine.to(tl.int32), 1), mask=inside)
    tl.store(STRONGEST + row, tl.max(tl.where(fine, weight, 0.0), 1), mask=inside)


@triton.jit(**FREE)
def add_hubs(
    ROW, IDS, ALPHA, PLACED, START, NUMBERS, DENSE, n, PARTS: tl.constexpr, LISTS: tl.constexpr, M: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """PARTS programs per hub, each of which takes every PARTS-th block of C places. DENSE: int64 [hubs, n], zeros."""
    hub = tl.program_id(0).to(tl.int64)
    row = tl.load(ROW + hub + tl.arange(0, 1))
    graph = row // n
    position = (row - graph * n).to(tl.int32)
    begin, end = tl.load(START + row), tl.load(START + row + 1)
    inside = row >= 0
    for c in range(tl.program_id(1) * C, tl.max(end - begin, 0).to(tl.int32) + LISTS, PARTS * C):
        other, value = terms_of_places(
            IDS, ALPHA, PLACED, NUMBERS, graph, position, begin, end, c + tl.arange(0, C)[None, :], n, inside, LISTS, M
        )  # fmt: skip
        tl.atomic_add(DENSE + hub * n + other, value, mask=value > 0, sem="relaxed")


@triton.jit(**FREE)
def gather_hubs(
    ROW, START, NUMBERS, DENSE, OTHER, WEIGHT, LENGTH, STRONGEST, DROPPED, n, LISTS: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per hub: what ``sum_rows`` writes, of its dense row."""
    hub = tl.program_id(0).to(tl.int64)
    row = tl.load(ROW + hub)
    graph = row // n
    scale = tl.load(NUMBERS + graph * 4 + 2)
    out = M * (tl.load(START + row) + LISTS * row)
    length = tl.zeros([1], tl.int32)
    strongest = tl.zeros([1], tl.float32)
    over = tl.zeros([1], tl.int64)
    for low in range(0, n, BLOCK):
        id = low + tl.arange(0, BLOCK)
        total = tl.load(DENSE + hub * n + id, mask=id < n, other=0)
        weight = (total.to(tl.float64) / scale).to(tl.float32)
        fine = (weight > 0) & (weight < float("inf"))
        place = out + length + tl.cumsum(fine.to(tl.int32), 0) - 1
        tl.store(OTHER + place, id, mask=fine)
        tl.store(WEIGHT + place, weight, mask=fine)
        length += tl.sum(fine.to(tl.int32), 0)
        strongest = tl.maximum(strongest, tl.max(tl.where(fine, weight, 0.0), 0))
        over += tl.sum(((weight == float("inf")) & (id > row - graph * n)).to(tl.int64), 0)
    one = tl.arange(0, 1)
    tl.store(LENGTH + row + one, length)
    tl.store(STRONGEST + row + one, strongest)
    tl.atomic_add(DROPPED + graph + one, over, mask=over > 0, sem="relaxed")


@triton.jit(**FREE)
def prune_rows(
    ROW, START, NUMBERS, FIRST, OTHER, WEIGHT, LENGTH, STRONGEST, INDPTR, INDICES, WEIGHTS, rows, n,
    LISTS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """A program per R rows: how many edges of each stay, to INDPTR[row + 1]; with WRITES the edges, behind INDPTR[row]."""
    place = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = place < rows
    row = tl.load(ROW + place, mask=inside, other=0)
    graph = row // n
    prune = tl.load(NUMBERS + graph * 4 + 3, mask=inside, other=0.0)[:, None]
    length = tl.load(LENGTH + row, mask=inside, other=0)
    own = tl.load(STRONGEST + row, mask=inside, other=0.0)[:, None]
    begin = M * (tl.load(START + row, mask=inside, other=0) + LISTS * row)
    kept = tl.zeros([R], tl.int64)
    if WRITES:
        kept = tl.load(INDPTR + row, mask=inside, other=0)
        node_0 = tl.load(FIRST + graph, mask=inside, other=0)[:, None]
    for low in range(0, tl.max(length, 0), BLOCK):
        edge = low + tl.arange(0, BLOCK)[None, :]
        there = edge < length[:, None]
        other = tl.load(OTHER + begin[:, None] + edge, mask=there, other=0)
        weight = tl.load(WEIGHT + begin[:, None] + edge, mask=there, other=0.0)
        theirs = tl.load(STRONGEST + (graph * n)[:, None] + other, mask=there, other=0.0)
        stays = there & (weight.to(tl.float64) >= prune * tl.minimum(own, theirs).to(tl.float64))
        if WRITES:
            out = kept[:, None] + tl.cumsum(stays.to(tl.int32), 1) - 1
            tl.store(INDICES + out, (other - node_0).to(tl.int32), mask=stays)
            tl.store(WEIGHTS + out, weight, mask=stays)
        kept += tl.sum(stays.to(tl.int32), 1)
    if not WRITES:
        tl.store(INDPTR + row + 1, kept, mask=inside)


# ---------------------------------------------------------------------- launches

# Of the kernels' arguments, by name.
DTYPES = {
    "NEIGHBOR": torch.int32, "WEIGHT": torch.float32, "FIRST": torch.int64, "IDS": torch.int32, "ALPHA": torch.float32,
    "LISTED": torch.int32, "DROPPED": torch.int64, "CURSOR": torch.int32, "PLACED": torch.int32, "ROW": torch.int64,
    "START": torch.int64, "NUMBERS": torch.float64, "OTHER": torch.int32, "LENGTH": torch.int32,
    "STRONGEST": torch.float32, "DENSE": torch.int64, "INDPTR": torch.int64, "INDICES": torch.int32,
    "WEIGHTS": torch.float32,
}  # fmt: skip


def variants(lists: int, kappa: int, n: int = 131_072) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every kernel with the constants that graphs of so many lists of kappa entries, and of n positions, need."""
    cleaning = list_constants(lists, kappa)
    shape = {"LISTS": lists, "M": cleaning["M"]}
    yield clean_lists, cleaning
    yield place_entries, PLACES
    for terms in ROW_TERMS:
        yield sum_rows, row_constants(n, lists, cleaning["M"], terms)
    yield add_hubs, hub_constants(lists, cleaning["M"])
    yield gather_hubs, {**shape, **GATHERED_HUBS}
    for constants in (PRUNED_ROWS, PRUNED_HUBS):
        for writes in (False, True):
            yield prune_rows, {**shape, **constants, "WRITES": writes}


def warm_ups(lists: int, kappa: int) -> Iterator[Callable[[], object]]:
    """What compiles each for the current device, or loads it from triton's cache: half a minute the first time ever."""
    for kernel, constants in variants(lists, kappa):
        given = [DTYPES.get(name, 1) for name in kernel.arg_names if name not in constants]
        yield functools.partial(kernel.warmup, *given, grid=(1,), **constants)


def cleaned(neighbor: Tensor, weight: Tensor, first: Tensor) -> Lists:
    """The lists ``[G, L, n, kappa]`` themselves; first: int64 [G]."""
    graphs, lists, n, kappa = neighbor.shape
    constants = list_constants(lists, kappa)
    found = _empty_lists(neighbor, lists, constants["M"])
    clean_lists[-(-n // constants["BLOCK"]), lists, graphs](
        neighbor.contiguous(), weight.contiguous(), first, found.ids, found.alpha, found.listed, found.dropped, n,
        **constants,
    )  # fmt: skip
    return found


def list_constants(lists: int, kappa: int) -> dict[str, Any]:
    slots = next_power_of_2(kappa)
    return {"LISTS": lists, "KAPPA": kappa, "M": slots, "BLOCK": max(1, 1024 // slots**2) * 4, "num_warps": 4}


def _empty_lists(neighbor: Tensor, lists: int, slots: int) -> Lists:
    graphs, _, n, _ = neighbor.shape
    device = neighbor.device
    return Lists(
        torch.empty(graphs, lists, n, slots, dtype=torch.int32, device=device),
        torch.empty(graphs, lists, n, slots, dtype=torch.float32, device=device),
        torch.zeros(graphs * n, dtype=torch.int32, device=device),
        torch.zeros(graphs, dtype=torch.int64, device=device),
    )


def joint_csr(
    lists: Lists, first: Tensor, numbers: Tensor, row_terms: tuple[int, ...] = ROW_TERMS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """indptr, indices, weights and dropped of ``device_graph.JointGraphs``.

    first: int64 [G]. numbers: float64 [G, 4]: what direct and pair terms are multiplied with, units per weight, prune.
    Waits for the device twice: for the numbers of rows by their terms, and for that of edges.
    """
    placed, start = placed_entries(lists)
    rows, counts, places = rows_by_terms(start, lists.ids.shape[1], lists.ids.shape[3], row_terms)
    edges = unpruned_edges(lists, placed, start, rows, counts, places, numbers, row_terms)
    return *pruned_csr(lists, edges, start, rows, counts[-1], first, numbers), lists.dropped


def placed_entries(lists: Lists) -> tuple[Tensor, Tensor]:
    """Where each node is listed: entries int32, and the first of each row's, int64 [G * n + 1]."""
    graphs, heads, n, slots = lists.ids.shape
    start = torch.zeros(graphs * n + 1, dtype=torch.int64, device=lists.ids.device)
    torch.cumsum(lists.listed, 0, out=start[1:])
    placed = torch.empty(lists.ids.numel(), dtype=torch.int32, device=lists.ids.device)
    entries = heads * n * slots
    cursor = start[:-1].int() if lists.ids.numel() < 1 << 31 else start[:-1].clone()
    place_entries[-(-entries // PLACES["BLOCK"]), graphs](lists.ids, cursor, placed, entries, n, **PLACES)
    return placed, start


def rows_by_terms(
    start: Tensor, lists: int, slots: int, row_terms: tuple[int, ...]
) -> tuple[Tensor, list[int], int]:  # fmt: skip
    """Rows, int64, in order of the room they need; how many have it in each of ``row_terms`` and in none; all places.

    Waits for the device.
    """
    most = torch.tensor([max(1, terms // slots) for terms in row_terms], device=start.device)
    kind = torch.bucketize(start.diff() + lists, most)  # the first that is large enough
    counts = (kind == torch.arange(len(row_terms) + 1, device=start.device)[:, None]).sum(1)
    *found, places = torch.cat([counts, start[-1:]]).tolist()
    return kind.byte().argsort(stable=True), found, places


def unpruned_edges(
    lists: Lists, placed: Tensor, start: Tensor, rows: Tensor, counts: list[int], places: int, numbers: Tensor,
    row_terms: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Other ends and weights of all rows, see ``sum_rows``, the number of each row's and the strongest of them."""
    graphs, heads, n, slots = lists.ids.shape
    device = start.device
    room = slots * (places + graphs * n * heads)
    other = torch.empty(room, dtype=torch.int32, device=device)
    weight = torch.empty(room, dtype=torch.float32, device=device)
    length = torch.empty(graphs * n, dtype=torch.int32, device=device)
    strongest = torch.empty(graphs * n, dtype=torch.float32, device=device)
    given = lists.ids, lists.alpha, placed, start, numbers
    made = other, weight, length, strongest, lists.dropped
    begin = 0
    for terms, count in zip(row_terms, counts, strict=False):
        constants = row_constants(n, heads, slots, terms)
        if count:
            grid = (-(-count // constants["R"]),)
            sum_rows[grid](rows[begin : begin + count], *given, *made, count, n, **constants)
        begin += count
    together = max(1, HUB_BYTES // (8 * n))
    for hubs in rows[begin:].split(together):
        if len(hubs):
            dense = torch.zeros(len(hubs) * n, dtype=torch.int64, device=device)
            add_hubs[len(hubs), HUB_PARTS](hubs, *given, dense, n, **hub_constants(heads, slots))
            gather_hubs[len(hubs),](hubs, start, numbers, dense, *made, n, LISTS=heads, M=slots, **GATHERED_HUBS)
            del dense
    return other, weight, length, strongest


def row_constants(n: int, lists: int, slots: int, terms: int) -> dict[str, Any]:
    places = max(1, terms // slots)
    terms = places * slots
    wide = (n + 1) * terms > 1 << 31
    return {
        "LISTS": lists, "M": slots, "C": places, "R": max(1, 256 // terms), "BITS": terms.bit_length() - 1,
        "WIDE": wide, "num_warps": max(1, terms // 256) if terms > 512 else 1, **EXACT,
    }  # fmt: skip


def hub_constants(lists: int, slots: int) -> dict[str, Any]:
    return {"PARTS": HUB_PARTS, "LISTS": lists, "M": slots, "C": max(1, 1024 // slots), "num_warps": 4, **EXACT}


def pruned_csr(
    lists: Lists, edges: tuple[Tensor, ...], start: Tensor, rows: Tensor, hubs: int, first: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Waits for the device."""
    _, heads, n, slots = lists.ids.shape
    device = start.device
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int64, device=device)
    split = len(rows) - hubs

    def launch(indices: Tensor, weights: Tensor, *, writes: bool) -> None:
        for some, constants in ((rows[:split], PRUNED_ROWS), (rows[split:], PRUNED_HUBS)):
            if len(some):
                prune_rows[-(-len(some) // constants["R"]),](
                    some, start, numbers, first, *edges, indptr, indices, weights, len(some), n, LISTS=heads, M=slots,
                    WRITES=writes, **constants,
                )  # fmt: skip

    launch(edges[0], edges[1], writes=False)
    torch.cumsum(indptr, 0, out=indptr)
    nnz = int(indptr[-1])
    indices = torch.empty(nnz, dtype=torch.int32, device=device)
    weights = torch.empty(nnz, dtype=torch.float32, device=device)
    launch(indices, weights, writes=True)
    return indptr, indices, weights
