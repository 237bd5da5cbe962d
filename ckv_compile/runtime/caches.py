"""Which sequence a call's cache is: one that is known, perhaps cropped, moved or grown, or one that begins here."""

from __future__ import annotations

from collections.abc import Sequence as Arguments
from typing import Any

import torch

from ckv_compile.config import CommunityConfig
from ckv_compile.runtime import reorder
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab


class Caches:
    """The caches that graphs of one configuration and geometry (``AttentionGeometry``) meet."""

    def __init__(self, config: CommunityConfig, geometry: Any) -> None:
        self.config, self.geometry = config, geometry

    def begin(self, sequence: Sequence, statistics, first: list[int], length: int = 0) -> None:
        sequence.settle()
        sequence.statistics = statistics
        sequence.restart(first, length)

    # ------------------------------------------------------------------ dynamic

    def known(self, past: Arguments[torch.Tensor]):
        """The sequence whose slab holds exactly these past K and V at its present length."""
        slab = REGISTRY.slab_at(past[0].data_ptr())
        sequence = None if slab is None else REGISTRY.sequence_of(slab)
        if slab is None or sequence is None or sequence.config != self.config or sequence.length != past[0].shape[2]:
            return None, None
        return (sequence, slab) if slab.holds(past, sequence.length) else (None, None)

    def locate(
        self, past: Arguments[torch.Tensor], batch: int, new: int, first: list[int], statistics
    ) -> tuple[Sequence, KVSlab]:
        """The sequence and slab of the past K and V, with room for ``new`` tokens; copies where it must. Reserved."""
        sequence, slab = self.known(past)
        length = past[0].shape[2]
        if sequence is None:
            sequence, slab = self._cropped(past, length)
        if sequence is None:
            sequence, slab = self._reordered(past, batch, length, new, statistics)
        if sequence is None:
            slab = REGISTRY.pool.take(self.geometry, batch, length + new)
            for view, tensor in zip(slab.views(length), past, strict=True):
                view.copy_(tensor)
            sequence = REGISTRY.attach(slab, self.config, self.geometry, batch)
            statistics.adopted += 1
            self.begin(sequence, statistics, first, length)
            sequence.offer_all()
        elif length + new > slab.capacity:
            larger = REGISTRY.pool.take(self.geometry, batch, length + new + slab.capacity // 2)
            for target, source in zip(larger.views(length), slab.views(length), strict=True):
                target.copy_(source)
            REGISTRY.move(sequence, slab, larger)
            slab.reserved = False
            slab = larger
        slab.reserved = True
        if sequence.first != first:
            # Other rows are padded than when the index was built: it describes another mask.
            self.begin(sequence, statistics, first, length)
            sequence.offer_all()
        if sequence.captured:
            # Replays of the caller's may have gone on from here; the cache that this call was given did not.
            sequence.length_device.fill_(length)
        sequence.account_to(statistics)
        return sequence, slab

    def _cropped(self, past: Arguments[torch.Tensor], length: int):
        """The sequence of a cache that was cropped in place; none if another cache still views the longer content."""
        slab = REGISTRY.slab_at(past[0].data_ptr())
        sequence = None if slab is None else REGISTRY.sequence_of(slab)
        if slab is None or sequence is None or sequence.config != self.config or length >= sequence.length:
            return None, None
        if not slab.holds(past, length) or slab.foreign_uses() > len(past):
            return None, None
        sequence.truncate(length)
        return sequence, slab

    def _reordered(self, past: Arguments[torch.Tensor], batch: int, length: int, new: int, statistics):
        """The sequence of a cache that is known, if all rows of this one are rows of it, and a slab with its K and V.

        Where nobody holds that cache any more they are its own, so that no address changes; otherwise copies. Reserved.
        """
        pool = REGISTRY.pool
        for slab in sorted(pool.slabs(), key=KVSlab.foreign_uses):
            sequence = REGISTRY.sequence_of(slab)
            if sequence is None or sequence.length != length or not self._fits(sequence, batch, slab.capacity):
                continue
            free = pool.reserve(slab)
            if not free and slab.reserved:
                continue  # a call is under way
            found = None
            try:
                found = self._follow(sequence, slab, past, None if free else max(length + new, slab.capacity))
            finally:
                slab.reserved = free and found is not None
            if found is not None:
                statistics.reordered += 1
                return found
        return None, None

    def _follow(self, sequence: Sequence, slab: KVSlab, past: Arguments[torch.Tensor], room: int | None):
        """A sequence and slab that follow into past K and V, or None if not all of their rows are rows of this slab.

        room: None where the slab and its sequence follow themselves; else the least room of a slab for a twin.
        """
        length = sequence.length
        rows = reorder.row_map(slab.views(length)[-2], past[-2])
        if rows is None:
            return None
        if room is not None:
            slab = REGISTRY.pool.take(self.geometry, sequence.batch, room)
            sequence = REGISTRY.attach_twin(slab, sequence)
        for view, tensor in zip(slab.views(length), past, strict=True):
            view.copy_(tensor)
        reorder.follow(sequence, rows)
        if room is not None:
            sequence.offer_all()
        return sequence, slab

    # ------------------------------------------------------------------ static

    def static_sequence(
        self, keys: list[torch.Tensor], batch: int, first: list[int], length: int, statistics
    ) -> tuple[Sequence, bool]:
        """The sequence of a static cache that holds ``length`` tokens, and whether all of them were offered."""
        key = keys[0]
        sequence = REGISTRY.static_sequence(key)
        if sequence is None or key.is_inference() or not self._fits(sequence, batch, key.shape[2]):
            sequence, known = self._reordered_static(keys, batch, length, statistics)
            if sequence is not None and sequence.first == first:
                sequence.account_to(statistics)
                return sequence, known
            if sequence is None:
                sequence = self.new_static(batch, key.shape[2])
        elif (
            length and sequence.version == key._version and sequence.first == first and self._reaches(sequence, length)
        ):
            if length < sequence.length:
                sequence.truncate(length)
            sequence.account_to(statistics)
            return sequence, True
        # The cache was reset, or holds what the backend never saw; another version: somebody else wrote to it.
        statistics.adopted += int(length > 0)
        self.begin(sequence, statistics, first, length)
        return sequence, False

    def _reordered_static(
        self, keys: list[torch.Tensor], batch: int, length: int, statistics
    ) -> tuple[Sequence | None, bool]:
        """The sequence of a static cache whose rows are rows of one that is known, in which no call is under way.

        And whether it is the same sequence, rather than a twin.
        """
        key = keys[-1]
        if key.is_inference() or not length:
            return None, False
        for sequence in REGISTRY.static_sequences():
            if sequence.keys is not None or sequence.length != length or not self._fits(sequence, batch, key.shape[2]):
                continue
            left = sequence.left_key()
            rows = None if left is None else reorder.row_map(left[:, :, :length], key[:, :, :length])
            if rows is not None:
                followed = REGISTRY.static_successor(sequence, keys[0])
                reorder.follow(followed, rows)
                statistics.reordered += 1
                return followed, followed is sequence
        return None, False

    def _reaches(self, sequence: Sequence, length: int) -> bool:
        """Whether a static cache of ``length`` tokens is what its sequence knows, or was: a crop moves its counter only.

        Replays of the caller's may have written behind a crop.
        """
        return sequence.length == length or (sequence.length > length and not sequence.captured)

    def is_left(self, sequence: Sequence, key: torch.Tensor) -> bool:
        """Whether a static cache is as our last call left it, its counter aside."""
        fits = self._fits(sequence, key.shape[0], key.shape[2])
        return fits and sequence.length > 0 and sequence.version == key._version

    def _fits(self, sequence: Sequence, batch: int, capacity: int) -> bool:
        sizes = sequence.config, sequence.geometry, sequence.batch, sequence.shape.tokens
        return sizes == (self.config, self.geometry, batch, capacity)

    def new_static(self, batch: int, capacity: int) -> Sequence:
        REGISTRY.forget_orphan()
        return Sequence(self.config, self.geometry, batch, capacity, None, REGISTRY.memory(self.config))

    def remember_static(self, keys: list[torch.Tensor], counter: torch.Tensor | None, sequence: Sequence) -> None:
        """What the next call must find to go on without looking at the cache. counter: if a graph advances it."""
        key = keys[0]
        if key.is_inference():
            return
        sequence.version = key._version
        sequence.remember_key(keys[-1])
        sequence.remember_counter(counter)
        if REGISTRY.static_sequence(key) is not sequence:
            REGISTRY.bind_static(key, sequence)
