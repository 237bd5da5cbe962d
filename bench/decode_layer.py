"""Decode attention of a few layers as the backend compiles it, and caches with random communities to run it on.

The graph comes from the backend's own rewrite of ``cat`` and SDPA: whatever operators it strings together, with
whatever state, is what runs here. Calls are made by the names in the operators' schemas only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import ckv_compile.backend
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig
from ckv_compile.passes import graph_edit
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.runtime.index import CommunityIndex, channel_scales
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab
from ckv_compile.testing import capture_call, rewritten

ATTENTION = ("sparse_attention", "sparse_attention_edges")  # the second where new tokens are assigned
STAGES = {
    "append": {"append_kv"},
    "route": {"route", "route_coarse"},
    "retrieve": {"retrieve"},
    "attend": set(ATTENTION),
    "assign": {"pick_edges", "assign_tokens"},
    "route_retrieve": {"route", "route_coarse", "retrieve"},
}


# ---------------------------------------------------------------------- graphs


class DecodeAttention:
    """The rewritten graph of one decode step's attention in ``layers`` layers, with random queries, keys and values.

    sink_logits: learned logits [Hq] of every layer, or None.
    """

    def __init__(
        self,
        config: CommunityConfig,
        geometry: AttentionGeometry,
        batch: int,
        *,
        sink_logits: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        self.config, self.geometry, self.batch, self.sink_logits = config, geometry, batch, sink_logits
        generator = torch.Generator(geometry.device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=geometry.dtype, device=geometry.device, generator=generator)

        layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        queries = [random(batch, geometry.num_query_heads, 1, dim) for _ in range(layers)]
        new = [random(batch, heads, 1, dim) for _ in range(2 * layers)]
        past = [random(batch, heads, 8, dim) for _ in range(2 * layers)]
        captured = capture_call(_attention, queries, new, past)
        self.rewrite = rewritten(captured, config)
        self.gm, self.plan = self.rewrite.gm, self.rewrite.plan
        if sink_logits is not None:
            _give_sink_logits(self.gm, sink_logits)
        kept = [captured.inputs[i] for i in self.plan.keep]
        self.inputs = dict(zip(graph_edit.placeholders(self.gm.graph), kept, strict=False))

    def compile(self, stage: str | None = None, *, interpret: bool = False) -> CompiledStage:
        """The whole step, or one of ``STAGES``. interpret: node by node, without Inductor."""
        if self.geometry.device.type == "cuda":
            importlib.import_module("ckv_compile.lowering")  # registers the kernels
        gm, given, outputs = self.gm, [], []
        if stage is not None:
            gm, given, outputs = _stage(self.gm, STAGES[stage])
        if self.geometry.device.type == "cuda" and (name := ckv_compile.backend._host_operator(gm.graph)):
            raise RuntimeError(f"{name} has no kernel yet that a CUDA graph can hold")
        if interpret:
            return CompiledStage(gm.forward, gm, given, outputs)
        fakes = [node.meta["example_value"] for node in graph_edit.placeholders(gm.graph)]
        patches = ckv_compile.backend.inductor_patches(self.config, None, {})
        patches["triton.cudagraphs"] = False  # captured here, many layers at once
        with torch.no_grad():
            return CompiledStage(ckv_compile.backend._compile(gm, fakes, patches), gm, given, outputs)

    def scale_queries(self, factor: float) -> None:
        for layer in range(self.geometry.num_layers):
            self.query(layer).mul_(factor)

    def query(self, layer: int) -> Tensor:
        node = [n for n in self.gm.graph.nodes if is_op(n, *ATTENTION)][layer]
        return self.inputs[argument(node, "query")]

    def lists(self, layer: int, made: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The layer's retrieved tokens and their count, among what stages made."""
        node = [n for n in self.gm.graph.nodes if is_op(n, *ATTENTION)][layer]
        return tuple(made[argument(node, name).name] for name in ("tokens", "count"))

    def arguments(self, stage: CompiledStage, cache: DecodeCache, given: dict[str, Tensor] | None = None) -> list:
        """Arguments of a compiled stage over a cache; ``given`` are tensors that earlier operators would make."""
        by_name = {node.name: value for node, value in self.inputs.items()}
        for name, node in zip(self.plan.state, self._state_nodes(), strict=True):
            by_name[node.name] = cache.state[name]
        if self.sink_logits is not None:
            by_name["ckv_sink_logits"] = self.sink_logits
        by_name |= given or {}
        return [by_name[node.name] for node in graph_edit.placeholders(stage.gm.graph)]

    def _state_nodes(self) -> list[fx.Node]:
        placeholders = graph_edit.placeholders(self.gm.graph)
        kept = len(self.plan.keep)
        return placeholders[kept : kept + len(self.plan.state)]


