"""Runs a rewritten graph: finds the cache's sequence, calls with its state, hands results over.

This thin wrapper lies outside AOTAutograd. A call whose cache or mask it cannot vouch for runs the graph as dynamo
gave it: dense, never wrong.

A decode step has one new token per row, or a few. On CUDA it never waits for the device. Its mask is read at the first
step after a prefill, an adoption or a crop; at later ones it is verified on the device (``step_check``), and a mask
that breaks the rule raises RuntimeError a step or more later. A step that the caller captures with
``torch.cuda.graph`` is launched as it is, unverified: what it needs must be there from a step before. No code of ours
runs when the caller replays it, so the index stays as it was and new tokens are attended behind it, and the caller
must not replay more steps than the cache has room for; calls after that look at everything again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from collections.abc import Sequence as Arguments
from typing import Any

import torch

from ckv_compile.community.partition import warm_up
from ckv_compile.config import CommunityConfig
from ckv_compile.runtime import cuda_graphs
from ckv_compile.runtime.block_lists import visits_causal
from ckv_compile.runtime.caches import Caches
from ckv_compile.runtime.cuda_graphs import CudaGraphs
from ckv_compile.runtime.padding import left_padding, padding_of_given
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab

NOT_LEFT_PADDING = "the padding mask is not left padding"
NOT_CAUSAL = "the mask is not causal with left padding"
OTHER_BLOCKS = "the block mask of flex_attention is not causal with left padding"
UNEVEN_LAYERS = "the layers hold different numbers of cached tokens"
OTHER_COUNT = "a layer with a sliding window counts other tokens than the others hold"


@functools.cache
def prepare(config: CommunityConfig) -> None:
    """Compile the kernels of the partition now, in the caller's thread: later it would hold the GIL while steps run."""
    if config.policy == "communities":
        warm_up(config)


def verifies_later(device: torch.device) -> bool:
    """Whether reading a tensor of this device makes the host wait, so that steps are verified on the device."""
    return device.type == "cuda"


