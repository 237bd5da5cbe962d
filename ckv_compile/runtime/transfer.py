"""Small arrays between host and device that nobody waits for while steps run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ckv_compile.runtime import outbox
from ckv_compile.runtime.outbox import Parcel


class Arriving:
    """An array for a worker, of a tensor that nobody writes to any more; one of a device is on its way to the host.

    ``wait`` and ``array`` wait for it without holding the GIL.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts: tuple[tuple[slice, ...], ...] = ()
        self._parcel: Parcel | None = None
        self._array: np.ndarray | None = None
        if outbox.leaves_by_outbox(tensor.device):
            self._parcel = outbox.outbox_of(tensor.device).send([tensor])
        else:
            self._array = tensor.numpy()

    def part(self, dim: int, start: int, stop: int) -> Arriving:
        """Some of it: a view, which arrives when all of it has."""
        part = copy.copy(self)
        part._parts = (*self._parts, (*(slice(None),) * dim, slice(start, stop)))
        return part

    def wait(self) -> None:
        if self._parcel is not None:
            self._parcel.wait()

    def array(self) -> np.ndarray:
        """Waits. Raises what went wrong on the way."""
        array = self._array if self._parcel is None else self._parcel.arrays()[0][0]
        assert array is not None
        for part in self._parts:
            array = array[part]
        return array


def wait_for(args: Iterable[Any]) -> None:
    """Until what still arrives has arrived, here or inside lists."""
    for arg in args:
        if isinstance(arg, list):
            wait_for(arg)
        elif hasattr(arg, "wait"):
            arg.wait()


def with_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called with arrays in place of what is still arriving."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(arg.array() if isinstance(arg, Arriving) else arg for arg in args), **kwargs)

    return call


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor whose copies to the device nobody waits for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device. The host does not wait for the stream: the array is read from pinned memory."""
    return pinned(array, device).to(device, non_blocking=True)