@dataclasses.dataclass
class CompiledStage:
    function: Callable
    gm: fx.GraphModule
    given: list[str]  # inputs that operators outside of the stage make
    outputs: list[str]  # names of what it returns; empty for the whole step


def _attention(queries: list[Tensor], new: list[Tensor], past: list[Tensor]):
    """Attention of several layers over a growing cache, as models write it."""
    outputs, cache = [], []
    for layer, query in enumerate(queries):
        key, value = (torch.cat([past[i], new[i]], dim=-2) for i in (2 * layer, 2 * layer + 1))
        scale = query.shape[-1] ** -0.5
        attended = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
        outputs.append(attended.transpose(1, 2).flatten(2))  # [B, 1, Hq * D], a view
        cache += [key, value]
    return outputs, cache


def is_op(node: fx.Node, *names: str) -> bool:
    """Whether the node calls an operator of ours, or one of these names."""
    ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "ckv"
    return ours and (not names or node.target._opname in names)


def _position(node: fx.Node, name: str) -> int:
    return [entry.name for entry in node.target._schema.arguments].index(name)


def argument(node: fx.Node, name: str) -> Any:
    return node.args[_position(node, name)]


def _give_sink_logits(gm: fx.GraphModule, sink_logits: Tensor) -> None:
    """All layers take their learned logits from one more input."""
    with graph_edit.fake_mode_of(gm.graph):
        fake = torch.empty(len(sink_logits), dtype=sink_logits.dtype, device=sink_logits.device)
    node = graph_edit.add_state_inputs(gm.graph, {"sink_logits": fake})["sink_logits"]
    for call in gm.graph.nodes:
        if is_op(call, *ATTENTION):
            call.update_arg(_position(call, "sink_logits"), node)
    gm.recompile()


def _stage(gm: fx.GraphModule, names: set[str]) -> tuple[fx.GraphModule, list[str], list[str]]:
    """A graph of only these operators of every layer: what others would make becomes an input of the same name."""
    graph, copies = fx.Graph(), {}
    given: list[str] = []
    kept = [node for node in gm.graph.nodes if is_op(node) and node.target._opname in names]
    made = set(kept) | {node for node in gm.graph.nodes if node.target is operator.getitem and node.args[0] in kept}
    for node in graph_edit.placeholders(gm.graph):
        if any(user in made for user in node.users):
            copies[node] = graph.node_copy(node)
    for node in kept:
        for source in node.all_input_nodes:
            if source not in copies and source not in made:
                copies[source] = graph.placeholder(source.name)
                copies[source].meta = dict(source.meta)
                given.append(source.name)
    results = []
    for node in gm.graph.nodes:
        if node in made:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if isinstance(node.meta.get("example_value"), Tensor):
                results.append(node)
    graph.output(tuple(copies[node] for node in results))
    stage = fx.GraphModule(gm, graph)
    stage.meta = dict(gm.meta)
    return stage, given, [node.name for node in results]


# ---------------------------------------------------------------------- caches