def _picker(positions: list[int]) -> Callable[[Arguments], Arguments]:
    """A function that picks these positions of a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: [args[position] for position in positions]


class GraphRunner:
    """Callable that stands for a rewritten graph.

    compiled: the graph after ``plan`` (a ``RewritePlan``); dense: the graph as dynamo gave it; entry_of: finds what is
    recorded about the model whose parameters are among the arguments; graphs: what Inductor recorded of ``compiled``;
    counts: whether the graph itself advances the counter of a static cache, by the number of new tokens.
    """

    def __init__(
        self,
        plan: Any,
        config: CommunityConfig,
        compiled: Callable,
        dense: Callable,
        entry_of,
        graphs: CudaGraphs | None = None,
        counts: bool = False,
    ) -> None:
        self.plan, self.config, self.compiled, self.dense, self.entry_of = plan, config, compiled, dense, entry_of
        self.caches = Caches(config, plan.geometry)
        self.graphs, self.counts = graphs or CudaGraphs("the graph was not compiled"), counts
        self._index_names = tuple(
            name for name in plan.state if not name.startswith(("key_", "value_")) and name not in ("length", "first")
        )
        self._kept, self._past = _picker(plan.keep), _picker(plan.past)
        self._verifies_later = verifies_later(plan.geometry.device)
        self._new = plan.queries  # of a decode step
        self._masked = plan.padding is not None or plan.mask is not None
        cache = plan.cache.name
        self.call = {
            ("prefill", "EMPTY"): self._first_prefill,
            ("prefill", "DYNAMIC"): self._later_prefill,
            ("prefill", "STATIC"): self._static_prefill,
            ("decode", "DYNAMIC"): self._decode,
            ("decode", "STATIC"): self._static_decode,
        }[plan.phase, cache]

    def __call__(self, *args):
        statistics = self.entry_of(args).statistics
        if self.plan.blocks is not None and not self._visits_causal(args):
            return self._run_dense(args, statistics, OTHER_BLOCKS)
        return self.call(args, statistics)

    # ------------------------------------------------------------------ prefill

    def _first_prefill(self, args, statistics):
        cuda_graphs.require_no_capture("a prefill")
        plan = self.plan
        batch, new = plan.batch(args), plan.num_new(args)
        first = self._padding(args, batch, new)
        if first is None:
            return self._run_dense(args, statistics, NOT_LEFT_PADDING)
        slab = REGISTRY.pool.take(plan.geometry, batch, new)
        try:
            sequence = REGISTRY.attach(slab, self.config, plan.geometry, batch)
            self.caches.begin(sequence, statistics, first)
            return self._prefill(args, sequence, slab, new)
        finally:
            slab.reserved = False

    def _later_prefill(self, args, statistics):
        cuda_graphs.require_no_capture("a prefill")
        plan = self.plan
        batch, new = plan.batch(args), plan.num_new(args)
        past = self._past(args)
        length = self._past_length(past)
        if length is None:
            return self._run_dense(args, statistics, UNEVEN_LAYERS)
        first = self._padding(args, batch, length + new)
        if first is None:
            return self._run_dense(args, statistics, NOT_LEFT_PADDING)
        sequence, slab = self.caches.locate(past, batch, new, first, statistics)
        try:
            sequence.publish()
            sequence.before_later_prefill()
            return self._prefill(args, sequence, slab, new)
        finally:
            slab.reserved = False

    def _prefill(self, args, sequence: Sequence, slab: KVSlab, new: int):
        sequence.length_host.fill_(sequence.length)
        try:
            results = self.compiled(
                *self._kept(args), *slab.nominal, sequence.length_host, sequence.first_host, sequence.ticket
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
        captured = cuda_graphs.capturing()
        past = self._past(args)
        if self._counts_otherwise(args, past[0].shape[2]):
            return self._run_dense(args, statistics, OTHER_COUNT)
        sequence, slab = self.caches.known(past)
        if sequence is not None and sequence.length + self._new > slab.capacity:
            sequence = slab = None
        if captured:
            if sequence is None:
                cuda_graphs.require_no_capture("a decode step whose cache is unknown or full")
            sequence.captured = True
        elif sequence is None or not self._goes_on(args, sequence):
            length = self._past_length(past)
            if length is None:
                return self._run_dense(args, statistics, UNEVEN_LAYERS)
            batch = self.plan.batch(args)
            first = self._padding(args, batch, length + self._new)
            if first is None:
                return self._run_dense(args, statistics, NOT_LEFT_PADDING)
            sequence, slab = self.caches.locate(past, batch, self._new, first, statistics)
            if self._verifies_later and self._masked:
                sequence.judged()
        slab.reserved = True
        try:
            sequence.account_to(statistics)
            if not captured:
                sequence.publish(spread=True)
            self._count(sequence)
            results = self.compiled(
                *self._kept(args),
                *slab.nominal,
                sequence.length_device,
                sequence.first_device,
                *sequence.index.nominal_of(self._index_names),
            )
            sequence.length += self._new
            if not captured:
                sequence.offer_appended()
            return self._outputs(self.graphs.keep(results, args), slab.views(sequence.length), args)
        except BaseException:
            # The step may have ended or not: the length on the device must be the one that the host knows.
            if not captured:
                sequence.length_device.fill_(sequence.length)
            raise
        finally:
            slab.reserved = False

    def _past_length(self, past: Arguments[torch.Tensor]) -> int | None:
        """Cached tokens before this call; None if the layers differ, which a graph without lengths cannot express."""
        lengths = {tensor.shape[2] for tensor in past}
        return lengths.pop() if len(lengths) == 1 else None

    # ------------------------------------------------------------------ static caches

    def _static_prefill(self, args, statistics):
        cuda_graphs.require_no_capture("a prefill")
        plan = self.plan
        batch, new = plan.batch(args), plan.num_new(args)
        length = 0 if plan.static_length is None else int(args[plan.static_length])
        first = self._static_padding(args, batch, length, new)
        if first is None:
            return self._run_dense(args, statistics, NOT_CAUSAL)
        if plan.static_in_outputs:
            sequence = self.caches.new_static(batch, plan.static_capacity(args))
            self.caches.begin(sequence, statistics, first)
        else:
            keys = [args[i] for i in plan.static_keys]
            sequence, _ = self.caches.static_sequence(keys, batch, first, length, statistics)
            sequence.keys = keys.__getitem__
        sequence.length_host.fill_(length)
        try:
            if length:
                sequence.before_later_prefill()
            results = self.compiled(*self._kept(args), sequence.length_host, sequence.first_host, sequence.ticket)
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
        self.caches.remember_static(keys, None, sequence)
        return results

    def _static_decode(self, args, statistics):
        plan = self.plan
        keys = [args[i] for i in plan.static_keys]
        key, counter = keys[0], args[plan.static_length]
        captured = cuda_graphs.capturing()
        if key.is_inference():
            cuda_graphs.require_no_capture("a decode step on a static cache made under torch.inference_mode()")
            return self._run_dense(
                args, statistics, "a static cache made under torch.inference_mode() cannot be tracked"
            )
        sequence = REGISTRY.static_sequence(key)
        if sequence is not None and not self.caches.is_left(sequence, key):
            sequence = None
        known = True
        if captured:
            if sequence is None:
                cuda_graphs.require_no_capture("a decode step on a static cache that changed since its last step")
            sequence.captured = True
        elif sequence is None or not self._goes_on(args, sequence, counter):
            batch, length = plan.batch(args), int(counter)
            first = self._static_padding(args, batch, length, self._new)
            if first is None:
                return self._run_dense(args, statistics, NOT_CAUSAL)
            if sequence is not None and sequence.captured and sequence.length < length:
                sequence.length = length  # by replays of the caller's, which wrote nothing but new tokens
            sequence, known = self.caches.static_sequence(keys, batch, first, length, statistics)
            if self._verifies_later and (self._masked or not self.counts):
                sequence.judged()
        if self._counts_otherwise(args, sequence.length):
            return self._run_dense(args, statistics, OTHER_COUNT)
        sequence.account_to(statistics)
        sequence.keys = keys.__getitem__
        if self.config.centroid_budget:
            sequence.values = [args[i] for i in plan.static_values].__getitem__
        try:
            if not known:
                sequence.offer_all()
            if not captured:
                sequence.publish(spread=True)
            self._count(sequence)
            results = self.compiled(
                *self._kept(args), sequence.first_device, *sequence.index.nominal_of(self._index_names)
            )
            sequence.length += self._new
            self.caches.remember_static(keys, counter if self.counts else None, sequence)
            if not captured:
                sequence.offer_appended()
        finally:
            sequence.keys = sequence.values = None
        return self._outputs(self.graphs.keep(results, args), [], args)

    def _static_padding(self, args, batch: int, length: int, new: int) -> list[int] | None:
        if self.plan.mask is not None:
            return padding_of_given(args[self.plan.mask], length, batch)
        if self.plan.padding is not None:
            return self._padding(args, batch, length + new)
        return [0] * batch

    # ------------------------------------------------------------------ shared

    def _padding(self, args, batch: int, length: int) -> list[int] | None:
        """First real token of each row once the cache holds ``length`` tokens. Waits for the device."""
        if self.plan.padding is None:
            return [0] * batch
        mask = args[self.plan.padding]
        # A mask may be longer than what it masks; where it is shorter, the tokens behind it are not seen.
        return left_padding(mask[:, :length]) if mask.shape[1] >= length else None

    def _visits_causal(self, args) -> bool:
        """Whether the blocks that flex_attention would visit are those of its mask. Waits for the device, every time:
        making a block mask did too.
        """
        cuda_graphs.require_no_capture("a call of flex_attention, whose block mask is read,")
        plan, blocks = self.plan, self.plan.blocks
        past = self._past_length(self._past(args)) if plan.past else 0
        if plan.static_length is not None:
            past = int(args[plan.static_length])
        if past is None or (blocks.offset is not None and args[blocks.offset] != past):
            return False
        if past and blocks.starts_empty:
            return False
        new = plan.num_new(args)
        keys = past + new if plan.static_capacity is None else plan.static_capacity(args)
        if plan.padding is not None:
            padding, end = args[plan.padding], past + new
            if padding.shape[1] < keys or (blocks.ahead and padding[:, end : end + blocks.ahead].any()):
                return False  # the mask reads padding at every key of a block that it visits
        first = self._padding(args, plan.batch(args), past + new)
        lists = [None if position is None else args[position] for position in blocks.lists]
        return first is not None and visits_causal(lists, first, past, new, blocks.query_block, blocks.key_block, keys)

    def _goes_on(self, args, sequence: Sequence, counter: torch.Tensor | None = None) -> bool:
        """Whether a step continues what is known of its sequence, without a look at its mask and counter.

        They are then being verified on the device. Raises RuntimeError if an earlier step turned out to be another one.
        """
        if sequence.captured:
            return False
        check, length = sequence.check, sequence.length
        if check is not None and check.failed():
            raise RuntimeError(f"{sequence.give_up()}; at this step: {self._mask_now(args, length)}")
        counted = counter is None or sequence.knows_counter(counter)
        if not self._masked and (sequence.padded or counted):
            return not sequence.padded
        if check is None:
            return False
        if self.plan.mask is not None:
            mask = args[self.plan.mask]
            if self._new > 1 or not length < mask.shape[3] <= check.capacity:
                return False
            check.verify_given(mask, length)
        elif self.plan.padding is not None:
            mask = args[self.plan.padding]
            if mask.shape[1] < length + self._new:
                return False
            check.verify_padding(mask, length, self._new)
        if counter is not None and not counted:
            check.verify_counter(counter, length)
        check.conclude()
        return True

    def _mask_now(self, args, length: int) -> str:
        """What the mask of this step says, for an error. Waits for the device."""
        if not self._masked:
            return "no mask"
        if self.plan.mask is not None:
            mask = args[self.plan.mask]
            first = padding_of_given(mask, length, mask.shape[0])
        else:
            first = self._padding(args, self.plan.batch(args), length + self._new)
        return "a mask that is not left padding" if first is None else f"a mask that is zero for the first {first}"

    def _count(self, sequence: Sequence) -> None:
        statistics = sequence.statistics
        statistics.decode_steps += 1
        if sequence.indexed_layers() == self.plan.geometry.num_layers:
            statistics.sparse_steps += 1
        elif sequence.length + self._new <= self.config.min_context:
            statistics.dense("the context is not longer than min_context")
        elif sequence.unseen_queries:
            what = "graph='attention'" if not sequence.in_blocks else f"policy={self.config.policy!r}"
            statistics.dense(f"the backend never saw the queries of this prompt, which {what} needs")
        else:
            statistics.dense("the partition was not ready yet")

    def _run_dense(self, args, statistics, reason: str):
        if self.plan.phase == "decode":
            statistics.decode_steps += 1
        statistics.dense(reason)
        return self.dense(*args)

    def _counts_otherwise(self, args, length: int) -> bool:
        """Whether an integer that the graph takes for the ``length`` of the cache is another one."""
        return any(args[position] != length for position in self.plan.counts)

    def _outputs(self, results: Arguments, views: list[torch.Tensor], args: Arguments = ()) -> list:
        outputs: list = [None] * self.plan.num_outputs
        for position, result in zip(self.plan.kept_outputs, results, strict=True):
            outputs[position] = result
        for position, view in zip(self.plan.kv_outputs, views, strict=True):
            outputs[position] = view
        for position, (source, more) in self.plan.counted.items():
            outputs[position] = args[source] + more
        return outputs
