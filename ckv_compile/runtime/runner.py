"""Runs a rewritten graph: finds the cache's sequence, calls with its state, hands results over.

This thin wrapper lies outside AOTAutograd. A call whose cache or mask it cannot vouch for runs the graph as dynamo
gave it: dense, never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Arguments
from typing import Any

import torch

from ckv_compile.community.partition import warm_up
from ckv_compile.config import CommunityConfig
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab


def left_padding(mask: torch.Tensor) -> list[int] | None:
    """First real token of each row of a padding mask ``[B, n]``, or None if a row is not zeros followed by ones."""
    real = mask != 0
    count = real.sum(-1)
    first = real.int().argmax(-1)
    regular = (count > 0) & (first + count == mask.shape[-1])
    first, regular = torch.stack([first, regular.to(first.dtype)]).tolist()
    return first if all(regular) else None


def padding_of_given(mask: torch.Tensor, length: int, batch: int) -> list[int] | None:
    """The same for a whole mask ``[B or 1, 1, Q, capacity]`` of queries at positions ``length ...``.

    None unless every query that is no padding itself sees exactly the real tokens up to its own position.
    """
    rows = mask[:, 0].expand(batch, -1, -1)
    queries = rows.shape[1]
    first = left_padding(rows[:, -1, : length + queries])
    if first is None:
        return None
    positions = torch.arange(rows.shape[2], device=mask.device)
    own = torch.arange(length, length + queries, device=mask.device)[:, None]
    begin = torch.tensor(first, device=mask.device)[:, None, None]
    expected = (positions >= begin) & (positions <= own)
    return first if bool(((rows == expected) | (own < begin)).all()) else None


@functools.cache
def prepare(config: CommunityConfig) -> None:
    """Compile the kernels of the partition now, in the caller's thread: later it would hold the GIL while steps run."""
    if config.policy == "communities":
        warm_up(config)


