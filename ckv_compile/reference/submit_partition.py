"""Hand a prefill over to whoever partitions it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def submit_partition(
    ticket: Tensor,
    key: Tensor,
    length: Tensor,
    num_new: int,
    neighbor: Tensor | None,
    weight: Tensor | None,
    layer: int,
    handler: Callable[..., None] | None,
) -> None:
    """Call ``handler(ticket_id, layer, key, length, num_new, neighbor, weight)`` and count the call.

    ticket: int64 CPU [2 or more]: ticket[0] is an id that the caller chose, negative for "do not submit"; ticket[1]
    goes up by one. That mutation is what keeps the call in its place among the operators that take the ticket.
    key: nominal view [B, Hkv, NOM, D] that already holds the ``num_new`` tokens from position ``length`` on.
    neighbor int32, weight float32: [B, Hq, num_new, kappa], or None where keys alone make the graph.
    Without a handler only the counter moves. What the handler raises reaches the caller, uncounted.
    """
    ticket_id = int(ticket[0])
    if handler is not None and ticket_id >= 0:
        handler(ticket_id, layer, key, int(length), int(num_new), neighbor, weight)
    ticket[1] += 1
