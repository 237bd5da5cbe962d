"""Partitions of many layers into an index on CUDA at once: some twenty launches, and nobody waits.

One copy of pinned memory brings what workers packed to the device (several, where it is large), one kernel puts starts,
sizes and members in their places, and one makes centroids of the members' keys; where a layer's channel scales are set
anew, another one has added the means and their squares before. They follow each other on the caller's stream, on which the
counters that make a step read the new communities are written last.

Centroids read every key of what is published once, twice where scales are new: 131,072 tokens of 36 layers and 8 heads
of 128 bf16 are 9.7 GB, some 5 ms on an H200; 512 tokens some 0.1 ms, of which most are the launches.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ckv_compile.config import GROUP
from ckv_compile.index_layout import num_groups
from ckv_compile.lowering.template_call import next_power_of_2
from ckv_compile.rendered import cached_kernel
from ckv_compile.runtime.index import scales_of
from ckv_compile.runtime.transfer import pinned

if TYPE_CHECKING:
    from ckv_compile.runtime.index import CommunityIndex, Packed

BLOCK = 1024  # entries that a program places
PARTS = 32  # programs that add the squares of one graph
COMMUNITIES = 4  # of one graph that a program encodes
GROUPS = 16  # of one graph that a program makes a mean and spread of
ROWS = 8  # members that are read together
FIELDS = 8  # of an entry
ONE_COPY_BYTES = 4 << 20  # up to here copying on the host is cheaper than many copies to the device


@dataclasses.dataclass(frozen=True)
class BlockWrite:
    """A partition of positions from ``first`` on, whose communities of a layer get the numbers from ``at`` on.

    anew: nothing of the layer's other communities counts any more. key, value: [B, Hkv, >= all positions, D].
    """

    layer: int
    at: int
    first: int
    block: Packed
    key: Tensor
    value: Tensor | None
    anew: bool


def write_blocks(index: CommunityIndex, writes: list[BlockWrite]) -> None:
    """Write everything but the counters ``num_communities`` and ``n_indexed``."""
    shape, labels = index.shape, "label" in index.buffers
    rows = shape.batch * shape.graphs
    data, begins = _staged([write.block.joint[: write.block.used(labels)] for write in writes], index.device)
    anew = [number for number, write in enumerate(writes) if write.anew]
    order = anew + [number for number, write in enumerate(writes) if not write.anew]
    entries = np.zeros((len(writes), FIELDS), np.int64)
    for entry, number in zip(entries, order, strict=True):
        write, block = writes[number], writes[number].block
        sizes = block.start.shape[2], block.member.shape[2], block.label.shape[2]
        entry[:7] = begins[number], *sizes, write.layer, write.at, write.first
    layers = np.array([writes[number].layer for number in anew], np.int64)
    filled = np.array([writes[number].block.filled for number in anew], np.int64).reshape(-1)
    offsets = [_offsets(writes, name, shape.layers) for name in ("key", "value")[: 1 + ("mean_value" in index.buffers)]]
    aligned = not any((one % 8).any() for one in offsets)
    named = [entries.reshape(-1), *offsets, layers, filled]  # what kernels read begins as 16 bytes do
    head = pinned(np.concatenate(named), index.device).to(index.device, non_blocking=True)
    table, *offset_of, layer_of, count = head.split([len(one) for one in named])

    most = int(entries[:, 1:4].max())
    place = {name.upper(): index.buffers[name] for name in ("start", "stored", "size", "member")}
    place["CAPACITY"] = index.capacity
    if labels:
        place |= {"LABEL": index.label, "COMMUNITY_WEIGHT": index.community_weight}
    _kernel("place_communities", **place_constants(labels))(
        (-(-most // BLOCK), rows, len(writes)), {"DATA": data, "ENTRIES": table, **place}, index.size
    )

    def means(use: str, cache: Tensor, offset: Tensor, out: Tensor, number: int, parts: int, **more: Tensor) -> None:
        tensors = {name: place[name] for name in ("CAPACITY", "START", "STORED", "MEMBER")}
        constants = means_constants(shape, use, aligned=aligned, centred="KEY_MEAN" in more)
        _kernel("community_means", **constants)(
            (parts, rows, number), {"ENTRIES": table, "KEY": cache, "OFFSET": offset, **tensors, **more}, out
        )

    key = writes[0].key
    centred = "key_mean" in index.buffers
    if anew:
        sums = torch.empty(len(anew), rows, PARTS, 2, shape.centroid_dim, dtype=torch.float32, device=index.device)
        means("squares", key, offset_of[0], sums, len(anew), PARTS)
        mean, mean_square = (sums.sum(2) / count.view(len(anew), rows, 1, 1).clamp(min=1)).unbind(2)
        if centred:
            index.key_mean.index_copy_(0, layer_of, mean.view(len(anew), *index.key_mean.shape[1:]))
            mean_square = (mean_square - mean.square()).clamp_(min=0.0)
        new = scales_of(mean_square).view(len(anew), *index.channel_scale.shape[1:])
        index.channel_scale.index_copy_(0, layer_of, new)
    parts = -(-int(entries[:, 1].max()) // COMMUNITIES)
    scales = {"CHANNEL_SCALE": index.channel_scale, "CENTROID_SCALE": index.centroid_scale}
    if centred:
        scales["KEY_MEAN"] = index.key_mean
    means("codes", key, offset_of[0], index.centroid, len(writes), parts, **scales)
    if len(offset_of) > 1:
        assert writes[0].value is not None, "an index that keeps mean values needs the values"
        means("means", writes[0].value, offset_of[1], index.mean_value, len(writes), parts)


def write_means(index: CommunityIndex, layer: int, used: int, key: Tensor, value: Tensor | None) -> None:
    """Centroids, and mean values where the index has them, of a layer's first ``used`` communities from their members."""
    entry = np.zeros(FIELDS, np.int64)
    entry[1], entry[4] = used, layer
    table = pinned(entry, index.device).to(index.device, non_blocking=True)
    offset = table.new_zeros(index.shape.layers + index.shape.layers % 2)
    tensors = {
        "ENTRIES": table, "CAPACITY": index.capacity, "OFFSET": offset, "START": index.start, "STORED": index.stored,
        "MEMBER": index.member,
    }  # fmt: skip
    grid = -(-used // COMMUNITIES), index.shape.batch * index.shape.graphs, 1
    scales = {"CHANNEL_SCALE": index.channel_scale, "CENTROID_SCALE": index.centroid_scale}
    codes = _kernel("community_means", **means_constants(index.shape, "codes", aligned=True))
    codes(grid, tensors | {"KEY": key} | scales, index.centroid)
    if value is not None:
        means = _kernel("community_means", **means_constants(index.shape, "means", aligned=True))
        means(grid, tensors | {"KEY": value}, index.mean_value)


def write_groups(index: CommunityIndex, first: dict[int, int]) -> None:
    """Mean and spread of groups (``ckv::coarse_centroids``), by layer those from that of community ``first`` on."""
    shape = index.shape
    entries = [(layer, low // GROUP, num_groups(index.used[layer]), index.used[layer]) for layer, low in first.items()]
    table = pinned(np.array(entries, np.int64).reshape(-1), index.device).to(index.device, non_blocking=True)
    most = max(high - low for _, low, high, _ in entries)
    tensors = {
        "ENTRIES": table, "CAPACITY": index.capacity, "CENTROID": index.centroid, "STORED": index.stored,
        "CENTROID_SCALE": index.centroid_scale, "COARSE_SCALE": index.coarse_scale,
    }  # fmt: skip
    _kernel("coarse_centroids", **group_constants(shape))(
        (max(1, -(-most // GROUPS)), shape.batch * shape.graphs, len(entries)), tensors, index.coarse
    )


def group_constants(shape: Any) -> dict[str, Any]:
    width = shape.centroid_dim
    return {
        "GROUP": GROUP, "WIDTH": width, "BLOCK_D": next_power_of_2(width), "num_warps": 1 if width <= 256 else 4,
        "num_stages": 1,
    }  # fmt: skip


def place_constants(labels: bool) -> dict[str, Any]:
    return {"BLOCK": BLOCK, "LABELS": labels, "num_warps": 4, "num_stages": 1}


def means_constants(shape: Any, use: str, *, aligned: bool, centred: bool = False) -> dict[str, Any]:
    """use: "squares", "codes" or "means". aligned: whether K of every layer begins as 16 bytes do.

    centred: codes are those of means less the graph's ``key_mean``.
    """
    return {
        "SQUARES": use == "squares", "CODES": use == "codes", "ALIGNED": aligned, "CENTRED": centred,
        "GRAPHS": shape.graphs, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "WIDTH": shape.centroid_dim,
        "BLOCK_D": next_power_of_2(shape.centroid_dim), "ROWS": ROWS, "num_warps": 1 if shape.centroid_dim <= 256 else 4,
    }  # fmt: skip


def _kernel(name: str, **constants: Any) -> Any:
    return cached_kernel(name, tuple(constants.items()))


def _staged(parts: list[Tensor], device: torch.device) -> tuple[Tensor, list[int]]:
    """Packed partitions one behind the other on the device, and where each begins."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    begins = [0, *ends[:-1]]
    data = torch.empty(ends[-1], dtype=torch.int32, device=device)
    pinned_memory = device.type == "cuda"
    if data.nbytes <= ONE_COPY_BYTES:
        host = torch.empty(len(data), dtype=torch.int32, pin_memory=pinned_memory)
        data.copy_(torch.cat(parts, out=host), non_blocking=True)
        return data, begins
    for begin, end, part in zip(begins, ends, parts, strict=True):
        if pinned_memory and not part.is_pinned():
            part = part.pin_memory()
        data[begin:end].copy_(part, non_blocking=True)
    return data, begins


def _offsets(writes: list[BlockWrite], name: str, layers: int) -> np.ndarray:
    """Elements from the first write's K (or V) to that of every layer that is written."""
    base = getattr(writes[0], name)
    offsets = np.zeros(layers + layers % 2, np.int64)
    for write in writes:
        cache = getattr(write, name)
        assert (cache.stride(), cache.dtype) == (base.stride(), base.dtype), "layers of a cache are laid out alike"
        offsets[write.layer] = (cache.data_ptr() - base.data_ptr()) // cache.element_size()
    return offsets
