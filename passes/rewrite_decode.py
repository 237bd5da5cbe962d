"""Decode graphs: attention over a growing cache becomes append, route, retrieve and sparse attention.

For a DynamicCache the ``cat`` that builds K and V is replaced by an append into a slab that the caller owns. K and V
then enter as nominal views with a device-side length, so neither the length nor the capacity is left in the graph:
one compiled graph serves every step. A StaticCache keeps its own ``index_copy_``.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import ckv_compile.ops  # noqa: F401  (registers the operators)
from ckv_compile.config import CommunityConfig, coarse_from, is_hierarchical, least_groups
from ckv_compile.index_layout import (
    CANDIDATES,
    NOMINAL_LENGTH,
    NOMINAL_STATE,
    POLICY_STATE,
    assigns_tokens,
    edge_lists,
    shortlist_slots,
    state_dtypes,
    visit_slots,
)
from ckv_compile.passes import graph_edit
from ckv_compile.passes.index_expressions import hint_of, shape_of
from ckv_compile.passes.match_attention import AttentionSite, Cache
from ckv_compile.passes.rewrite_plan import (
    RewritePlan,
    block_inputs,
    geometry_of,
    require_unchanged,
    size_reader,
    static_sizes,
)
from ckv_compile.passes.window_layers import let_windows_go, replace_counts, replace_padding
from ckv_compile.policies import GroupPolicy, TokenPolicy, policy_of
from ckv_compile.policies.neighborhoods import edges_of

ckv = torch.ops.ckv
ROUTED = ("centroid", "centroid_scale", "channel_scale", "size", "start", "stored", "num_communities")
ASSIGNED = (
    "centroid", "centroid_scale", "channel_scale", "log_mean", "mean_at", "start", "stored", "size", "num_communities",
    "n_indexed", "log_community", "log_first", "label", "community_weight", "total_weight", "edge_neighbor",
    "edge_weight", "gamma",
)  # fmt: skip
SUMMARIZED = (
    "centroid",
    "centroid_scale",
    "channel_scale",
    "size",
    "mean_value",
)  # what a community's means are read from


def rewrite_decode(
    gm: fx.GraphModule, sites: list[AttentionSite], config: CommunityConfig, queries: int = 1
) -> RewritePlan:
    """Rewrite a decode graph with ``queries`` new tokens per row in place and say how to call it.

    Raises ValueError with the reason when the graph cannot be rewritten; the graph is then unusable.
    """
    graph = gm.graph
    geometry = geometry_of(sites)
    cache = sites[0].cache
    inputs = graph_edit.placeholders(graph)
    static_length = capacity = None
    if cache is Cache.STATIC:
        static_length, capacity = static_sizes(graph, sites, inputs)
    else:
        require_unchanged(sites)
    state = graph_edit.add_state_inputs(graph, _fake_state(graph, sites, config))
    length_of = _lengths(graph, sites, state)
    for layer, site in enumerate(sites):
        if cache is Cache.DYNAMIC:
            key, value = state[f"key_{layer}"], state[f"value_{layer}"]
        else:
            key, value = site.key_cache, site.value_cache
        _replace(graph, site, layer, key, value, length_of[layer], queries, state, config)
    outputs = list(graph_edit.output_node(graph).args[0])  # an attention may be returned as it is
    if assigns_tokens(config):
        _assign(graph, sites, state, length_of[-1], config)

    past, kv_outputs = [], []
    if cache is Cache.DYNAMIC:
        past = [inputs.index(node) for site in sites for node in (site.past_key, site.past_value)]
        kv_outputs = [outputs.index(node) for site in sites for node in (site.key_cache, site.value_cache)]
        with graph.inserting_before(graph_edit.output_node(graph)):
            advanced = graph.call_method("add_", (state["length"], queries))
        advanced.meta["example_value"] = state["length"].meta["example_value"]
    kept_outputs = [i for i in range(len(outputs)) if i not in kv_outputs]
    graph_edit.output_node(graph).args = (tuple(outputs[i] for i in kept_outputs),)
    graph_edit.erase_dead(graph, frozenset(state.values()))
    counts = _replace_counts(graph, sites, inputs, outputs, state, static_length)
    counted = {
        place: (inputs.index(node), more) for node, added in counts.items() for place, more in added.items()
    }  # fmt: skip
    kept_outputs = [i for i in kept_outputs if i not in counted]
    graph_edit.output_node(graph).args = (tuple(outputs[i] for i in kept_outputs),)
    if cache is Cache.DYNAMIC and sites[0].padding is not None:
        replace_padding(graph, sites[0].padding, state["first"])
    let_windows_go(graph)
    graph_edit.erase_dead(graph, frozenset(state.values()))
    graph.lint()
    gm.recompile()

    batch = size_reader(sites[0].query.meta["example_value"].shape[0], inputs)
    if batch is None:
        raise ValueError("no input of the graph shows the batch size")
    alive = set(graph_edit.placeholders(graph))
    return RewritePlan(
        phase="decode",
        cache=cache,
        geometry=geometry,
        num_inputs=len(inputs),
        num_outputs=len(outputs),
        keep=[i for i, node in enumerate(inputs) if node in alive],
        kept_outputs=kept_outputs,
        state=list(state),
        names=[site.name for site in sites],
        past=past,
        kv_outputs=kv_outputs,
        padding=None if sites[0].padding is None else inputs.index(sites[0].padding),
        static_keys=[inputs.index(site.key_cache) for site in sites] if cache is Cache.STATIC else [],
        static_values=[inputs.index(site.value_cache) for site in sites] if cache is Cache.STATIC else [],
        mask=None if sites[0].mask is None else inputs.index(sites[0].mask),
        blocks=block_inputs(sites[0], inputs),
        static_length=static_length,
        static_capacity=capacity,
        batch=batch,
        num_new=lambda args: queries,
        queries=queries,
        symbolic=graph_edit.symbolic_nodes(graph),
        counts=sorted(inputs.index(node) for node in counts),
        counted=counted,
    )


def _fake_state(graph: fx.Graph, sites: list[AttentionSite], config: CommunityConfig) -> dict[str, torch.Tensor]:
    first = sites[0]
    batch = first.query.meta["example_value"].shape[0]
    heads, dim, dtype, device = first.num_kv_heads, first.head_dim, first.dtype, first.device
    fakes = {}
    with graph_edit.fake_mode_of(graph):
        if first.cache is Cache.DYNAMIC:
            for layer in range(len(sites)):
                for kind in ("key", "value"):
                    slab = torch.empty(NOMINAL_LENGTH, batch, heads, dim, dtype=dtype, device=device)
                    fakes[f"{kind}_{layer}"] = slab.permute(1, 2, 0, 3)
            fakes["length"] = torch.empty(1, dtype=torch.int32, device=device)
        fakes["first"] = torch.empty(batch, dtype=torch.int32, device=device)
        for layer in range(len(sites)):
            fakes[f"capacity_{layer}"] = torch.empty(4, dtype=torch.int32, device=device)
        for name, kind in state_dtypes(config, dtype).items():
            fakes[name] = torch.empty(NOMINAL_STATE, dtype=kind, device=device)
    return fakes


def _lengths(graph: fx.Graph, sites: list[AttentionSite], state: dict[str, fx.Node]) -> list[fx.Node]:
    """The node that holds the number of cached tokens before this step, per layer."""
    if sites[0].cache is Cache.DYNAMIC:
        return [state["length"]] * len(sites)
    # The write position of the first new token is that number; it was computed before the cache's counter moved.
    return [_first_position(graph, site) for site in sites]


def _first_position(graph: fx.Graph, site: AttentionSite) -> fx.Node:
    if shape_of(site.position) == (1,):
        return site.position
    with graph.inserting_after(site.position):
        first = graph.call_function(torch.narrow, (site.position, 0, 0, 1))
    graph_edit.set_example_values(graph, [first])
    return first


def _replace(graph, site, layer, key, value, length, queries, state, config) -> None:
    groups = site.num_kv_heads
    graphs = {"group": groups, "head": site.num_query_heads, "layer": 1}[config.graph_aggregation]
    sinks, window = config.num_sink_tokens, config.recent_window
    batch = site.query.meta["example_value"].shape[0]
    capacity, reserved = state[f"capacity_{layer}"], config.centroid_budget
    new: list[fx.Node] = []
    with graph.inserting_before(site.node):
        call = graph.call_function
        if site.cache is Cache.DYNAMIC:
            new.append(call(ckv.append_kv.default, (key, value, site.key_new, site.value_new, length)))
        if isinstance(batch, torch.SymInt):
            size = graph.call_method("size", (site.query, 0))
            size.meta["example_value"] = batch
            batch = size
        select = _select if isinstance(policy_of(config.policy), TokenPolicy) else _retrieve
        tokens, count = select(site, layer, key, batch, graphs, length, queries, state, config, call, new)
        means: tuple = ()
        if reserved:
            read = [state[name] for name in ("scores", "size", "num_communities", "n_indexed")]
            summaries = call(
                ckv.select_summaries.default,
                (*read, capacity, length, state["first"], state["tally"], layer, batch, graphs, config.budget, reserved,
                 sinks, window),
            )  # fmt: skip
            new.append(summaries)
            means = (summaries, *(state[name] for name in SUMMARIZED))
        attended = (tokens, count, state["n_indexed"], capacity, length, state["first"])
        attention = (site.query, key, value, *attended, site.sink_logits)
        sizes = (layer, site.scale, sinks, window)
        if assigns_tokens(config):
            edges = [state[name] for name in (*CANDIDATES, "new_key")]
            source = "keys" if config.graph == "keys" else "attention"
            if reserved:
                means = (*means, state["new_value"])
            arguments = (*attention, *edges, *sizes, config.kappa, source, *means)
            out = call(ckv.sparse_attention_edges.default, arguments)
        else:
            out = call(ckv.sparse_attention.default, (*attention, *sizes, *means))
        new.append(out)
    graph_edit.set_example_values(graph, new)
    graph_edit.take_place(out, site.node)


def _select(site, layer, key, batch, graphs, length, queries, state, config, call, new) -> tuple[fx.Node, fx.Node]:
    """The list of a policy that scores every token. New nodes are appended to ``new``."""
    kept = [state.get(name) for name in POLICY_STATE]
    arguments = (
        site.query, key, state["n_indexed"], state[f"capacity_{layer}"], length, state["first"], state["tally"], *kept,
        config.policy, layer, site.scale, graphs, config.budget, config.num_sink_tokens, config.recent_window,
        edges_of(config),
    )  # fmt: skip
    selected = call(ckv.select_tokens.default, arguments)
    tokens, count = call(operator.getitem, (selected, 0)), call(operator.getitem, (selected, 1))
    new += [selected, tokens, count]
    return tokens, count


def _retrieve(site, layer, key, batch, graphs, length, queries, state, config, call, new) -> tuple[fx.Node, fx.Node]:
    """The list of the best groups of tokens that fit the budget. New nodes are appended to ``new``."""
    policy = policy_of(config.policy)
    assert isinstance(policy, GroupPolicy)
    score = policy.score or config.score
    groups, capacity, reserved = site.num_kv_heads, state[f"capacity_{layer}"], config.centroid_budget
    sinks, window = config.num_sink_tokens, config.recent_window
    visit: tuple = ()
    if is_hierarchical(config):
        read = [state[n] for n in ("coarse", "coarse_scale", "channel_scale", "num_grouped", "num_communities")]
        listed = call(
            ckv.route_coarse.default,
            (site.query, *read, capacity, state["coarse_scores"], state["scores"], layer, graphs, groups, site.scale,
             least_groups(config), coarse_from(config), visit_slots(config)),
        )  # fmt: skip
        visit = tuple(call(operator.getitem, (listed, i)) for i in range(2))
        new += [listed, *visit]
    routed = call(
        ckv.route.default,
        (site.query, *(state[n] for n in ROUTED), capacity, state["scores"], layer, graphs, groups, site.scale, score,
         length, shortlist_slots(config), *visit),
    )  # fmt: skip
    shortlist, left_out = call(operator.getitem, (routed, 0)), call(operator.getitem, (routed, 1))
    retrieved = call(
        ckv.retrieve.default,
        (
            shortlist,
            left_out,
            *(
                state[n]
                for n in (
                    "scores",
                    "start",
                    "stored",
                    "size",
                    "member",
                    "log_community",
                    "log_first",
                    "num_communities",
                    "n_indexed",
                )
            ),
            capacity,
            length,
            state["first"],
            state["tally"],
            layer,
            batch,
            graphs,
            config.budget,
            sinks,
            window,
            assigns_tokens(config),
            *((queries, reserved) if reserved else (queries,) if queries > 1 else ()),
        ),
    )
    tokens, count = call(operator.getitem, (retrieved, 0)), call(operator.getitem, (retrieved, 1))
    new += [routed, shortlist, left_out, retrieved, tokens, count]
    return tokens, count


def _assign(graph: fx.Graph, sites: list[AttentionSite], state: dict[str, fx.Node], length: fx.Node, config) -> None:
    """Behind all layers: their edges, which it reads, make it follow every operator that reads what it changes."""
    geometry = geometry_of(sites)
    graphs = geometry.num_graphs(config.graph_aggregation)
    keys = config.graph == "keys"
    places, lists = edge_lists(keys, graphs, geometry.num_query_heads, geometry.num_kv_heads)
    sizes = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, lists, config.kappa, graphs)
    kept = (*(state[name] for name in CANDIDATES), state["first"])
    picks = (geometry.num_layers, places, lists, config.budget, config.num_sink_tokens, config.kappa)
    read = (state["new_key"], *(state[name] for name in ASSIGNED), state["capacity_0"], length, state["first"])
    with graph.inserting_before(graph_edit.output_node(graph)):
        call = graph.call_function
        picked = call(ckv.pick_edges.default, (*kept, *picks, "keys" if keys else "attention"))
        edges = [call(operator.getitem, (picked, i)) for i in range(2)]
        kept_values = ("new_value", "mean_value", "log_value") if config.centroid_budget else ()
        values = tuple(state[name] for name in kept_values)
        arguments = (*edges, *read, *sizes, config.num_sink_tokens, 1.0 if keys else config.lam, *values)
        assigned = call(ckv.assign_tokens.default, arguments)
    graph_edit.set_example_values(graph, [picked, *edges, assigned])


def _replace_counts(
    graph: fx.Graph, sites: list[AttentionSite], inputs: list[fx.Node], outputs: list, state: dict[str, fx.Node],
    static_length: int | None,
) -> dict[fx.Node, dict[int, int]]:  # fmt: skip
    """Integers that count the cached tokens become the counter on the device; what ``replace_counts`` returns."""
    left = [node for node in inputs if node in graph.nodes]
    if static_length is not None:
        return replace_counts(graph, left, outputs, inputs[static_length])
    cached = hint_of(sites[0].past_key.meta["example_value"].shape[2])
    return replace_counts(
        graph, [node for node in left if hint_of(node.meta["example_value"]) == cached], outputs, state["length"]
    )
