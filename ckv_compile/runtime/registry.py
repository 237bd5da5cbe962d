"""Finds the sequence of a cache by the storage of its keys, and lets it die with the cache.

That of a slab lives as long as the pool keeps the slab. That of a static cache of several rows outlives it until another
cache begins, for its rows may have moved into a new one (``runtime.reorder``).
"""

from __future__ import annotations

import collections
import threading
import weakref

import torch

from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig
from ckv_compile.runtime import cuda_graphs, reorder
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab, SlabPool


class Registry:
    """All caches of this process. Slab caches are known by the address of layer 0's K, static ones by its storage."""

    def __init__(self) -> None:
        self.pool = SlabPool()
        self._by_slab: dict[int, Sequence] = {}  # by the slab's id; an entry goes when its slab does
        self._by_storage: dict[int, Sequence] = {}
        self._memory: dict[str, ResolutionMemory] = {}
        self._lock = threading.RLock()
        self.orphan: Sequence | None = None  # of the static cache of several rows that died last
        self._abandoned: collections.deque[Sequence] = collections.deque()  # what they counted is still to be read

    def memory(self, config: CommunityConfig) -> ResolutionMemory:
        """Resolutions that earlier partitions with these options found, per layer and graph."""
        with self._lock:
            return self._memory.setdefault(config.digest(), ResolutionMemory())

    # ------------------------------------------------------------------ slabs

    def slab_at(self, pointer: int) -> KVSlab | None:
        for slab in self.pool.slabs():
            if slab.pointers[0] == pointer:
                return slab
        return None

    def sequence_of(self, slab: KVSlab) -> Sequence | None:
        return self._by_slab.get(id(slab))

    def attach(self, slab: KVSlab, config: CommunityConfig, geometry, batch: int) -> Sequence:
        """The slab's sequence, made anew where it has none with these options."""
        self.forget_orphan()
        with self._lock:
            sequence = self._by_slab.get(id(slab))
            if sequence is None or sequence.config != config or sequence.geometry != geometry:
                self._settle_abandoned()
                keys, values = _layers_of(weakref.ref(slab))
                sequence = Sequence(config, geometry, batch, slab.capacity, keys, self.memory(config), values)
                self._bind(slab, sequence)
            return sequence

    def attach_twin(self, slab: KVSlab, original: Sequence) -> Sequence:
        """A sequence for a slab whose cache is to hold the same as that of ``original``, with no less room."""
        with self._lock:
            keys, values = _layers_of(weakref.ref(slab))
            sequence = reorder.twin(original, slab.capacity, keys, values)
            self._bind(slab, sequence)
            return sequence

    def move(self, sequence: Sequence, old: KVSlab, new: KVSlab) -> None:
        """The cache outgrew its slab: its sequence follows it into a larger one."""
        with self._lock:
            self._by_slab.pop(id(old), None)
            sequence.keys, sequence.values = _layers_of(weakref.ref(new))
            sequence.grow(new.capacity)
            self._bind(new, sequence)

    def _bind(self, slab: KVSlab, sequence: Sequence) -> None:
        previous = self._by_slab.pop(id(slab), None)
        if previous is not None:
            previous.close()
        self._by_slab[id(slab)] = sequence
        if not slab.watched:
            # One for the life of the slab, and it holds no sequence: a slab may serve many, and a sequence may move on.
            slab.watched = True
            weakref.finalize(slab, self._drop_slab, id(slab)).atexit = False

    def _drop_slab(self, identity: int) -> None:
        with self._lock:
            sequence = self._by_slab.pop(identity, None)
        if sequence is not None:
            self._abandon(sequence)

    # ------------------------------------------------------------------ static caches

    def static_sequence(self, key: torch.Tensor) -> Sequence | None:
        return self._by_storage.get(key.untyped_storage()._cdata)

    def bind_static(self, key: torch.Tensor, sequence: Sequence) -> None:
        self._settle_abandoned()
        cdata = key.untyped_storage()._cdata
        with self._lock:
            previous = self._by_storage.pop(cdata, None)
            if previous is not None and previous is not sequence:
                previous.close()
            self._by_storage[cdata] = sequence
        weakref.finalize(key, self._drop_static, cdata, weakref.ref(sequence)).atexit = False

    def _drop_static(self, cdata: int, reference: weakref.ref[Sequence]) -> None:
        with self._lock:
            sequence = reference()
            if sequence is None or self._by_storage.get(cdata) is not sequence:
                return
            del self._by_storage[cdata]
            if sequence.may_move():
                sequence, self.orphan = self.orphan, sequence
        if sequence is not None:
            self._abandon(sequence)

    def static_sequences(self) -> list[Sequence]:
        """Of the static cache of several rows that died last, then of those that live."""
        with self._lock:
            living = list(self._by_storage.values())
            return living if self.orphan is None else [self.orphan, *living]

    def static_successor(self, sequence: Sequence, key: torch.Tensor) -> Sequence:
        """The sequence of a static cache with this K of layer 0 whose rows are rows of that of ``sequence``.

        That of a cache which died goes on itself, that of one which lives has a twin.
        """
        with self._lock:
            if sequence is self.orphan:
                self.orphan = None
            else:
                sequence = reorder.twin(sequence, key.shape[2])
        sequence.version = key._version
        self.bind_static(key, sequence)
        return sequence

    def forget_orphan(self) -> None:
        """Another cache begins: nobody moves the rows of the one that died any more."""
        with self._lock:
            sequence, self.orphan = self.orphan, None
        if sequence is not None:
            self._abandon(sequence)

    # ------------------------------------------------------------------ all of them

    def sequences(self) -> list[Sequence]:
        """Of all caches that live."""
        with self._lock:
            return [*self._by_slab.values(), *self._by_storage.values()]

    def _all(self) -> list[Sequence]:
        orphan = self.orphan
        return self.sequences() if orphan is None else [*self.sequences(), orphan]

    def audit(self) -> None:
        """Tell every statistics what is known by now of steps that were not what they were taken for."""
        for sequence in [*self._abandoned, *self._all()]:
            sequence.audit()

    def settle(self) -> None:
        """Move what the device counted for every cache, gone ones too, into the statistics. Waits for the device."""
        self._settle_abandoned()
        for sequence in self._all():
            sequence.settle()

    def free_memory(self) -> None:
        self.forget_orphan()
        self._settle_abandoned()
        self.pool.free_memory()

    def _abandon(self, sequence: Sequence) -> None:
        """The end of a sequence whose cache died, in a finalizer.

        The garbage collector calls it in the middle of anything: under a FakeTensorMode, with dispatch disabled, in a
        thread of the partition pool, while a graph is captured. So it reads no tensor; a later call does.
        """
        sequence.abandon()
        self._abandoned.append(sequence)

    def _settle_abandoned(self) -> None:
        while self._abandoned and not cuda_graphs.capturing():
            self._abandoned.popleft().settle()


def _layers_of(slab: weakref.ref[KVSlab]):
    """(K of a layer, V of a layer), as functions that do not keep the slab alive."""

    def alive() -> KVSlab:
        found = slab()
        assert found is not None
        return found

    return lambda layer: alive().layer_keys(layer), lambda layer: alive().layer_values(layer)


REGISTRY = Registry()
