"""``ckv::observe_prompt``: show a prefill's queries to a policy that chooses by the prompt's attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_cache, require_length

Handler = Callable[[int, int, Tensor, Tensor, int, float], None]

_handler: Handler | None = None


def set_handler(handler: Handler | None) -> Handler | None:
    """Install what ``observe_prompt`` calls, or nothing with ``None``; returns the one that was installed before.

    It is called as ``handler(ticket_id, layer, query, key, length, scale)`` in the thread that runs the graph, with key
    [B, Hkv, length + Q, D], and must be done with both, on the present stream, when it returns.
    """
    global _handler
    previous, _handler = _handler, handler
    return previous


def _check(ticket: Tensor, query: Tensor, key: Tensor, length: Tensor) -> None:
    require(ticket.dtype == torch.int64, "ticket", "be int64", ticket.dtype)
    require(ticket.dim() == 1 and ticket.shape[0] >= 2, "ticket", "hold an id and a counter", tuple(ticket.shape))
    require_cache(query, key, None)
    require_length(length)


def _observe_prompt(ticket: Tensor, query: Tensor, key: Tensor, length: Tensor, scale: float, layer: int) -> None:
    from ckv_compile.reference.nominal import cache_prefix

    if _handler is not None and int(ticket[0]) >= 0:
        past = int(length)
        _handler(int(ticket[0]), layer, query, cache_prefix(key, past + query.shape[2], "key"), past, scale)
    ticket[1] += 1  # what keeps the call in its place, as for submit_partition


register_op(
    "observe_prompt(Tensor(a!) ticket, Tensor query, Tensor key, Tensor length, float scale, int layer) -> ()",
    _check,
    implementation=_observe_prompt,
)
