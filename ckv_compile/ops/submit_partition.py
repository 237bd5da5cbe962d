"""``ckv::submit_partition``: hand the keys or edges of a prefill to the host workers, from inside a compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_length

Handler = Callable[[int, int, Tensor, int, int, Tensor | None, Tensor | None], None]

_handler: Handler | None = None


def set_handler(handler: Handler | None) -> Handler | None:
    """Install what ``submit_partition`` calls, or nothing with ``None``; returns the one that was installed before.

    It is called as ``handler(ticket_id, layer, key, length, num_new, neighbor, weight)`` in the thread that runs the
    graph, with the operator's own tensors: it must copy, or order its reads, before it returns.
    """
    global _handler
    previous, _handler = _handler, handler
    return previous


def _check(ticket: Tensor, length: Tensor, num_new: int, neighbor: Tensor | None, weight: Tensor | None) -> None:
    require(ticket.dtype == torch.int64, "ticket", "be int64", ticket.dtype)
    require(ticket.dim() == 1 and ticket.shape[0] >= 2, "ticket", "hold an id and a counter", tuple(ticket.shape))
    require_length(length)
    require_at_least("num_new", num_new, 0)
    require(
        (neighbor is None) == (weight is None), "weight", "be given exactly when neighbor is", type(weight).__name__
    )


def _submit_partition(
    ticket: Tensor,
    key: Tensor,
    length: Tensor,
    num_new: int,
    neighbor: Tensor | None,
    weight: Tensor | None,
    layer: int,
) -> None:
    from ckv_compile.reference.submit_partition import submit_partition

    submit_partition(ticket, key, length, num_new, neighbor, weight, layer, _handler)


register_op(
    "submit_partition(Tensor(a!) ticket, Tensor key, Tensor length, SymInt num_new, Tensor? neighbor, Tensor? weight, "
    "int layer) -> ()",
    _check,
    implementation=_submit_partition,
)
