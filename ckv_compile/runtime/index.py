"""The index of one cache: preallocated buffers with fixed addresses, and publication of partitions into them.

Publication runs on the caller's thread and stream between two steps, so a step reads either the old or the new index.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckv_compile.config import GROUP, CommunityConfig
from ckv_compile.index_layout import (
    EMPTY,
    NOMINAL_STATE,
    PER_COMMUNITY,
    POLICY_STATE,
    IndexShape,
    assigns_tokens,
    centres_keys,
    num_groups,
    state_dtypes,
)
from ckv_compile.runtime import token_log
from ckv_compile.runtime.statistics import LayerPartition
from ckv_compile.runtime.transfer import to_device

if TYPE_CHECKING:
    from ckv_compile.runtime.block_writes import BlockWrite

STAGED_BYTES = 128 << 10  # a partition up to here is copied with others': pinning each would take longer, and a lock


class CommunityIndex:
    """Buffers of ``index_layout`` on the device of K and V; an empty index makes every step dense."""

    @torch.inference_mode(False)  # buffers of a call in inference mode are also read and cleared outside of it
    def __init__(self, shape: IndexShape, config: CommunityConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.config, self.dtype, self.device = shape, config, dtype, device
        self.buffers = {
            name: torch.full(shape.of(name), EMPTY.get(name, 0), dtype=kind, device=device)
            for name, kind in state_dtypes(config, dtype).items()
        }
        if centres_keys(config):  # for publications only: no step reads it
            self.buffers["key_mean"] = torch.zeros(shape.of("key_mean"), dtype=torch.float32, device=device)
        sizes = [[shape.communities, shape.tokens, shape.log, layer] for layer in range(shape.layers)]
        self.capacity = to_device(np.array(sizes, np.int32), device)
        self.nominal = {name: buffer.view(-1)[:NOMINAL_STATE] for name, buffer in self.buffers.items()}
        self.nominal |= {f"capacity_{layer}": row for layer, row in enumerate(self.capacity)}
        self._ordered: dict[tuple[str, ...], list[torch.Tensor]] = {}
        # Host mirrors, per layer: communities in use, and the (tokens, communities) at which each block ended.
        self.used = [0] * shape.layers
        self.marks: list[list[tuple[int, int]]] = [[] for _ in range(shape.layers)]
        self.log_starts = [0] * shape.layers  # of log_first, in all rows
        self.published_at = [0] * shape.layers  # tokens of the cache then; steps since may have assigned some
        self.together = device.type == "cuda"  # what is published is written by ``flush``, in a few launches
        self._writes: list[BlockWrite] = []
        self._counted: set[int] = set()  # layers whose counters ``flush`` sets
        self._behind: dict[int, token_log.Behind] = {}  # layers whose log begins anew when they are counted
        self._ungrouped: dict[int, int] = {}  # layers whose groups ``flush`` makes, from that of this community on

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["buffers"][name]
        except KeyError:
            raise AttributeError(name) from None

    def nominal_of(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """The nominal views of these buffers: the same tensors at every call."""
        found = self._ordered.get(names)
        if found is None:
            found = self._ordered[names] = [self.nominal[name] for name in names]
        return found

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def release(self) -> None:
        """Give back the memory; the counters can still be read."""
        self.buffers = {"tally": self.buffers["tally"]}
        self.nominal, self._ordered = {}, {}

    def clear(self) -> None:
        """Forget every community: all layers decode densely."""
        for name in ("n_indexed", "num_communities", "num_grouped", "tally"):
            if name in self.buffers:
                self.buffers[name].zero_()
        self._forget_observed(0)
        self.begin_log(0)
        self.used = [0] * self.shape.layers
        self.marks = [[] for _ in range(self.shape.layers)]

    def of_policy(self, layer: int) -> dict[str, torch.Tensor]:
        """What the policy keeps about a layer, by name; sharing memory."""
        return {name: self.buffers[name][layer] for name in POLICY_STATE if name in self.buffers}

    def _forget_observed(self, length: int) -> None:
        """What a policy knows of positions from ``length`` on, and of the step before, describes tokens that are gone."""
        if "importance" in self.buffers:
            self.importance[..., length:] = EMPTY["importance"]
        if "last_query" in self.buffers:
            self.last_query.zero_()

    def truncate(self, length: int) -> None:
        """Keep only blocks that end at or before ``length`` tokens: later positions will be written anew."""
        self._forget_observed(length)
        for layer in range(self.shape.layers):
            kept = [mark for mark in self.marks[layer] if mark[0] <= length]
            if len(kept) < len(self.marks[layer]) or assigns_tokens(self.config):
                self.marks[layer], self.used[layer] = kept, kept[-1][1] if kept else 0
                self.forget_assigned(layer)
                self.published_at[layer] = -1
            if self.log_starts[layer] > length:
                self.begin_log(length, layer)
            elif assigns_tokens(self.config):
                token_log.invalidate(self, layer, length)

    def begin_log(self, position: int, layer: int | None = None) -> None:
        """Decode steps log the tokens from here on, in one layer or in all; the log is empty.

        Means in the log are lost, so no step may assign a token before ``size`` is ``stored`` again.
        """
        layers = range(self.shape.layers) if layer is None else [layer]
        (self.log_first if layer is None else self.log_first[layer]).fill_(position)
        (self.log_community if layer is None else self.log_community[layer]).fill_(-1)
        for one in layers:
            self.log_starts[one] = position

    def forget_assigned(self, layer: int) -> None:
        """Back to the published blocks: tokens that decode steps assigned since count no longer as members.

        No step assigns any before the next publication, which makes means anew (``_restore_means``).
        """
        tokens = self.marks[layer][-1][0] if self.marks[layer] else 0
        used = self.used[layer]
        self.n_indexed[layer].fill_(tokens)
        self.count_communities(layer, used)
        self.size[layer, :, :, :used].copy_(self.stored[layer, :, :, :used])

    def _restore_means(self, layer: int, key: torch.Tensor, value: torch.Tensor | None, length: int) -> None:
        """Means of the members alone, bit for bit those that were published, where steps may have moved any since."""
        since, self.published_at[layer] = self.published_at[layer], length
        used = self.used[layer]
        if since == length or not used:
            return
        if self.together:
            from ckv_compile.runtime.block_writes import write_means

            write_means(self, layer, used, key, value)
            return
        members = self.member[layer], self.start[layer, :, :, :used], self.stored[layer, :, :, :used]
        place = (slice(None), slice(None), slice(used))
        self.write_centroids(layer, place, torch.ops.ckv.community_centroids(key, *members))
        if value is not None:
            self.mean_value[layer][place].copy_(torch.ops.ckv.community_centroids(value, *members))

    def grown(self, shape: IndexShape) -> CommunityIndex:
        """A larger index with the same content."""
        larger = CommunityIndex(shape, self.config, self.dtype, self.device)
        larger.fill_from(self)
        return larger

    def fill_from(self, other: CommunityIndex) -> None:
        """Take over the content of another index, which has no more room than this one."""
        for name, buffer in other.buffers.items():
            if name != "scores":
                self.buffers[name][tuple(slice(0, extent) for extent in buffer.shape)].copy_(buffer)
        self.used, self.marks = list(other.used), [list(marks) for marks in other.marks]
        self.log_starts, self.published_at = list(other.log_starts), list(other.published_at)
        if self.shape.groups and not other.shape.groups:
            for layer, used in enumerate(self.used):
                self.group_communities(layer)
                self.num_grouped[layer].fill_(used)

    def append_block(
        self, layer: int, start: int, stop: int, block: Packed, key: torch.Tensor, value: torch.Tensor | None = None,
        length: int = 0,
    ) -> None:  # fmt: skip
        """Publish the partition of positions ``start .. stop - 1`` behind what the layer has.

        block: positions relative to ``start``. key: ``[B, Hkv, >= stop, D]``, of the ``length`` tokens that the cache holds
        where steps assign tokens. value: the same of V, needed where the index keeps mean values.
        """
        at = self.used[layer]
        upto = at + block.start.shape[-1]
        assert upto <= self.shape.communities, "the index was allocated for fewer communities"
        if assigns_tokens(self.config):
            self.forget_assigned(layer)  # they are in the new block, or in the tail behind it
            self._restore_means(layer, key, value, length)
        self._write(layer, at, start, block, key, value, anew=at == 0)
        self.used[layer] = upto
        self.marks[layer].append((stop, upto))
        self._group(layer, at)
        self._leave_behind(layer, stop, length, key, value)
        self._count(layer)

    def replace(
        self, layer: int, stop: int, block: Packed, key: torch.Tensor, value: torch.Tensor | None = None,
        length: int = 0,
    ) -> None:  # fmt: skip
        """Publish a partition of positions ``0 .. stop - 1`` in place of what the layer has, as ``append_block`` does."""
        upto = block.start.shape[-1]
        assert upto <= self.shape.communities, "the index was allocated for fewer communities"
        self._write(layer, 0, 0, block, key, value, anew=True)
        self.used[layer] = upto
        self.marks[layer] = [(stop, upto)]
        self._group(layer, 0)
        self._leave_behind(layer, stop, length, key, value)
        self._count(layer)

    def join_blocks(
        self, layer: int, start: int, stop: int, block: Packed, key: torch.Tensor, value: torch.Tensor | None = None,
        length: int = 0,
    ) -> None:  # fmt: skip
        """Publish one partition of positions ``start .. stop - 1`` in place of the blocks that cover exactly them.

        Communities of later blocks keep their members and get the numbers behind it. Arguments as for ``append_block``.
        """
        marks, used = self.marks[layer], self.used[layer]
        ends = [0, *(tokens for tokens, _ in marks)]
        low, high = ends.index(start), ends.index(stop)
        at = marks[low - 1][1] if low else 0
        old, upto = marks[high - 1][1], at + block.start.shape[-1]
        moved = upto - old
        assert used + moved <= self.shape.communities, "the index was allocated for fewer communities"
        shifts = moved != 0 and used > old
        apart = not self.together or shifts or assigns_tokens(self.config)  # from other layers' writes
        if apart:
            self.flush()
        if assigns_tokens(self.config):
            self.forget_assigned(layer)  # some may have joined communities that go
            self._restore_means(layer, key, value, length)
            self.total_weight[layer].sub_(self.community_weight[layer, :, :, at:old].sum(-1))
        if shifts:
            for name in PER_COMMUNITY:
                if name in self.buffers:
                    state = self.buffers[name][layer]
                    state[:, :, upto : used + moved].copy_(state[:, :, old:used].clone())
            if "label" in self.buffers:
                label = self.label[layer, :, :, stop : ends[-1]]
                label.copy_(torch.where(label >= 0, label + moved, label))
        self._write(layer, at, start, block, key, value, anew=False)
        self.used[layer] = used + moved
        later = [(tokens, communities + moved) for tokens, communities in marks[high:]]
        self.marks[layer] = [*marks[:low], (stop, upto), *later]
        self._group(layer, at)
        if apart:
            self.flush()
            self.count_communities(layer, used + moved)
            self._leave_behind(layer, self.marks[layer][-1][0], length, key, value)
            self._relog()
        else:
            self._counted.add(layer)

    def _leave_behind(self, layer: int, stop: int, length: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Tokens from ``stop`` on that steps logged wait for a community once the layer is counted."""
        if assigns_tokens(self.config):
            self._behind[layer] = token_log.Behind(self.log_starts[layer], stop, length, key, value)

    def _relog(self) -> None:
        behind, self._behind = self._behind, {}
        token_log.begin_behind(self, behind)

    def flush(self) -> None:
        """Write what was published since; steps read it from here on. For the caller's thread, between steps."""
        (writes, self._writes), (counted, self._counted) = (self._writes, []), (self._counted, set())
        ungrouped, self._ungrouped = self._ungrouped, {}
        if not writes:
            return
        from ckv_compile.runtime.block_writes import write_blocks, write_groups

        write_blocks(self, writes)
        if ungrouped:
            write_groups(self, ungrouped)
        if "label" in self.buffers:
            self._add_weights(writes)
        if not counted:
            return
        shown = [(layer, self.used[layer], self.marks[layer][-1][0]) for layer in sorted(counted)]
        layer_of, used, stop = to_device(np.array(shown, np.int64).T.copy(), self.device)
        put = functools.partial(_put_rows, layers=layer_of)
        put(self.num_communities, used)
        if self.shape.groups:
            put(self.num_grouped, used)
        put(self.n_indexed, stop)
        self._relog()

    def _add_weights(self, writes: list[BlockWrite]) -> None:
        """Total weights and resolutions of layers, after writes in their order."""
        layers = sorted({write.layer for write in writes})
        row = {layer: number for number, layer in enumerate(layers)}
        numbers = np.zeros((3, len(layers), self.shape.batch, self.shape.graphs), np.float32)
        kept, total, gamma = numbers
        kept[:] = 1.0
        for write in writes:
            if write.anew:
                kept[row[write.layer]] = total[row[write.layer]] = 0.0
            total[row[write.layer]] += write.block.weight.numpy().sum(-1)
            gamma[row[write.layer]] = write.block.gamma.numpy()
        share, added, resolution = to_device(numbers, self.device).unbind()
        layer_of = to_device(np.array(layers, np.int64), self.device)
        if kept.any():
            added = added + self.total_weight.index_select(0, layer_of) * share
        self.total_weight.index_copy_(0, layer_of, added)
        self.gamma.index_copy_(0, layer_of, resolution)

    def _count(self, layer: int) -> None:
        """Let steps read what is published of a layer, and log the tokens behind it; left to ``flush`` if that writes."""
        if self.together:
            self._counted.add(layer)
            return
        stop, used = self.marks[layer][-1]
        self.count_communities(layer, used)
        self.n_indexed[layer].fill_(stop)
        self._relog()

    def count_communities(self, layer: int, used: int) -> None:
        """A layer has so many communities, all of them in groups if these are kept."""
        self.num_communities[layer].fill_(used)
        if self.shape.groups:
            self.num_grouped[layer].fill_(used)

    def _group(self, layer: int, first: int) -> None:
        """Groups of a layer's communities from ``first`` on changed; left to ``flush`` if that writes."""
        if not self.shape.groups:
            return
        if self.together:
            self._ungrouped[layer] = min(first, self._ungrouped.get(layer, first))
        else:
            self.group_communities(layer, first)

    def group_communities(self, layer: int, first: int = 0) -> None:
        """Mean and spread (``ckv::coarse_centroids``) of the groups that have one of the communities from ``first`` on."""
        low, used = first // GROUP, self.used[layer]
        high = num_groups(used)
        end = min(high * GROUP, self.shape.communities)
        size = self.stored[layer, :, :, low * GROUP : end].clone()
        size[:, :, max(0, used - low * GROUP) :] = 0
        missing = high * GROUP - end
        centroid, scale = (
            self.buffers[name][layer, :, :, low * GROUP : end] for name in ("centroid", "centroid_scale")
        )
        if missing:
            pad = torch.nn.functional.pad
            size, scale, centroid = pad(size, (0, missing)), pad(scale, (0, missing)), pad(centroid, (0, 0, 0, missing))
        code, steps = torch.ops.ckv.coarse_centroids(centroid, scale, size)
        self.coarse[layer, :, :, low:high].copy_(code)
        self.coarse_scale[layer, :, :, low:high].copy_(steps)

    def _write(
        self,
        layer: int,
        at: int,
        first: int,
        block: Packed,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        anew: bool,
    ) -> None:
        """anew: nothing of the layer's other communities counts any more."""
        if self.together:
            from ckv_compile.runtime.block_writes import BlockWrite

            self._writes.append(BlockWrite(layer, at, first, block, key, value, anew))
            return
        upto = at + block.start.shape[-1]
        count = block.member.shape[-1]
        member = self._device(block.member) + first
        start = self._device(block.start) + first
        size = self._device(block.size)
        self.member[layer, :, :, first : first + count].copy_(member)
        self.start[layer, :, :, at:upto].copy_(start)
        self.stored[layer, :, :, at:upto].copy_(size)
        self.size[layer, :, :, at:upto].copy_(size)
        centroid = torch.ops.ckv.community_centroids(key, member, start - first, size)
        if "key_mean" in self.buffers:
            present = (size > 0)[..., None]
            if anew:
                total = (centroid.float() * present).sum(-2)
                self.key_mean[layer].copy_(total / present.sum(-2).clamp(min=1))
            centroid = torch.where(present, centroid.float() - self.key_mean[layer][:, :, None], 0.0)
        if anew:
            self.channel_scale[layer].copy_(channel_scales(centroid, size))
        self.write_centroids(layer, (slice(None), slice(None), slice(at, upto)), centroid)
        if "mean_value" in self.buffers:
            assert value is not None, "an index that keeps mean values needs the values"
            mean = torch.ops.ckv.community_centroids(value, member, start - first, size)
            self.mean_value[layer, :, :, at:upto].copy_(mean)
        if "label" in self.buffers:
            span = block.label.shape[-1]
            label = self._device(block.label)
            self.label[layer, :, :, first : first + span].copy_(torch.where(label >= 0, label + at, label))
            weight = self._device(block.weight)
            self.community_weight[layer, :, :, at:upto].copy_(weight)
            total = weight.sum(-1)
            self.total_weight[layer].copy_(total if anew else self.total_weight[layer] + total)
            self.gamma[layer].copy_(self._device(block.gamma))

    def write_centroids(self, layer: int, place: tuple, mean: torch.Tensor) -> None:
        """Mean keys ``[B, G, c, D]`` (or of one row and graph) of the communities at ``place`` of the layer.

        Centred where the index has a ``key_mean``.
        """
        code, scale = torch.ops.ckv.encode_centroids(mean, self.channel_scale[layer][place[:2]])
        self.centroid[layer][place].copy_(code)
        self.centroid_scale[layer][place].copy_(scale)

    def _device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def channel_scales(mean: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Root mean square of every channel over the communities that have members, never 0.

    mean: ``[B, G, C, D]``. size: int ``[B, G, C]``. Returns float32 ``[B, G, D]``.
    """
    present = (size > 0).float()[..., None]
    return scales_of((mean.float().square() * present).sum(-2) / present.sum(-2).clamp(min=1))


def scales_of(mean_square: torch.Tensor) -> torch.Tensor:
    """Scales of channels [..., D] from the mean squares of communities' means: their roots, never 0."""
    scale = mean_square.sqrt()
    floor = 1e-4 * scale.amax(-1, keepdim=True)
    return torch.where(scale > floor, scale, torch.where(floor > 0, floor, 1.0))


def _put_rows(counter: torch.Tensor, values: torch.Tensor, layers: torch.Tensor) -> None:
    """counter[layers] = values, one for all rows and graphs of a layer. counter: int32 [L, ...]."""
    values = values.int().view(-1, *[1] * (counter.dim() - 1)).expand(-1, *counter.shape[1:])
    counter.index_copy_(0, layers, values)


@dataclasses.dataclass
class Packed:
    """Partitions of all rows and graphs of a layer, padded to one size: empty communities have size 0.

    On the host, pinned where they are large and go to CUDA. Made by the worker that partitioned, so that publishing only
    copies.
    joint: int32, of which all others but gamma are views, in the order of ``used``. filled: communities with members.
    """

    start: torch.Tensor  # int32 [B, G, C]
    size: torch.Tensor  # int32 [B, G, C]
    member: torch.Tensor  # int32 [B, G, M]
    label: torch.Tensor  # int32 [B, G, n]
    weight: torch.Tensor  # float32 [B, G, C]
    gamma: torch.Tensor  # float32 [B, G]
    joint: torch.Tensor
    filled: list[int]  # [B * G]
    counts: LayerPartition  # for the report

    def used(self, labels: bool) -> int:
        """Numbers of ``joint`` that an index with or without labels needs: start, size, member; then weight, label."""
        return len(self.joint) if labels else 2 * self.start.numel() + self.member.numel()

    def of_rows(self, rows: list[int]) -> Packed:
        """The same of these rows: row i is what row ``rows[i]`` was. In memory of the same kind."""
        joint = torch.empty_like(self.joint, pin_memory=self.joint.is_pinned())
        parts, begin = [], 0
        for part in (self.start, self.size, self.member, self.weight.view(torch.int32), self.label):
            new = joint[begin : begin + part.numel()].view(part.shape)
            parts.append(torch.index_select(part, 0, torch.tensor(rows), out=new))
            begin += part.numel()
        start, size, member, weight, label = parts
        graphs = self.start.shape[1]
        filled = [self.filled[row * graphs + graph] for row in rows for graph in range(graphs)]
        gamma = self.gamma[rows]
        return Packed(start, size, member, label, weight.view(torch.float32), gamma, joint, filled, self.counts)

    @classmethod
    def of(cls, partitions: list[list], device: torch.device) -> Packed:
        rows, graphs = len(partitions), len(partitions[0])
        flat = [partition for row in partitions for partition in row]
        communities = max(len(partition.size) for partition in flat)
        members = max(len(partition.member) for partition in flat)
        tokens = max(len(partition.labels) for partition in flat)
        widths = [max(1, communities)] * 2 + [max(1, members), max(1, communities), tokens]
        sizes = [rows * graphs * width for width in widths]
        pin = device.type == "cuda" and 4 * sum(sizes) > STAGED_BYTES
        memory = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pin)
        parts = [part.view(rows, graphs, width) for part, width in zip(memory.split(sizes), widths, strict=True)]
        arrays = [part.flatten(0, 1).numpy() for part in parts]
        weight, gamma = arrays[3].view(np.float32), np.zeros((rows, graphs), np.float32)
        arrays[4][:] = -1
        for i, partition in enumerate(flat):
            count = len(partition.size)
            arrays[0][i, :count] = partition.start
            arrays[1][i, :count] = partition.size
            arrays[2][i, : len(partition.member)] = partition.member
            arrays[4][i, : len(partition.labels)] = partition.labels
            gamma.flat[i] = partition.gamma
            if partition.weight is not None:
                weight[i, :count] = partition.weight
        filled = [int((partition.size > 0).sum()) for partition in flat]
        weights = parts[3].view(torch.float32)
        start, size, member, _, label = parts
        return cls(
            start, size, member, label, weights, torch.from_numpy(gamma), memory, filled, LayerPartition.of(flat)
        )
