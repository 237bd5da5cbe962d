"""Storage of a DynamicCache: one over-allocated buffer per cache, sequence-major, owned by a pool.

``slab [2 * layers, capacity, batch, heads, head_dim]``; layer l's K is ``slab[2l]`` and its V ``slab[2l + 1]``. The
model is handed views ``[batch, heads, length, head_dim]`` whose strides do not depend on the capacity. A slab is free
again when nobody but the pool holds a view of its storage, which the storage's use count tells.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ckv_compile.index_layout import NOMINAL_LENGTH

_GRANULE = 1024  # tokens


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors hold the storage of ``tensor``."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class KVSlab:
    """K and V of every layer of one cache. ``views(n)`` are what the model holds after n tokens."""

    @torch.inference_mode(False)  # a cache filled in inference mode may go on, and its slab may serve again, outside
    def __init__(self, layers: int, batch: int, heads: int, dim: int, capacity: int, dtype, device) -> None:
        self.capacity = capacity
        self.buffer = torch.empty(2 * layers, capacity, batch, heads, dim, dtype=dtype, device=device)
        self.nominal = self.views(min(NOMINAL_LENGTH, capacity))
        self.pointers = [view.data_ptr() for view in self.nominal]
        self.reserved = False  # a call that has not handed out its views yet
        self.watched = False  # the registry hears of its end
        self._own_uses = storage_uses(self.buffer)

    def views(self, length: int) -> list[torch.Tensor]:
        """All K and V as ``[batch, heads, length, head_dim]``: K of layer 0, V of layer 0, K of layer 1, ..."""
        # Below autograd these are plain tensors, not views that autograd tracks; dynamo fakes such tensors cheaply.
        with torch._C._AutoDispatchBelowAutograd():
            return list(self.buffer.narrow(1, 0, length).permute(0, 2, 3, 1, 4).unbind(0))

    def holds(self, tensors: Sequence[torch.Tensor], length: int) -> bool:
        """Whether ``tensors`` are exactly ``views(length)``: not some of the rows, nor every other token."""
        first = self.nominal[0]
        shape, strides = (*first.shape[:2], length, first.shape[3]), first.stride()
        return all(
            tensor.data_ptr() == pointer and tensor.shape == shape and tensor.stride() == strides
            for tensor, pointer in zip(tensors, self.pointers, strict=True)
        )

    def layer_keys(self, layer: int) -> torch.Tensor:
        """All of a layer's K, unwritten positions included: ``[batch, heads, capacity, head_dim]``."""
        return self.buffer[2 * layer].permute(1, 2, 0, 3)

    def layer_values(self, layer: int) -> torch.Tensor:
        """The same of a layer's V."""
        return self.buffer[2 * layer + 1].permute(1, 2, 0, 3)

    def foreign_uses(self) -> int:
        """Tensors of others that view this slab."""
        return storage_uses(self.buffer) - self._own_uses

    def free(self) -> bool:
        return not self.reserved and not self.foreign_uses()

    def fits(self, layers: int, batch: int, heads: int, dim: int, need: int, dtype, device) -> bool:
        shape = (2 * layers, self.capacity, batch, heads, dim)
        return (
            self.capacity >= need
            and self.buffer.shape == shape
            and self.buffer.dtype == dtype
            and self.buffer.device == device
        )

    def nbytes(self) -> int:
        return self.buffer.nbytes


class SlabPool:
    """Hands out slabs; keeps at most one free slab for the next cache, so that its addresses repeat."""

    def __init__(self) -> None:
        self._slabs: list[KVSlab] = []
        self._lock = threading.Lock()

    def take(self, geometry, batch: int, need: int) -> KVSlab:
        """A slab with room for ``need`` tokens: the free one if it fits, else a new one with room to grow.

        It is reserved until the caller, having handed out views, clears ``reserved``.
        """
        sizes = (geometry.num_layers, batch, geometry.num_kv_heads, geometry.head_dim)
        with self._lock:
            free = [slab for slab in self._slabs if slab.free()]
            fitting = [slab for slab in free if slab.fits(*sizes, need, geometry.dtype, geometry.device)]
            self._slabs = [slab for slab in self._slabs if slab not in free]
            if fitting:
                fitting[0].reserved = True
                self._slabs.append(fitting[0])
                return fitting[0]
            room = need + max(_GRANULE // 2, need // 8)
            capacity = -(-room // _GRANULE) * _GRANULE
            slab = KVSlab(*sizes, capacity, geometry.dtype, geometry.device)
            slab.reserved = True
            self._slabs.append(slab)
            return slab

    def reserve(self, slab: KVSlab) -> bool:
        """Reserve a slab as ``take`` does, with what its last cache left in it; whether it was free."""
        with self._lock:
            free = slab in self._slabs and slab.free()
            slab.reserved |= free
            return free

    def slabs(self) -> list[KVSlab]:
        with self._lock:
            return list(self._slabs)

    def free_memory(self) -> None:
        """Drop every slab that no cache uses."""
        with self._lock:
            self._slabs = [slab for slab in self._slabs if not slab.free()]
