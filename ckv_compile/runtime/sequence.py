"""One cache as the runtime sees it: host mirrors of its lengths, and what of it is given to workers (``work``).

What comes back is published by the caller's thread between steps, so that a compiled step never sees half an index and
nothing ever waits for a partition (unless ``deterministic`` asks for it).
"""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from typing import Any

import torch

import ckv_compile.ops
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig
from ckv_compile.errors import PartitionError
from ckv_compile.index_layout import IndexShape, assigns_tokens, in_blocks
from ckv_compile.policies import TokenPolicy, policy_of
from ckv_compile.reference.nominal import cache_prefix
from ckv_compile.runtime import cuda_graphs, jobs, outbox, publication, turns
from ckv_compile.runtime.device_graph import ArrivingGraphs
from ckv_compile.runtime.index import CommunityIndex
from ckv_compile.runtime.layer_edges import LayerEdges
from ckv_compile.runtime.moments import moment, seconds_between
from ckv_compile.runtime.rows import Origins
from ckv_compile.runtime.statistics import RunStatistics
from ckv_compile.runtime.step_check import StepCheck
from ckv_compile.runtime.transfer import Arriving, pinned
from ckv_compile.runtime.turns import Turns
from ckv_compile.runtime.work import Finished, Job, Work

log = logging.getLogger(__name__)
_identifiers = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()  # by the id that tickets carry


