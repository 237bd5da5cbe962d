"""How long a device took from one point of its work to another, told without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


def moment(device: torch.device) -> Any:
    """Now on the host; on CUDA, when the device has done what the current stream was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds from one moment to a later one of the same device, for which this waits."""
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
