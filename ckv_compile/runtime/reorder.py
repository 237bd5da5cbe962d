"""Beam search: the rows of a cache move into a new one between two steps, and its index follows them, row by row.

``reorder_cache`` of transformers selects rows into new tensors, of which nobody tells the backend. A step that meets an
unknown cache therefore looks whether its rows are rows of one that the backend knows (``row_map``). Then that one's
sequence goes on: its buffers keep their addresses, rows of the index are copied inside them (``follow``), and what
workers still make of the earlier rows is put into the new order when it arrives (``runtime.rows``). Where somebody still
holds the earlier cache, a copy of its sequence goes on (``twin``): garbage of a compilation may hold it, too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ckv_compile.index_layout import NOT_OF_ROWS, PER_COMMUNITY, PER_ENTRY, PER_TOKEN
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.transfer import to_device

if TYPE_CHECKING:
    from ckv_compile.runtime.index import CommunityIndex

# Of a cache that are compared at once, and of a buffer of an index that move: as many as make launches few, or as stay in
# the cache of a CPU and in memory that it has used before.
AT_ONCE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D)


def row_map(old: Tensor, new: Tensor) -> list[int] | None:
    """Of which row of ``old`` each row of ``new`` is a copy; None unless each is one. Waits for the device once.

    old, new: [B, Hkv, n, D], K of the last layer of two caches with n tokens. A digest of each row finds its candidate,
    and every bit of the two is compared: nothing is left to chance. K of a layer at a position follows from the token
    there and, but for the first layer, from all earlier ones, and in the last layer from what all others made of them.
    So rows that are equal at all positions have the same tokens, each at its place, and what the other layers hold of
    them is equal, too, unless somebody wrote into a cache by hand. Of equal rows a row's own number comes first: nothing
    moves between beams that share all of their tokens.

    It reads K of one layer twice in each cache, where moving the rows read and wrote K and V of all.
    """
    old, new = _words(old, new)
    batch, _, n, _ = old.shape
    at_once = max(1, AT_ONCE_BYTES[old.device.type] // max(1, old[:, :, :1].nbytes))
    parts = [slice(begin, min(begin + at_once, n)) for begin in range(0, n, at_once)]
    before, after = (
        torch.stack([_digests(cache[:, :, part], part.start) for part in parts]).sum(0) for cache in (old, new)
    )
    same = after[:, None] == before
    own = torch.arange(batch, device=old.device)
    source = torch.where(same.diagonal(), own, same.int().argmax(1))
    equal = torch.ones_like(same.diagonal())
    for part in parts:
        equal &= (new[:, :, part] == old[:, :, part].index_select(0, source)).flatten(1).all(1)
    rows = source.masked_fill(~equal, -1).tolist()
    return rows if min(rows) >= 0 else None


def _words(*caches: Tensor) -> list[Tensor]:
    """The bits of caches [..., D] as integers, of 8 bytes where their strides allow."""
    size = caches[0].element_size()

    def wide(cache: Tensor) -> bool:
        extents = *cache.stride()[:-1], cache.shape[-1], cache.storage_offset()
        return cache.stride(-1) == 1 and all(extent * size % 8 == 0 for extent in extents)

    kind = torch.int64 if all(map(wide, caches)) else _WORDS[size]
    return [cache.view(kind) for cache in caches]


def _digests(words: Tensor, begin: int) -> Tensor:
    """int64 [B] of integers [B, H, m, W] at positions ``begin ..``, to be added up over all positions; sums wrap."""
    _, heads, count, width = words.shape

    def odd(numbers: Tensor, factor: int) -> Tensor:
        return (2 * numbers + 1) * factor

    channels = torch.arange(width, device=words.device)
    positions = torch.arange(begin, begin + count, device=words.device) * heads
    places = positions + torch.arange(heads, device=words.device)[:, None]
    tokens = (words * odd(channels, _ODD[0])).sum(-1)
    return ((tokens ^ (tokens >> 29)) * odd(places, _ODD[1])).flatten(1).sum(1)


def twin(sequence: Sequence, capacity: int, keys: Any = None, values: Any = None) -> Sequence:
    """Another sequence that knows what ``sequence`` does, of a cache with the same content that goes on by itself.

    capacity: not less than that of ``sequence``. It also gets what has come back and is not published there. What is
    still under way is not shared: with edges it is begun again here, without by ``offer_all``.
    """
    other = Sequence(sequence.config, sequence.geometry, sequence.batch, capacity, keys, sequence.memory, values)
    other.index.fill_from(sequence.index)
    other.index.tally.zero_()
    other.length = sequence.length
    other.length_device.fill_(sequence.length)
    other.set_first(sequence.first)
    for name in ("prompt", "refreshed_at", "repaired_at", "unseen_queries"):
        setattr(other, name, getattr(sequence, name))
    other.closed = list(sequence.closed)
    other.edges = [edges.copied(other.origins) for edges in sequence.edges]
    reached = [marks[-1][0] if marks else 0 for marks in sequence.index.marks]
    came = [one for one in sequence.work.came() if not one.joins]
    for finished in sorted(came, key=lambda one: one.start):
        follows = finished.start == reached[finished.layer]
        if follows or not other.in_blocks:
            rows = other.origins.follow(finished.rows)
            other.work.inbox.append(dataclasses.replace(finished, epoch=other.work.epoch, rows=rows))
        if follows:
            reached[finished.layer] = finished.stop
    if other.in_blocks:
        other.submitted = reached
        return other
    for layer, edges in enumerate(other.edges):
        if not reached[layer] and edges.tokens > sequence.config.min_context:
            other.offer_whole(layer, warm=False)
    return other


def follow(sequence: Sequence, rows: list[int]) -> None:
    """The rows of a sequence's cache moved: row i is now what row ``rows[i]`` was. Some may be there several times."""
    sequence.forget_judgement()
    if rows == list(range(len(rows))):
        return
    first = [sequence.first[row] for row in rows]
    try:
        gather_rows(sequence.index, rows, sequence.length)
    except BaseException:
        sequence.restart(first, sequence.length)  # some of the index moved and some did not
        raise
    sequence.origins.move(rows)
    if first != sequence.first:
        sequence.set_first(first)


def gather_rows(index: CommunityIndex, rows: list[int], length: int) -> None:
    """Row i of every buffer becomes what row ``rows[i]`` was, in place, in so far as ``length`` tokens use it.

    Two launches a buffer, or two for a few layers of it at a time, whose copies take memory meanwhile.
    """
    source = to_device(np.array(rows, np.int64), index.device)
    for name, buffer in index.buffers.items():
        if name in NOT_OF_ROWS:
            continue
        used = _used(index, name, length)
        part = buffer if used is None else buffer.narrow(3, 0, min(used, buffer.shape[3]))
        for layers in part.split(max(1, AT_ONCE_BYTES[index.device.type] // max(1, part[0].nbytes))):
            layers.copy_(layers.index_select(1, source))


def _used(index: CommunityIndex, name: str, length: int) -> int | None:
    """Entries of a buffer's fourth dimension that anybody reads, of a cache of ``length`` tokens; None: all, or no such."""
    logged = max(0, length - min(index.log_starts))
    if name in PER_COMMUNITY:
        return max(index.used) + logged  # a token that is assigned may be a community of its own
    return {**dict.fromkeys(PER_TOKEN, length), **dict.fromkeys(PER_ENTRY, logged)}.get(name)
