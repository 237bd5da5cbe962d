"""Small arrays between host and device that nobody waits for while steps run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Arriving:
    """A tensor on its way to the host, for a worker: ``array()`` waits for it without holding the GIL."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = None
        if tensor.device.type == "cuda":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(tensor.device))
            tensor = host
        self._tensor = tensor

    def part(self, dim: int, start: int, stop: int) -> Arriving:
        """Some of it: a view, which arrives when all of it has."""
        part = copy.copy(self)
        part._tensor = self._tensor.narrow(dim, start, stop - start)
        return part

    def array(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.to("cpu").numpy()


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
