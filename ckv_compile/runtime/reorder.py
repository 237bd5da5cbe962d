"""Beam search: the rows of a cache move into a new one between two steps, and its index follows them, row by row.

``reorder_cache`` of transformers selects rows into new tensors, of which nobody tells the backend. A step that meets an
unknown cache therefore looks whether its rows are rows of one that the backend knows (``row_map``). Then that one's
sequence goes on: its buffers keep their addresses, rows of the index are copied inside them (``follow``), and what
workers still make of the earlier rows is put into the new order when it arrives (``runtime.rows``). Where somebody still
holds the earlier cache, a copy of its sequence goes on (``twin``): garbage of a compilation may hold it, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ckv_compile.index_layout import NOT_OF_ROWS
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.transfer import to_device

if TYPE_CHECKING:
    from ckv_compile.runtime.index import CommunityIndex

AT_ONCE_BYTES = 256 << 20  # of a cache that are compared, or of a buffer of an index that move
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
    at_once = max(1, AT_ONCE_BYTES // max(1, old[:, :, :1].nbytes))
    parts = [slice(begin, min(begin + at_once, n)) for begin in range(0, n, at_once)]
    before, after = (sum(_digests(cache[:, :, part], part.start) for part in parts) for cache in (old, new))
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

    capacity: not less than that of ``sequence``. What is under way is not shared: it is begun again.
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
    other.submitted = [marks[-1][0] if marks else 0 for marks in sequence.index.marks]
    other.edges = [edges.copied(other.origins) for edges in sequence.edges]
    for layer, edges in enumerate(other.edges):
        if not other.submitted[layer] and edges.tokens > sequence.config.min_context:
            other.offer_whole(layer, warm=False)
    return other


def follow(sequence: Sequence, rows: list[int]) -> None:
    """The rows of a sequence's cache moved: row i is now what row ``rows[i]`` was. Some may be there several times."""
    sequence.forget_judgement()
    if rows == list(range(len(rows))):
        return
    first = [sequence.first[row] for row in rows]
    try:
        gather_rows(sequence.index, rows)
    except BaseException:
        sequence.restart(first, sequence.length)  # some of the index moved and some did not
        raise
    sequence.origins.move(rows)
    if first != sequence.first:
        sequence.set_first(first)


def gather_rows(index: CommunityIndex, rows: list[int]) -> None:
    """Row i of every buffer becomes what row ``rows[i]`` was, in place; rows that stay are not touched.

    Copies of rows that move are made a few layers at a time.
    """
    moved = [(to, source) for to, source in enumerate(rows) if to != source]
    target, source = to_device(np.array(moved, np.int64).T.copy(), index.device).unbind()
    for name, buffer in index.buffers.items():
        if name not in NOT_OF_ROWS:
            for layers in buffer.split(max(1, AT_ONCE_BYTES // max(1, buffer[0].nbytes))):
                layers.index_copy_(1, target, layers.index_select(1, source))
