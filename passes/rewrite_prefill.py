"""Prefill graphs (first call, later turns, chunks): exact causal attention that also feeds the partition.

K and V of a DynamicCache are written straight into the caller's slab. Each layer hands its edges (or keys) to
``ckv::submit_partition``; the ticket that this op mutates is read by the next layer's attention, so it keeps its place
in the schedule and the partition of one layer overlaps the attention of the next.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import ckv_compile.ops  # noqa: F401  (registers the operators)
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import NOMINAL_LENGTH
from ckv_compile.passes import graph_edit
from ckv_compile.passes.match_attention import AttentionSite, Cache
from ckv_compile.passes.rewrite_plan import (
    RewritePlan,
    block_inputs,
    geometry_of,
    require_unchanged,
    size_reader,
    static_sizes,
)
from ckv_compile.passes.window_layers import let_windows_go
from ckv_compile.policies import policy_of

ckv = torch.ops.ckv


def rewrite_prefill(gm: fx.GraphModule, sites: list[AttentionSite], config: CommunityConfig) -> RewritePlan:
    """Rewrite a graph with several new tokens per row (or a first call) in place and say how to call it.

    Raises ValueError with the reason when the graph cannot be rewritten; the graph is then unusable.
    """
    graph = gm.graph
    first = sites[0]
    geometry = geometry_of(sites)
    inputs = graph_edit.placeholders(graph)
    dynamic = first.cache in (Cache.EMPTY, Cache.DYNAMIC)
    static_length = capacity = None
    if dynamic:
        require_unchanged(sites)
    else:
        static_length, capacity = static_sizes(graph, sites, inputs)
    state = graph_edit.add_state_inputs(graph, _fake_state(graph, sites))
    for layer, site in enumerate(sites):
        if dynamic:
            key, value = state[f"key_{layer}"], state[f"value_{layer}"]
        else:
            key, value = site.key_cache, site.value_cache
        _replace(graph, site, layer, key, value, state, config)

    outputs = list(graph_edit.output_node(graph).args[0])  # an attention may be returned as it is
    past, kv_outputs, static_keys, in_outputs = [], [], [], False
    if dynamic:
        kv_outputs = [outputs.index(node) for site in sites for node in (site.key_cache, site.value_cache)]
        if first.cache is Cache.DYNAMIC:
            past = [inputs.index(node) for site in sites for node in (site.past_key, site.past_value)]
    else:
        in_outputs = first.key_cache not in inputs
        where = outputs if in_outputs else inputs
        static_keys = [where.index(site.key_cache) for site in sites]
    kept_outputs = [i for i in range(len(outputs)) if i not in kv_outputs]
    graph_edit.output_node(graph).args = (tuple(outputs[i] for i in kept_outputs),)
    let_windows_go(graph)
    graph_edit.erase_dead(graph, frozenset(state.values()))
    graph.lint()
    gm.recompile()

    query = first.query.meta["example_value"]
    batch, num_new = size_reader(query.shape[0], inputs), size_reader(query.shape[2], inputs)
    if batch is None or num_new is None:
        raise ValueError("no input of the graph shows the batch size or the number of new tokens")
    alive = set(graph_edit.placeholders(graph))
    return RewritePlan(
        phase="prefill",
        cache=first.cache,
        geometry=geometry,
        num_inputs=len(inputs),
        num_outputs=len(outputs),
        keep=[i for i, node in enumerate(inputs) if node in alive],
        kept_outputs=kept_outputs,
        state=list(state),
        names=[site.name for site in sites],
        past=past,
        kv_outputs=kv_outputs,
        padding=None if first.padding is None else inputs.index(first.padding),
        static_keys=static_keys,
        static_in_outputs=in_outputs,
        mask=None if sites[0].mask is None else inputs.index(sites[0].mask),
        blocks=block_inputs(sites[0], inputs),
        static_length=static_length,
        static_capacity=capacity,
        batch=batch,
        num_new=num_new,
    )


def _fake_state(graph: fx.Graph, sites: list[AttentionSite]) -> dict[str, torch.Tensor]:
    first = sites[0]
    batch = first.query.meta["example_value"].shape[0]
    fakes = {}
    with graph_edit.fake_mode_of(graph):
        if first.cache in (Cache.EMPTY, Cache.DYNAMIC):
            for layer in range(len(sites)):
                for kind in ("key", "value"):
                    slab = torch.empty(
                        NOMINAL_LENGTH,
                        batch,
                        first.num_kv_heads,
                        first.head_dim,
                        dtype=first.dtype,
                        device=first.device,
                    )
                    fakes[f"{kind}_{layer}"] = slab.permute(1, 2, 0, 3)
        # Host tensors: prefill runs outside CUDA graphs, and reading them costs no synchronisation.
        fakes["length"] = torch.empty(1, dtype=torch.int32)
        fakes["first"] = torch.empty(batch, dtype=torch.int32)
        fakes["ticket"] = torch.empty(2, dtype=torch.int64)
    return fakes


def _replace(graph, site, layer, key, value, state, config) -> None:
    lists = config.graph in ("attention", "mixed") and config.policy == "communities"
    new: list[fx.Node] = []
    with graph.inserting_before(site.node):
        call = graph.call_function
        if site.cache in (Cache.EMPTY, Cache.DYNAMIC):
            new.append(call(ckv.append_kv.default, (key, value, site.key_new, site.value_new, state["length"])))
        num_new = site.query.meta["example_value"].shape[2]
        if isinstance(num_new, torch.SymInt):
            size = graph.call_method("size", (site.query, 2))
            size.meta["example_value"] = num_new
            num_new = size
        common = (site.query, key, value, state["length"], state["first"], state["ticket"], site.scale)
        submitted = (state["ticket"], key, state["length"], num_new)
        if policy_of(config.policy).sees_prompt:
            seen = (state["ticket"], site.query, key, state["length"], site.scale, layer)
            new.append(call(ckv.observe_prompt.default, seen))
        # What reads the ticket comes after what writes it, layer by layer: Inductor would copy a ticket that is read late.
        if lists:
            selection = (config.num_sink_tokens, config.kappa, site.sink_logits, config.topk)
            result = call(ckv.topk_prefill.default, (*common, *selection))
            out, neighbor, weight = (call(operator.getitem, (result, i)) for i in range(3))
            new += [result, out, neighbor, weight]
            new.append(call(ckv.submit_partition.default, (*submitted, neighbor, weight, layer)))
        else:
            new.append(call(ckv.submit_partition.default, (*submitted, None, None, layer)))
            out = call(ckv.prefill_attention.default, (*common, site.sink_logits))
            new.append(out)
    graph_edit.set_example_values(graph, new)
    graph_edit.take_place(out, site.node)