class Sequence:
    """State of one batch of sequences that share a cache.

    keys, values: callables that return K and V of a layer as ``[B, Hkv, n, D]`` covering at least ``n`` tokens.
    """

    @torch.inference_mode(False)  # its tensors outlive a call in inference mode
    def __init__(
        self, config: CommunityConfig, geometry: Any, batch: int, capacity: int, keys, memory, values=None
    ) -> None:
        self.config, self.geometry, self.batch, self.keys, self.values = config, geometry, batch, keys, values
        self.memory: ResolutionMemory = memory
        self.identifier = next(_identifiers)
        self.statistics = RunStatistics(geometry.num_layers)
        self.length = 0
        self.first = [0] * batch
        self.padded = False
        device = geometry.device
        self.shape = IndexShape.for_cache(config, geometry, batch, capacity)
        self.index = CommunityIndex(self.shape, config, geometry.dtype, device)
        self.length_device = torch.zeros(1, dtype=torch.int32, device=device)
        self.version = -1  # of a static cache's first K after our last step
        self._counter: tuple[weakref.ref[torch.Tensor], int] | None = None  # of a static cache, and its version then
        self._last_key: tuple[torch.Tensor, int] | None = None  # of a static cache's last layer, and its version then
        self.check: StepCheck | None = None  # verifies steps since one was judged
        self.captured = False  # the caller recorded a step: its replays change the cache behind our back
        self.first_device = torch.zeros(batch, dtype=torch.int32, device=device)
        self.first_host = torch.zeros(batch, dtype=torch.int32)
        self.length_host = torch.zeros(1, dtype=torch.int32)
        self.ticket = torch.tensor([self.identifier, 0], dtype=torch.int64)
        self.work = Work(config, device)
        self.closed = [0] * geometry.num_layers  # tokens up to which blocks were joined, or could not be
        self.submitted = [0] * geometry.num_layers
        self.edges = [LayerEdges() for _ in range(geometry.num_layers)]
        self.origins = Origins()
        self.turns = Turns(config, geometry.num_layers)
        self.prompt = 0  # tokens of the newest prefill and before: they are published as soon as they are back
        self.unseen_queries = False
        self.refreshed_at = self.repaired_at = 0
        self.prefilled_at: Any = None  # the moment, until the index of that prefill is published
        self.awaited = [0] * geometry.num_layers  # tokens up to which that index reaches
        self.index_lags: list[tuple[Any, Any]] = []  # moments of a prefill and of its index, until somebody asks
        self.error: str | None = None
        _live[self.identifier] = self

    # ------------------------------------------------------------------ life

    def restart(self, first: list[int], length: int = 0) -> None:
        """Begin anew in the same buffers: a prompt, or a cache of ``length`` tokens of which nothing else is known."""
        self.forget_judgement()
        self.captured = False
        self.prefilled_at = None
        self._forget_submitted()
        self.length = self.prompt = self.refreshed_at = self.repaired_at = length
        self.length_device.fill_(length)
        self.index.clear()
        self.submitted = [0] * self.geometry.num_layers
        self.closed = [0] * self.geometry.num_layers
        self.edges = [LayerEdges() for _ in range(self.geometry.num_layers)]
        self.unseen_queries = length > 0 and (not self.in_blocks or policy_of(self.config.policy).sees_prompt)
        self.set_first(first)

    def prefilled(self, length: int) -> None:
        """A prefill has run; the cache holds ``length`` tokens."""
        self.forget_judgement()
        self.length = self.prompt = self.refreshed_at = self.repaired_at = length
        self.length_device.fill_(length)
        self.statistics.prefills += 1
        self.turns.refreshing.clear()  # the prefill's own partition has their tokens
        if assigns_tokens(self.config):
            # Decode steps log their edges from here on; tokens that were assigned are attended until the new index.
            for layer, marks in enumerate(self.index.marks):
                self.index.n_indexed[layer].fill_(marks[-1][0] if marks else 0)
            self.index.begin_log(length)
        if length > self.config.min_context:
            self.prefilled_at = moment(self.geometry.device)
            self.awaited = list(self.submitted) if self.in_blocks else [length] * self.geometry.num_layers

    def set_first(self, first: list[int]) -> None:
        self.first, self.padded = list(first), any(first)
        values = torch.tensor(first, dtype=torch.int32)
        self.first_host.copy_(values)
        self.first_device.copy_(pinned(values.numpy(), self.first_device.device), non_blocking=True)

    def close(self) -> None:
        self.settle()
        self._forget_submitted()
        _live.pop(self.identifier, None)

    def abandon(self) -> None:
        """The cache is gone and with it the index; only ``settle`` may follow. Touches no tensor and takes no lock."""
        self.work.abandon()
        self.index.release()
        self.edges = [LayerEdges() for _ in self.edges]
        self._last_key = None
        _live.pop(self.identifier, None)

    def truncate(self, length: int) -> None:
        """The cache was cropped to ``length`` tokens, or a call that would have gone beyond them failed."""
        self.forget_judgement()
        # Rejected drafts were never submitted: what is under way then describes tokens that stay.
        reached = max(self.refreshed_at, *self.submitted, *(edges.tokens for edges in self.edges))
        if reached > length:
            self._forget_submitted(length if self.in_blocks else 0)
        self.index.truncate(length)
        for layer, edges in enumerate(self.edges):
            if reached > length:
                self.submitted[layer] = self._still_submitted(layer)
            self.awaited[layer] = min(self.awaited[layer], self.submitted[layer] if self.in_blocks else length)
            if edges.tokens > length:
                edges.truncate(length)
            marks = self.index.marks[layer]
            self.closed[layer] = min(self.closed[layer], marks[-1][0] if marks else 0)
        self.length, self.prompt = length, min(self.prompt, length)
        self.refreshed_at = min(self.refreshed_at, length)
        self.repaired_at = min(self.repaired_at, length)
        self.length_device.fill_(length)

    def _forget_submitted(self, kept: int = 0) -> None:
        """Of what is under way, only blocks that end within the first ``kept`` tokens are wanted: the others are gone."""
        self.work.forget(kept)
        self.turns.anew()

    def _still_submitted(self, layer: int) -> int:
        """Tokens of a layer up to which blocks are published or under way."""
        return max([self.work.reaches(layer), *(tokens for tokens, _ in self.index.marks[layer])])

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens; the buffers move."""
        self.forget_judgement()
        self.shape = IndexShape.for_cache(self.config, self.geometry, self.batch, capacity)
        self.index = self.index.grown(self.shape)

    # ------------------------------------------------------------------ steps that go on

    def judged(self) -> None:
        """The mask of a step was read and fits; later steps are verified on the device."""
        self.forget_judgement()
        self.check = StepCheck(self.batch, self.shape.tokens, self.first, self.length, self.geometry.device)

    def forget_judgement(self) -> None:
        """The next step must be looked at again."""
        self.audit()
        self.check = self._counter = None

    def audit(self) -> None:
        """Note and warn if a step so far was another one than was assumed. Waits for the device where it must."""
        if self.check is not None and self.check.what and self.check.concluded():
            warnings.warn(self.give_up(), RuntimeWarning, stacklevel=2)

    def give_up(self) -> str:
        """A step was another one than was assumed: what was, for an error; the report tells it too."""
        assert self.check is not None
        message = self.check.message(self.length)
        self.check = None
        self.statistics.broken.append(message)
        return message

    def remember_counter(self, counter: torch.Tensor | None) -> None:
        """counter: the tensor that counts the tokens of a static cache, as our call left it."""
        if counter is None or counter.is_inference():
            self._counter = None
        else:
            self._counter = weakref.ref(counter), counter._version

    def knows_counter(self, counter: torch.Tensor) -> bool:
        """Whether nobody wrote to the counter since our call, so that it holds ``length``."""
        if self._counter is None:
            return False
        reference, version = self._counter
        return reference() is counter and counter._version == version

    def remember_key(self, key: torch.Tensor) -> None:
        """key: K of a static cache's last layer, as our call left it.

        By it the cache is known again when its rows have moved into a new one; its memory may so outlive the cache.
        """
        if self._last_key is None or self._last_key[0].data_ptr() != key.data_ptr():
            self._last_key = key.detach(), key._version  # another tensor: that of the cache must be free to die
        else:
            self._last_key = self._last_key[0], key._version

    def left_key(self) -> torch.Tensor | None:
        """What ``remember_key`` kept, if nobody wrote to it since."""
        if self._last_key is None or self._last_key[0]._version != self._last_key[1]:
            return None
        return self._last_key[0]

    def may_move(self) -> bool:
        """Whether the rows of a static cache that dies may have moved into another one."""
        return self.batch > 1 and self._last_key is not None

    # ------------------------------------------------------------------ submission

    def observe(self, layer: int, query: torch.Tensor, key: torch.Tensor, length: int, scale: float) -> None:
        """Handler of ``ckv::observe_prompt``: query [B, Hq, Q, D] of a prefill behind ``length`` tokens, key of all."""
        policy = policy_of(self.config.policy)
        if isinstance(policy, TokenPolicy):
            policy.observe(self.index.of_policy(layer), query, key, length, self.first, scale)

    def offer(self, layer: int, key: torch.Tensor, length: int, num_new: int, neighbor, weight) -> None:
        """Handler of ``ckv::submit_partition``: the layer now holds ``length + num_new`` tokens."""
        upto = length + num_new
        if neighbor is not None:
            edges = self.edges[layer]
            if edges.tokens == length:
                keys = self._key_neighbors(key, length, upto) if self.config.graph == "mixed" else None
                whole = length == 0 and upto > self.config.min_context  # and so partitioned at once, from these alone
                # Clones: the graph that runs may write to its own tensors as soon as this returns.
                edges.append(self._piece(neighbor.clone(), weight.to(torch.float32, copy=True), keys, build=whole))
        if upto <= self.config.min_context:
            return
        if self.in_blocks:
            if not self.unseen_queries:
                self.offer_blocks(layer, key, upto, final=length == 0)
        elif self.edges[layer].tokens == upto:
            self.offer_whole(layer, warm=length > 0)

    @property
    def in_blocks(self) -> bool:
        return in_blocks(self.config)

    def offer_appended(self) -> None:
        """After a decode step: index what has gathered behind the index ("keys"), or refresh it, a few layers at a time."""
        turns.offer_gathered(self)

    def offer_all(self) -> None:
        """Index a cache whose prompt the backend never saw, from its keys alone."""
        if self.in_blocks and not self.unseen_queries and self.length > self.config.min_context:
            for layer in range(self.geometry.num_layers):
                self.offer_blocks(layer, self.keys(layer), self.length, final=True)

    def before_later_prefill(self) -> None:
        """The log of generated tokens is about to begin anew behind the new ones: bring in what it holds."""
        if assigns_tokens(self.config) and not self.in_blocks and not self.unseen_queries:
            for layer in range(self.geometry.num_layers):
                self._collect_logged_edges(layer)

    def refresh(self, layer: int, anew: bool) -> None:
        """Bring what was generated into a layer's partition: partition all of it again, or repair it."""
        self._collect_logged_edges(layer)
        edges = self.edges[layer]
        if edges.tokens < self.length:
            return
        if anew:
            self.offer_whole(layer, warm=True)
        elif edges.kept is not None:
            self._offer_repair(layer)

    def keep(self, finished: Finished) -> None:
        """A partition of a whole layer was published: what the next one starts from."""
        self.edges[finished.layer].keep(finished.result, finished.stop, self.origins.now)

    def offer_blocks(self, layer: int, key: torch.Tensor, upto: int, *, final: bool) -> None:
        """Submit what a layer holds behind what was submitted: all of it, or as many whole blocks as there are."""
        block, least = self.config.block_size, self.config.append_block
        while self.submitted[layer] < upto:
            start = self.submitted[layer]
            room = block - start % block  # up to where the next full block begins
            if final:
                size, stop = block, upto
            elif upto - start >= room:
                size, stop = room, start + (upto - start) // room * room if room == block else start + room
            else:
                size, stop = least, start + (upto - start) // least * least
            if stop == start:
                return
            if not key.is_cuda:  # workers have the first block while the host compares the keys of the next
                stop = min(stop, start + size)
            self.submitted[layer] = stop
            policy, config = policy_of(self.config.policy), self.config
            keys = cache_prefix(key, stop, "key")  # a prefill's is nominal
            policy.prepare(self.index.of_policy(layer), keys, start, stop, size, self.first, config)
            given = policy.block_input(keys, self.first_host, start, stop, size, self.shape.graphs, config)
            neighbors = Arriving(given)
            for begin in range(start, stop, size):
                end = min(begin + size, stop)
                first = [max(0, row + self.config.num_sink_tokens - begin) for row in self.first]
                self._submit(
                    layer, begin, end, jobs.partition_block, neighbors.part(2, begin - start, end - start), first,
                    self.config, self.memory, layer, None, upto,
                )  # fmt: skip

    def submit_joined(self, layer: int, start: int, stop: int) -> None:
        """Partition the published small blocks of these positions together."""
        config = self.config
        self.work.joining.add(layer)
        neighbors = Arriving(self._block_neighbors(self.keys(layer), start, stop, stop - start))
        first = [max(0, row + config.num_sink_tokens - start) for row in self.first]
        self._submit(
            layer, start, stop, jobs.partition_block, neighbors, first, config, self.memory, layer, self.work.backlog(),
            self.length, joins=True,
        )  # fmt: skip

    def offer_whole(self, layer: int, *, warm: bool) -> None:
        """Have all of a layer partitioned; warm: from what there is of it."""
        edges, common = self.edges[layer], (self.shape.graphs, self.config, self.memory, layer, self.work.backlog())
        kept, later = edges.kept_partition(), edges.pieces_behind()
        if warm and later:
            given: tuple = (jobs.refresh_edges, later, kept, *common)
        else:
            first = [row + self.config.num_sink_tokens for row in self.first]
            given = (jobs.partition_edges, edges.all_pieces(), kept if warm else None, first, *common)
        self._submit(layer, 0, edges.tokens, *given, by_graph=True)

    def _offer_repair(self, layer: int) -> None:
        edges = self.edges[layer]
        pieces = edges.pieces_behind()
        if pieces:
            given = pieces, edges.kept_partition(), self.shape.graphs, self.config
            self._submit(layer, 0, edges.tokens, jobs.repair_edges, *given)

    def _submit(
        self, layer: int, start: int, stop: int, function, *args, joins: bool = False, by_graph: bool = False
    ) -> None:
        """Have workers partition positions ``start .. stop - 1`` by ``function`` (``Work.submit``)."""
        assert len(self.first) == self.batch
        first = [max(0, row + self.config.num_sink_tokens - start) for row in self.first]
        job = Job(layer, start, stop, first, self.shape.graphs, self.origins.now, joins, by_graph)
        self.work.submit(job, function, *args)
        self._reap()

    def _reap(self) -> None:
        self.statistics.partition_seconds += self.work.reap()

    def _block_neighbors(self, key: torch.Tensor, start: int, stop: int, size: int) -> torch.Tensor:
        """Key neighbours in blocks of ``size`` tokens, the last one perhaps shorter, relative to the start of each."""
        config = self.config
        joined = config.graph_aggregation == "layer"
        return torch.ops.ckv.key_neighbors(
            key, self.first_host, start, stop, config.kappa, config.num_sink_tokens, joined, size
        )

    def _key_neighbors(self, key: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Key neighbours of positions ``start .. stop - 1`` inside blocks, as absolute positions."""
        size = self.config.block_size
        found = self._block_neighbors(key, start, stop, size)
        offset = torch.arange(stop - start, dtype=torch.int32, device=found.device)
        begin = offset.div_(size, rounding_mode="floor").mul_(size).add_(start)
        return torch.where(found >= 0, found + begin[:, None], found)

    def _piece(
        self, neighbor: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor | None, *, build: bool = False
    ) -> jobs.EdgePiece:
        """Lists ``[B, H, m, kappa]`` on their way to the host; the caller gives them away.

        build: have the graphs of exactly these lists built on the device, where there is one.
        """
        graphs = None
        if build and outbox.leaves_by_outbox(neighbor.device):
            first = [row + self.config.num_sink_tokens for row in self.first]
            graphs = ArrivingGraphs.send(neighbor, weight, keys, first, self.shape.graphs, self.config)
        arriving = None if keys is None else Arriving(keys)
        lists = Arriving(neighbor), Arriving(weight), arriving
        return jobs.EdgePiece(*lists, neighbor.shape[2], graphs, self.origins.now)

    def _collect_logged_edges(self, layer: int) -> None:
        """Take the edges of generated tokens, which decode steps logged; a worker gets them when they have arrived."""
        index, room, edges = self.index, self.shape.log, self.edges[layer]
        base = index.log_starts[layer]
        if edges.tokens < base:
            return  # what the log began behind: this layer keeps its partition
        low, high = edges.tokens - base, min(self.length - base, room)
        if low < high:
            self._take_edges(layer, index.edge_neighbor[layer], index.edge_weight[layer], low, high)
        lost = self.length - edges.tokens
        if lost > 0:  # the log was full: these tokens are known by no edge
            none = self.batch, self.shape.lists, lost, self.shape.kappa
            neighbor = index.edge_neighbor.new_full(none, -1)
            self._take_edges(layer, neighbor, index.edge_weight.new_zeros(none), 0, lost)

    def _take_edges(self, layer: int, neighbor: torch.Tensor, weight: torch.Tensor, low: int, high: int) -> None:
        """Append entries ``low .. high - 1`` of lists ``[B, H, m, kappa]``, which go on behind the layer's edges."""
        edges, keys = self.edges[layer], None
        if self.config.graph == "mixed":
            keys = self._key_neighbors(self.keys(layer), edges.tokens, edges.tokens + high - low)
        edges.append(self._piece(neighbor[:, :, low:high].clone(), weight[:, :, low:high].clone(), keys))

    # ------------------------------------------------------------------ publication

    def publish(self, *, spread: bool = False) -> None:
        """Publish what came back. Cheap when nothing did.

        spread: a step follows. Of what is not the newest prefill's, a few layers are published (``turns``), the others
        before later steps.
        """
        if self.config.deterministic:
            self.wait()
        for error in self.work.receive():
            self._failed(error)
        if self.work.waiting or self.work.joined:
            try:
                publication.publish_layers(self, self.turns.published if spread else self.geometry.num_layers)
            finally:
                self.index.flush()
            self._published()
        if self.turns.unjoined and (self.config.deterministic or not spread):
            turns.offer_joined(self, self.geometry.num_layers)

    def _published(self) -> None:
        self._reap()
        if self.prefilled_at is not None and self._reaches_awaited():
            self.index_lags.append((self.prefilled_at, moment(self.geometry.device)))
            self.prefilled_at = None
        if self.error is not None and self.config.strict:
            error, self.error = self.error, None
            raise PartitionError(error)

    def wait(self) -> None:
        """Until every submitted partition is back."""
        self.statistics.waited_seconds += self.work.wait()

    def _failed(self, error: str) -> None:
        log.warning("a partition failed; contiguous pages stand in, or an earlier one stays: %s", error)
        self.statistics.failures.append(error)
        self.error = error

    # ------------------------------------------------------------------ reading

    def account_to(self, statistics: RunStatistics) -> None:
        """From here on, what happens to this cache is told to ``statistics``."""
        if statistics is not self.statistics:
            self.settle()
            self.statistics = statistics

    def settle(self) -> None:
        """Move the device counters, and the time of answered jobs, into the statistics. Waits for the device."""
        if cuda_graphs.capturing():
            return  # nothing may be read now
        self.audit()
        self._reap()
        self.statistics.collect(self.index.tally)
        lags, self.index_lags = self.index_lags, []
        self.statistics.index_lag_seconds += [seconds_between(*lag) for lag in lags]

    def _reaches_awaited(self) -> bool:
        """Whether the index of the newest prefill is complete."""
        return all(
            marks and marks[-1][0] >= tokens for marks, tokens in zip(self.index.marks, self.awaited, strict=True)
        )

    def indexed_layers(self) -> int:
        return sum(bool(marks) for marks in self.index.marks)


def _handle_submission(identifier: int, layer: int, key, length: int, num_new: int, neighbor, weight) -> None:
    sequence = _live.get(identifier)
    if sequence is not None:
        sequence.offer(layer, key, length, num_new, neighbor, weight)


def _handle_prompt(identifier: int, layer: int, query, key, length: int, scale: float) -> None:
    sequence = _live.get(identifier)
    if sequence is not None:
        sequence.observe(layer, query, key, length, scale)


ckv_compile.ops.submit_partition.set_handler(_handle_submission)
ckv_compile.ops.observe_prompt.set_handler(_handle_prompt)