class DecodeCache:
    """K, V and index of the geometry's layers. ``slab`` holds K and V; ``random_slab`` makes one."""

    def __init__(self, config: CommunityConfig, geometry: AttentionGeometry, batch: int, slab: KVSlab) -> None:
        self.config, self.geometry, self.batch, self.slab = config, geometry, batch, slab
        self.sequence = Sequence(config, geometry, batch, slab.capacity, slab.layer_keys, ResolutionMemory())
        self.sequence.restart([0] * batch)

    @property
    def state(self) -> dict[str, Tensor]:
        """By the names of a rewrite plan."""
        state = dict(self.sequence.index.nominal)
        state["first"], state["length"] = self.sequence.first_device, self.sequence.length_device
        for layer in range(self.geometry.num_layers):
            state[f"key_{layer}"], state[f"value_{layer}"] = self.slab.nominal[2 * layer : 2 * layer + 2]
        return state

    def contiguous(self, tokens: int) -> list[Tensor]:
        """K and V as ``[B, H, tokens, D]``, contiguous, in the slab's own memory: other values, the same distribution."""
        shape = (self.batch, self.geometry.num_kv_heads, tokens, self.geometry.head_dim)
        return [part.view(-1)[: math.prod(shape)].view(shape) for part in self.slab.buffer]

    def index(self, length: int, indexed: int, mean_size: int, seed: int = 0) -> dict[str, float]:
        """Give the cache ``length`` tokens, the first ``indexed`` of them in random communities of this mean size."""
        self.sequence.restart([0] * self.batch, length)
        return fill_index(self.sequence, indexed, mean_size, seed)

    def saver(self, *, ready: bool = True) -> Callable[[], None]:
        """A function that brings length and index back to what they are now, or to an index that is empty."""
        index, length = self.sequence.index, self.sequence.length_device
        large = (
            "centroid", "log_mean", "centroid_scale", "member", "label", "start", "stored", "edge_neighbor",
            "edge_weight", "candidate", "candidate_score", "candidate_rest", "candidate_norm", "new_key", "scores", "tally",
            "coarse", "coarse_scale", "coarse_scores",
        )  # fmt: skip
        saved = {name: buffer.clone() for name, buffer in index.buffers.items() if name not in large}
        kept = length.clone()
        if not ready:
            for name in ("n_indexed", "num_communities"):
                saved[name].zero_()

        def restore() -> None:
            length.copy_(kept)
            for name, buffer in saved.items():
                index.buffers[name].copy_(buffer)

        return restore


def random_slab(geometry: AttentionGeometry, batch: int, capacity: int, seed: int = 0) -> KVSlab:
    """K and V of all layers, ``capacity`` tokens of them, normal."""
    size = geometry
    slab = KVSlab(size.num_layers, batch, size.num_kv_heads, size.head_dim, capacity, size.dtype, size.device)
    fill_slab(slab, seed)
    return slab


def fill_slab(slab: KVSlab, seed: int = 0) -> None:
    generator = torch.Generator(slab.buffer.device).manual_seed(seed)
    for part in slab.buffer:  # one at a time: the generator counts at most 2**31 numbers well
        part.normal_(generator=generator)


def size_weights(mean: float, largest: int, sigma: float = 1.0) -> np.ndarray:
    """Probabilities of sizes 1 .. ``largest``: a discretised log-normal of this mean, the tail cut off."""
    sizes = np.arange(1, largest + 1)
    low, high = -10.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        weights = np.exp(-((np.log(sizes) - middle) ** 2) / (2 * sigma**2)) / sizes
        low, high = (middle, high) if (weights @ sizes) / weights.sum() < mean else (low, middle)
    return weights / weights.sum()