class GraphRunner:
    """Callable that stands for a rewritten graph.

    compiled: the graph after ``plan`` (a ``RewritePlan``); dense: the graph as dynamo gave it; entry_of: finds what is
    recorded about the model whose parameters are among the arguments.
    """

    def __init__(self, plan: Any, config: CommunityConfig, compiled: Callable, dense: Callable, entry_of) -> None:
        self.plan, self.config, self.compiled, self.dense, self.entry_of = plan, config, compiled, dense, entry_of
        self._index_names = [
            name for name in plan.state if not name.startswith(("key_", "value_")) and name not in ("length", "first")
        ]
        cache = plan.cache.name
        self.call = {
            ("prefill", "EMPTY"): self._first_prefill,
            ("prefill", "DYNAMIC"): self._later_prefill,
            ("prefill", "STATIC"): self._static_prefill,
            ("decode", "DYNAMIC"): self._decode,
            ("decode", "STATIC"): self._static_decode,
        }[plan.phase, cache]

    def __call__(self, *args):
        return self.call(args, self.entry_of(args).statistics)

    # ------------------------------------------------------------------ prefill

    def _first_prefill(self, args, statistics):
        plan = self.plan
        batch, new = plan.batch(args), plan.num_new(args)
        first = self._padding(args, batch, new)
        if first is None:
            return self._run_dense(args, statistics, "the padding mask is not left padding")
        slab = REGISTRY.pool.take(plan.geometry, batch, new)
        try:
            sequence = REGISTRY.attach(slab, self.config, plan.geometry, batch)
            self._begin(sequence, statistics, first)
            return self._prefill(args, sequence, slab, new)
        finally:
            slab.reserved = False

    def _later_prefill(self, args, statistics):
        plan = self.plan
        batch, new = plan.batch(args), plan.num_new(args)
        length = self._past_length(args)
        if length is None:
            return self._run_dense(args, statistics, "the layers hold different numbers of cached tokens")
        first = self._padding(args, batch, length + new)
        if first is None:
            return self._run_dense(args, statistics, "the padding mask is not left padding")
        sequence, slab = self._locate(args, batch, new, first, statistics)
        try:
            sequence.publish()
            sequence.before_later_prefill()
            return self._prefill(args, sequence, slab, new)
        finally:
            slab.reserved = False

    def _prefill(self, args, sequence: Sequence, slab: KVSlab, new: int):
        plan = self.plan
        sequence.length_host.fill_(sequence.length)
        try:
            results = self.compiled(
                *(args[i] for i in plan.keep), *slab.nominal, sequence.length_host, sequence.first_host, sequence.ticket
            )
        except BaseException:
            sequence.truncate(sequence.length)
            raise
        sequence.prefilled(sequence.length + new)
        views = slab.views(sequence.length)
        for view in views:
            # The first decode step then compiles for any length at once.
            torch._dynamo.maybe_mark_dynamic(view, 2)
        return self._outputs(results, views)

    # ------------------------------------------------------------------ decode

    def _decode(self, args, statistics):
        plan = self.plan
        batch = plan.batch(args)
        length = self._past_length(args)
        if length is None:
            return self._run_dense(args, statistics, "the layers hold different numbers of cached tokens")
        first = self._padding(args, batch, length + 1)
        if first is None:
            return self._run_dense(args, statistics, "the padding mask is not left padding")
        sequence, slab = self._locate(args, batch, 1, first, statistics)
        try:
            sequence.publish()
            self._count(sequence)
            index = sequence.index.nominal
            state = [
                *slab.nominal,
                sequence.length_device,
                sequence.first_device,
                *(index[n] for n in self._index_names),
            ]
            results = self.compiled(*(args[i] for i in plan.keep), *state)
            sequence.length += 1
            sequence.offer_appended()
            return self._outputs(results, slab.views(sequence.length))
        except BaseException:
            # The step may have ended or not: the length on the device must be the one that the host knows.
            sequence.length_device.fill_(sequence.length)
            raise
        finally:
            slab.reserved = False

    def _past_length(self, args) -> int | None:
        """Cached tokens before this call; None if the layers differ, which a graph without lengths cannot express."""
        lengths = {args[position].shape[2] for position in self.plan.past}
        return lengths.pop() if len(lengths) == 1 else None

    def _known(self, args):
        """The sequence whose slab holds exactly the past K and V of this call at its present length."""
        past = [args[position] for position in self.plan.past]
        slab = REGISTRY.slab_at(past[0].data_ptr())
        sequence = None if slab is None else REGISTRY.sequence_of(slab)
        if sequence is None or sequence.config != self.config or sequence.length != past[0].shape[2]:
            return None, None
        return (sequence, slab) if slab.holds(past, sequence.length) else (None, None)

    def _locate(self, args, batch: int, new: int, first: list[int], statistics) -> tuple[Sequence, KVSlab]:
        """The sequence and slab of the past K and V, with room for ``new`` tokens; copies where it must. Reserved."""
        plan = self.plan
        sequence, slab = self._known(args)
        length = args[plan.past[0]].shape[2]
        if sequence is None:
            sequence, slab = self._cropped(args, length)
        if sequence is None:
            slab = REGISTRY.pool.take(plan.geometry, batch, length + new)
            for view, position in zip(slab.views(length), plan.past, strict=True):
                view.copy_(args[position])
            sequence = REGISTRY.attach(slab, self.config, plan.geometry, batch)
            statistics.adopted += 1
            self._begin(sequence, statistics, first, length)
            sequence.offer_all()
        elif length + new > slab.capacity:
            larger = REGISTRY.pool.take(plan.geometry, batch, length + new + slab.capacity // 2)
            for target, source in zip(larger.views(length), slab.views(length), strict=True):
                target.copy_(source)
            REGISTRY.move(sequence, slab, larger)
            slab = larger
        slab.reserved = True
        if sequence.first != first:
            # Other rows are padded than when the index was built: it describes another mask.
            self._begin(sequence, statistics, first, length)
            sequence.offer_all()
        sequence.account_to(statistics)
        return sequence, slab

    def _cropped(self, args, length: int):
        """The sequence of a cache that was cropped in place; none if another cache still views the longer content."""
        past = [args[position] for position in self.plan.past]
        slab = REGISTRY.slab_at(past[0].data_ptr())
        sequence = None if slab is None else REGISTRY.sequence_of(slab)
        if slab is None or sequence is None or sequence.config != self.config or length >= sequence.length:
            return None, None
        if not slab.holds(past, length) or slab.foreign_uses() > len(past):
            return None, None
        sequence.truncate(length)
        return sequence, slab

    # ------------------------------------------------------------------ static caches

    def _static_prefill(self, args, statistics):
        plan = self.plan
        batch, new = plan.batch(args), plan.num_new(args)
        length = 0 if plan.static_length is None else int(args[plan.static_length])
        first = self._static_padding(args, batch, length, new)
        if first is None:
            return self._run_dense(args, statistics, "the mask is not causal with left padding")
        if plan.static_in_outputs:
            sequence = self._new_static(batch, plan.static_capacity(args))
            self._begin(sequence, statistics, first)
        else:
            keys = [args[i] for i in plan.static_keys]
            sequence, _ = self._static_sequence(keys[0], batch, first, length, statistics)
            sequence.keys = keys.__getitem__
        sequence.length_host.fill_(length)
        try:
            if length:
                sequence.before_later_prefill()
            results = self.compiled(
                *(args[i] for i in plan.keep), sequence.length_host, sequence.first_host, sequence.ticket
            )
        except BaseException:
            sequence.truncate(length)
            raise
        finally:
            sequence.keys = None  # the sequence must not keep alive what it dies with
        sequence.prefilled(length + new)
        results = self._outputs(results, [])
        keys = [(results if plan.static_in_outputs else args)[i] for i in plan.static_keys]
        for key in keys:
            # Compiled prefill makes these buffers itself, so the cache's own marking never ran.
            torch._dynamo.mark_static_address(key)
        self._remember_static(keys[0], sequence)
        return results

    def _static_decode(self, args, statistics):
        plan = self.plan
        keys = [args[i] for i in plan.static_keys]
        batch = plan.batch(args)
        if keys[0].is_inference():
            return self._run_dense(
                args, statistics, "a static cache made under torch.inference_mode() cannot be tracked"
            )
        length = int(args[plan.static_length])
        first = self._static_padding(args, batch, length, 1)
        if first is None:
            return self._run_dense(args, statistics, "the mask is not causal with left padding")
        sequence, known = self._static_sequence(keys[0], batch, first, length, statistics)
        sequence.keys = keys.__getitem__
        try:
            if not known:
                sequence.offer_all()
            sequence.publish()
            self._count(sequence)
            index = sequence.index.nominal
            results = self.compiled(
                *(args[i] for i in plan.keep), sequence.first_device, *(index[n] for n in self._index_names)
            )
            sequence.length += 1
            self._remember_static(keys[0], sequence)
            sequence.offer_appended()
        finally:
            sequence.keys = None
        return self._outputs(results, [])

    def _static_sequence(
        self, key: torch.Tensor, batch: int, first: list[int], length: int, statistics
    ) -> tuple[Sequence, bool]:
        """The sequence of a static cache that holds ``length`` tokens, and whether it knew them; else it begins anew."""
        sequence = REGISTRY.static_sequence(key)
        if sequence is None or key.is_inference() or not self._fits(sequence, batch, key.shape[2]):
            sequence = self._new_static(batch, key.shape[2])
        elif length and sequence.length == length and sequence.version == key._version and sequence.first == first:
            sequence.account_to(statistics)
            return sequence, True
        # The cache was reset, or holds what the backend never saw; another version: somebody else wrote to it.
        statistics.adopted += int(length > 0)
        self._begin(sequence, statistics, first, length)
        return sequence, False

    def _fits(self, sequence: Sequence, batch: int, capacity: int) -> bool:
        sizes = sequence.config, sequence.geometry, sequence.batch, sequence.shape.tokens
        return sizes == (self.config, self.plan.geometry, batch, capacity)

    def _new_static(self, batch: int, capacity: int) -> Sequence:
        return Sequence(self.config, self.plan.geometry, batch, capacity, None, REGISTRY.memory(self.config))

    def _remember_static(self, key: torch.Tensor, sequence: Sequence) -> None:
        if key.is_inference():
            return
        sequence.version = key._version
        if REGISTRY.static_sequence(key) is not sequence:
            REGISTRY.bind_static(key, sequence)

    def _static_padding(self, args, batch: int, length: int, new: int) -> list[int] | None:
        if self.plan.mask is not None:
            return padding_of_given(args[self.plan.mask], length, batch)
        if self.plan.padding is not None:
            return self._padding(args, batch, length + new)
        return [0] * batch

    # ------------------------------------------------------------------ shared

    def _padding(self, args, batch: int, length: int) -> list[int] | None:
        """First real token of each row once the cache holds ``length`` tokens.

        Read at every step: nothing else says that a mask is still the one of the step before.
        """
        if self.plan.padding is None:
            return [0] * batch
        mask = args[self.plan.padding]
        # A mask may be longer than what it masks; where it is shorter, the tokens behind it are not seen.
        return left_padding(mask[:, :length]) if mask.shape[1] >= length else None

    def _begin(self, sequence: Sequence, statistics, first: list[int], length: int = 0) -> None:
        sequence.settle()
        sequence.statistics = statistics
        sequence.restart(first, length)

    def _count(self, sequence: Sequence) -> None:
        statistics = sequence.statistics
        statistics.decode_steps += 1
        if sequence.indexed_layers() == self.plan.geometry.num_layers:
            statistics.sparse_steps += 1
        elif sequence.length + 1 <= self.config.min_context:
            statistics.dense("the context is not longer than min_context")
        elif sequence.unseen_queries:
            statistics.dense("the backend never saw the queries of this prompt, which graph='attention' needs")
        else:
            statistics.dense("the partition was not ready yet")

    def _run_dense(self, args, statistics, reason: str):
        if self.plan.phase == "decode":
            statistics.decode_steps += 1
        statistics.dense(reason)
        return self.dense(*args)

    def _outputs(self, results: Arguments, views: list[torch.Tensor]) -> list:
        outputs: list = [None] * self.plan.num_outputs
        for position, result in zip(self.plan.kept_outputs, results, strict=True):
            outputs[position] = result
        for position, view in zip(self.plan.kv_outputs, views, strict=True):
            outputs[position] = view
        return outputs
