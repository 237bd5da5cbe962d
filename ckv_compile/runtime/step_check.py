"""Verifies on the device, without waiting, that a decode step continues the sequence that was judged before it.

The first step after a prefill, an adoption or a crop is judged by reading its mask. Reading every later one would stop
the host at every step; instead small kernels compare it with what it must be, and the host looks at the outcome one or
more steps later.
"""

from __future__ import annotations

import torch

_HEADER = 16  # bytes before the compared entries: the verdict so far, the counter's comparison, and padding


class StepCheck:
    """Checks of one sequence. Each ``verify_*`` enqueues; ``conclude`` sends the verdict to the host, ``failed`` looks.

    Three small launches a step in all; one more for a whole mask with padded rows, two or three for an additive one, and
    one for a counter that is checked beside a mask.

    capacity: tokens that a mask may cover. A step that extends ``length`` cached tokens, with padding before ``first``,
    was judged.
    """

    @torch.inference_mode(False)  # its tensors outlive a call in inference mode
    def __init__(self, batch: int, capacity: int, first: list[int], length: int, device: torch.device) -> None:
        self.batch, self.capacity, self.first = batch, capacity, list(first)
        self.since = length  # tokens in the cache at the step that was judged
        self.what = ""  # what has been verified since
        positions = torch.arange(capacity, device=device)
        begin = torch.tensor(first, device=device)[:, None]
        self._real = positions >= begin
        self._padding = positions < begin if any(first) else None
        # A window of ``capacity`` entries for every length: ones for what is in the cache, zeros behind.
        self._written = torch.arange(2 * capacity, device=device) < capacity
        # Reduced from one into the other by turns: the verdict is sticky and no kernel reads what it writes.
        self._found = [torch.zeros(_HEADER + batch * capacity, dtype=torch.bool, device=device) for _ in range(2)]
        self._used = _HEADER
        self._verdict = torch.zeros(1, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._seen = self._verdict.numpy()

    def verify_padding(self, mask: torch.Tensor, length: int, new: int = 1) -> None:
        """mask [batch, >= length + new]: nonzero exactly from ``first`` to the last of the new tokens at ``length`` .."""
        upto = length + new
        torch.logical_xor(mask[:, :upto], self._real[:, :upto], out=self._entries(self.batch, upto))
        self.what = "attention_mask"

    def verify_given(self, mask: torch.Tensor, length: int) -> None:
        """mask bool [batch or 1, 1, 1, n <= capacity]: true exactly from ``first`` to the new token at ``length``.

        Or additive: zero there, and the least number of its dtype elsewhere.
        """
        rows, size = mask.shape[0], mask.shape[3]
        begin = self.capacity - length - 1
        entries, written = self._entries(rows, size), self._written[begin : begin + size]
        if mask.dtype.is_floating_point:
            least = torch.finfo(mask.dtype).min
            hidden = ~written if self._padding is None else ~written | self._padding[:rows, :size]
            torch.ne(mask[:, 0, 0], hidden * least, out=entries)
        else:
            torch.logical_xor(mask[:, 0, 0], written, out=entries)
            if self._padding is not None:
                entries.logical_xor_(self._padding[:rows, :size])
        self.what = "attention_mask"

    def verify_counter(self, counter: torch.Tensor, length: int) -> None:
        """counter, one integer: ``length``."""
        torch.ne(counter.view(1), length, out=self._found[0][1:2])
        self.what = self.what or "the number of cached tokens"

    def conclude(self) -> None:
        """Join what was verified at this step with the verdict so far, and send it to the host."""
        old, new = self._found
        torch.any(old[: self._used], 0, keepdim=True, out=new[:1])
        self._verdict.copy_(new[:1], non_blocking=True)
        self._found = [new, old]
        self._used = _HEADER

    def failed(self) -> bool:
        """Whether a step that the device has finished was found to be another one; never waits."""
        return bool(self._seen[0])

    def concluded(self) -> bool:
        """The verdict on every step so far; waits for the device."""
        return bool(self._found[0][0].item())

    def _entries(self, rows: int, size: int) -> torch.Tensor:
        self._used = _HEADER + rows * size
        return self._found[0][_HEADER : self._used].view(rows, size)

    def message(self, length: int) -> str:
        """What went wrong, at a cache of ``length`` tokens."""
        if self.what == "attention_mask":
            padding = self.first[0] if len(set(self.first)) == 1 else self.first
            need = f"be zero for the first {padding} tokens of its rows and nonzero for all later ones"
        else:
            need = "grow by one at every step"
        return (
            f"{self.what} must {need}, as it was at the step that extended {self.since} cached tokens, but was different "
            f"at a later step (before {length + 1} tokens): no logits behind token {self.since} can be trusted. On "
            "CUDA it is read only at the first step after a prefill or a crop and verified afterwards, so begin a new "
            "cache where it changes"
        )