def random_partition(
    shape: tuple[int, ...], first: int, stop: int, mean: float, config: CommunityConfig, device, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Communities of positions ``first .. stop - 1`` that do not cross blocks of ``config.block_size``.

    Returns member int32 [*shape, stop - first] (positions), start (into member, relative to it) and size, both int32
    [*shape, C]; unused communities have size 0.
    """
    block, total = config.block_size, stop - first
    generator = torch.Generator(device).manual_seed(seed)
    position = torch.arange(first, stop, device=device)
    flat = math.prod(shape)
    # Cuts at block ends shorten one community a block: the drawn mean is a little larger.
    weights = size_weights(mean * (1 + mean / (2 * block)), config.max_community_size)
    table = torch.tensor(weights.cumsum(), dtype=torch.float32, device=device)
    members, marks = [], torch.zeros(flat, total, dtype=torch.bool, device=device)
    marks[:, ((position % block) == 0) | (position == first)] = True
    for row in range(flat):
        draws = torch.rand(int(2 * total / mean) + 64, device=device, generator=generator)
        ends = (torch.searchsorted(table, draws).clamp_max(len(weights) - 1) + 1).cumsum(0)
        marks[row, ends[ends < total]] = True
        shuffled = torch.rand(total, device=device, generator=generator, dtype=torch.float64) + (position // block)
        members.append(shuffled.argsort().add_(first).int())
    number = marks.sum(1)
    room = int(number.max())
    start = torch.zeros(flat, room, dtype=torch.int32, device=device)
    size = torch.zeros_like(start)
    for row in range(flat):
        begins = marks[row].nonzero().flatten()
        sizes = torch.diff(begins, append=begins.new_tensor([total]))
        start[row, : len(begins)], size[row, : len(begins)] = begins.int(), sizes.int()
    return torch.stack(members).view(*shape, total), start.view(*shape, room), size.view(*shape, room)


def fill_index(sequence: Sequence, indexed: int, mean_size: int, seed: int = 0) -> dict[str, float]:
    """Put random communities over the first ``indexed`` tokens into a sequence's index, as if published.

    Nothing is partitioned: speed does not depend on which keys share a community. Returns what the index holds.
    """
    index, config, shape = sequence.index, sequence.config, sequence.shape
    device, first = index.device, config.num_sink_tokens
    per_layer = (shape.batch, shape.graphs)
    sequence._forget_submitted()
    index.clear()
    largest = used = 0
    for layer in range(shape.layers):
        member, start, size = random_partition(
            per_layer, first, indexed, mean_size, config, device, seed * 1000 + layer
        )
        used = size.shape[-1]
        assert used <= shape.communities, f"{used} communities, the index has room for {shape.communities}"
        largest = max(largest, int(size.max()))
        _write_layer(index, layer, member, start, size, sequence.keys(layer), first)
        index.used[layer], index.marks[layer] = used, [(indexed, used)]
        if shape.groups:
            index.group_communities(layer)
        index.count_communities(layer, used)
    index.n_indexed.fill_(indexed)
    index.begin_log(indexed)
    sequence.submitted = [indexed] * shape.layers
    sequence.refreshed_at = sequence.length
    return {"communities": used, "mean_held": (indexed - first) / max(1, used), "largest": largest,
            "centroid_bytes": centroid_bytes(index)}  # fmt: skip


def centroid_bytes(index: CommunityIndex) -> int:
    """Of one community: what scoring it reads."""
    return index.centroid.shape[-1] * index.centroid.element_size() + index.centroid_scale.element_size()


def _write_layer(index: CommunityIndex, layer: int, member, start, size, key: Tensor, first: int) -> None:
    """What ``CommunityIndex`` writes when a partition is published, from tensors on the device."""
    used, tokens = size.shape[-1], member.shape[-1]
    index.member[layer, :, :, first : first + tokens].copy_(member)
    index.start[layer, :, :, :used].copy_(start + first)
    index.stored[layer, :, :, :used].copy_(size)
    index.size[layer, :, :, :used].copy_(size)
    # Keys of a community are alike, so that its mean is as long as a key whatever its size (means of independent keys
    # would make the smallest communities score best; on real keys the retrieved are as large as all are on average).
    mean = torch.randn(*size.shape, index.shape.centroid_dim, dtype=index.dtype, device=index.device)
    index.channel_scale[layer].copy_(channel_scales(mean, size))
    index.write_centroids(layer, (slice(None), slice(None), slice(0, used)), mean)
    if "label" in index.buffers:
        slots = torch.arange(tokens, device=index.device).expand(member.shape).contiguous()
        community = torch.searchsorted(_ascending(start, size, tokens), slots, right=True) - 1
        label = torch.full_like(index.label[layer], -1)
        label.scatter_(-1, member.long(), community.int())
        index.label[layer].copy_(label)
        index.community_weight[layer, :, :, :used].copy_(size)
        index.total_weight[layer].copy_(size.sum(-1))
        index.gamma[layer].fill_(1.0)


def _ascending(start: Tensor, size: Tensor, tokens: int) -> Tensor:
    """Starts with unused communities moved to the end."""
    return torch.where(size > 0, start, tokens).long()


# ---------------------------------------------------------------------- dense


def dense_forms(device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Ways to attend one query [B, Hq, 1, D] to contiguous K and V [B, Hkv, n, D] with torch's own kernels.

    "packed" forms hand over the query heads of a group as that many queries of one head: the same numbers, no mask.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(backend, packed: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = query.shape
        if packed:
            query = query.reshape(shape[0], key.shape[1], shape[1] // key.shape[1], shape[3])
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, key, value, scale=shape[3] ** -0.5, enable_gqa=not packed)
        return out.reshape(*shape[:3], value.shape[3])

    if not device.startswith("cuda"):
        return {"math": functools.partial(attend, SDPBackend.MATH, False)}
    return {
        "cudnn": functools.partial(attend, SDPBackend.CUDNN_ATTENTION, False),
        "cudnn_packed": functools.partial(attend, SDPBackend.CUDNN_ATTENTION, True),
        "flash": functools.partial(attend, SDPBackend.FLASH_ATTENTION, False),
        "flash_packed": functools.partial(attend, SDPBackend.FLASH_ATTENTION, True),
    }
