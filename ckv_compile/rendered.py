"""Kernels of the templates without Inductor: the same text, rendered to a plain Triton module.

A rendered kernel runs under Triton's interpreter on a CPU, compiles ahead of time for any architecture, and launches on
a GPU. Tests use it, and the two operators that run between graphs or beside torch's own kernels (``key_neighbors``,
``prefill_attention``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
import triton

from ckv_compile.index_layout import ASSIGNED_AT_ONCE
from ckv_compile.templates import load_template


class RenderedKernel:
    """One template with its constants. ``ranks``: number of dimensions of each tensor argument that is asked for."""

    def __init__(self, name: str, helpers: Sequence[str], constants: dict[str, Any], output_rank: int = 0) -> None:
        self.name = f"ckv_{name}"  # by which profiles know it
        constants = {"PDL": False, **constants}
        self.constants = {k: v for k, v in constants.items() if k not in ("num_warps", "num_stages")}
        self.options = {k: v for k, v in constants.items() if k in ("num_warps", "num_stages")}
        if constants["PDL"] and "gdc_wait" in load_template(name):
            self.options["launch_pdl"] = True
        self.arguments: list[str] = []
        self.numbers: list[tuple[str, str, int]] = []  # (kind, tensor, dimension)
        self.text = self._render(load_template(name, *helpers))
        self.kernel = _load(self.text, self.name)

    def __call__(self, grid: tuple[int, int, int], tensors: dict[str, Any], output: torch.Tensor) -> Any:
        """Launch with the tensors by name. Sizes and strides that the kernel asks for are taken from them."""
        tensors = {**tensors, "OUT": output}
        if self.constants.get("TMA"):
            triton.set_allocator(_scratch)  # for the descriptors
        return self.kernel[grid](*self.values(tensors), **self.options)

    def values(self, tensors: dict[str, Any]) -> list[Any]:
        """The arguments in order."""
        read = {"stride": lambda t, d: t.stride(d), "size": lambda t, d: t.shape[d]}
        return [tensors[name] for name in (*self.arguments, "OUT")] + [
            read[kind](tensors[name], dimension) for kind, name, dimension in self.numbers
        ]

    def names(self) -> list[str]:
        return [*self.arguments, "OUT", *(f"{kind}_{name}_{dimension}" for kind, name, dimension in self.numbers)]

    def _number(self, kind: str, name: str, dimension: int) -> str:
        if (kind, name, dimension) not in self.numbers:
            self.numbers.append((kind, name, dimension))
        return f"{kind}_{name}_{dimension}"

    def _render(self, source: str) -> str:
        def def_kernel(*names: str) -> str:
            self.arguments = list(names)
            return "<DEFINITION>"

        def stride(name: str, dimension: int | None = None) -> str:
            if dimension is not None:
                return self._number("stride", name, dimension)
            return ", ".join(self._number("stride", name, i) for i in range(4))

        def size(name: str, dimension: int) -> str:
            return self._number("size", name, dimension)

        def store_output(
            indices: Sequence[str], value: str, mask: str, indent_width: int = 4, val_shape: Sequence[str] = ()
        ) -> str:
            terms = [f"({index}) * {self._number('stride', 'OUT', i)}" for i, index in enumerate(indices)]
            shape = ", ".join(val_shape)
            return f"tl.store(OUT + {' + '.join(terms)} + tl.zeros([{shape}], tl.int32), {value}, mask={mask})"

        environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
        body = environment.from_string(source).render(
            def_kernel=def_kernel, stride=stride, size=size, store_output=store_output, **self.constants
        )
        head = f"@triton.jit\ndef {self.name}({', '.join(self.names())}):\n"
        head += "".join(f"    {name}: tl.constexpr = {value}\n" for name, value in self.constants.items())
        return "import triton\nimport triton.language as tl\n\n\n" + body.replace("<DEFINITION>", head, 1)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


@functools.lru_cache(maxsize=128)
def cached_kernel(name: str, constants: tuple[tuple[str, Any], ...]) -> RenderedKernel:
    """The kernel of a template without helpers, rendered once for each set of constants."""
    return RenderedKernel(name, [], dict(constants))


def _load(text: str, name: str) -> Any:
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    path = Path(tempfile.gettempdir()) / f"ckv_rendered_{digest}.py"
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text)
    own.replace(path)  # another process may be reading it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


# ---------------------------------------------------------------------- the decode operators, launched on tensors


def append_kv(key, value, key_new, value_new, length):
    """``ckv::append_kv`` by its kernel. Returns the positions ``[B, H, T]``."""
    from ckv_compile.lowering import append_kv as lowering

    batch, heads, tokens, dim = key_new.shape
    constants = lowering.constants_of(batch, heads, tokens, dim, value_new.shape[3])
    positions = poisoned((batch, heads, tokens), torch.int32, key.device)
    tensors = {"KEY_NEW": key_new, "VALUE_NEW": value_new, "LENGTH": length, "KEY": key, "VALUE": value}
    RenderedKernel("append_kv", [], {**constants, "num_warps": 1})((batch * heads, tokens, 1), tensors, positions)
    return positions


def grouped_linear(input, weights, biases=None, **tuned):
    """``ckv::grouped_linear`` by its kernel, for input ``[M, K]``."""
    out = poisoned((input.shape[0], sum(weight.shape[0] for weight in weights)), input.dtype, input.device)
    kernel, grid = grouped_linear_kernel(input, weights, biases, **tuned)
    kernel(grid, grouped_linear_tensors(input, weights, biases), out)
    return out


def grouped_linear_kernel(input, weights, biases=None, **tuned):
    """That kernel for tensors of these shapes, and its grid."""
    from ckv_compile.lowering import grouped_linear as lowering

    biased = [bias is not None for bias in biases or [None] * len(weights)]
    constants = lowering.constants_of(*input.shape, [weight.shape[0] for weight in weights], biased)
    constants = {**constants, **lowering.configs(*input.shape, input.dtype)[0], **tuned}
    return RenderedKernel("grouped_linear", [], constants), (lowering.programs(constants), 1, 1)


def grouped_linear_tensors(input, weights, biases=None):
    """Its tensors by name."""
    named = {f"WEIGHT_{i}": weight for i, weight in enumerate(weights)}
    return {"INPUT": input, **named, **{f"BIAS_{i}": bias for i, bias in enumerate(biases or [])}}


def route_coarse(query, state, layer, num_graphs, num_kv_heads, scale, least, start, slots, **tuned):
    """``ckv::route_coarse`` by its kernel: (visit, count). state: an ``IndexState``, whose scores are written."""
    from ckv_compile.lowering import route_coarse as lowering

    batch, heads, queries, dim = query.shape
    constants = lowering.constants_of(batch, heads, dim, num_graphs, num_kv_heads, scale, least, start, slots, queries)
    constants |= {**lowering.configs(constants)[0], **tuned}
    visit = poisoned((batch, num_graphs, slots), torch.int32, query.device)
    count = poisoned((batch, num_graphs), torch.int32, query.device)
    tensors = {
        "QUERY": query, "COARSE": state.coarse, "COARSE_SCALE": state.coarse_scale, "CHANNEL_SCALE": state.channel_scale,
        "GROUPED": state.num_grouped, "NUMBER": state.num_communities, "CAPACITY": state.capacity_of(layer),
        "COARSE_SCORES": state.coarse_scores, "SCORES": state.scores, "VISIT": visit,
    }  # fmt: skip
    RenderedKernel("route_coarse", [], constants)((constants["PROGRAMS"], batch * num_graphs, 1), tensors, count)
    return visit, count


def route(query, state, layer, num_graphs, num_kv_heads, scale, score, length, slots, visit=None, new=None, **tuned):
    """``ckv::route`` by its kernels. state: an ``IndexState``, whose scores are written. Returns (shortlist, left_out).

    visit: (visit, count) of ``route_coarse``. new: key, value, key_new and value_new of ``append_kv``, done besides.
    """
    from ckv_compile.lowering import append_kv
    from ckv_compile.lowering import route as lowering

    batch, heads, queries, dim = query.shape
    constants = lowering.constants_of(batch, heads, dim, num_graphs, num_kv_heads, scale, score, slots, queries)
    rows = constants["BLOCK_H"] if queries > 1 else 0
    configs = lowering.configs(score, constants["PARTS"], dim, rows, listed=visit is not None)
    constants = {**constants, **configs[0], **tuned}
    grid = (constants["PROGRAMS"], batch * num_graphs, 1)
    shortlist = poisoned((batch, num_graphs, 5, slots), torch.int32, query.device)
    left_out = poisoned((batch, num_graphs, constants["PROGRAMS"]), torch.float32, query.device)
    constants["LISTED"] = visit is not None
    tensors = {
        "QUERY": query,
        "CENTROID": state.centroid,
        "CENTROID_SCALE": state.centroid_scale,
        "CHANNEL_SCALE": state.channel_scale,
        "SIZE": state.size,
        "START": state.start,
        "STORED": state.stored,
        "NUMBER": state.num_communities,
        "CAPACITY": state.capacity_of(layer),
        "LENGTH": length,
        "SCORES": state.scores,
        "SHORTLIST": shortlist,
    }
    if score == "softmax":
        shape = (batch, heads * queries, constants["PROGRAMS"])
        top, mass = (poisoned(shape, torch.float32, query.device) for _ in range(2))
        RenderedKernel("route", [], {**constants, "STATISTICS": True})(grid, {**tensors, "MASS": mass}, top)
        tensors |= {"TOP": top, "MASS": mass}
    if visit is not None:
        tensors["VISIT"], tensors["VISITS"] = visit
    if new is not None:
        constants |= {"APPEND": True, **append_kv.new_constants(*new[2].shape[1:], new[3].shape[3])}
        tensors |= dict(zip(("KEY", "VALUE", "KEY_NEW", "VALUE_NEW"), new, strict=True))
    RenderedKernel("route", [], constants)(grid, tensors, left_out)
    return shortlist, left_out


def retrieve(
    shortlist, left_out, state, length, first, layer, num_graphs, budget, sinks, window, has_log, num_new=1,
    reserved=0, **tuned,
):  # fmt: skip
    """``ckv::retrieve`` by its kernel: (tokens, count)."""
    from ckv_compile.lowering import retrieve as lowering

    batch, slots = shortlist.shape[0], shortlist.shape[3]
    constants = lowering.constants_of(batch, num_graphs, budget, sinks, window, has_log, slots, num_new, reserved)
    constants = {**constants, **lowering.configs(slots, batch * num_graphs, has_log)[0], **tuned}
    tokens = poisoned((batch, num_graphs, budget), torch.int32, shortlist.device)
    count = poisoned((batch, num_graphs), torch.int32, shortlist.device)
    tensors = {
        "SHORTLIST": shortlist,
        "LEFT_OUT": left_out,
        "SCORES": state.scores,
        "START": state.start,
        "STORED": state.stored,
        "SIZE": state.size,
        "MEMBER": state.member,
        "LOG": state.log_community,
        "LOG_FIRST": state.log_first,
        "NUMBER": state.num_communities,
        "N_INDEXED": state.n_indexed,
        "CAPACITY": state.capacity_of(layer),
        "LENGTH": length,
        "FIRST": first,
        "TALLY": state.tally,
        "TOKENS": tokens,
    }
    grid = (lowering.num_parts(constants), batch * num_graphs, 1)
    RenderedKernel("retrieve", ["attended", "threshold"], constants)(grid, tensors, count)
    return tokens, count


def select_summaries(state, length, first, layer, num_graphs, budget, reserved, sinks, window, **tuned):
    """``ckv::select_summaries`` by its kernel: (ids, how many)."""
    from ckv_compile.lowering import select_summaries as lowering

    batch, device = first.shape[0], first.device
    constants = lowering.constants_of(batch, num_graphs, budget, reserved, sinks, window)
    constants = {**constants, **lowering.configs()[0], **tuned}
    ids = poisoned((batch, num_graphs, reserved), torch.int32, device)
    count = poisoned((batch, num_graphs), torch.int32, device)
    tensors = {
        "SCORES": state.scores, "SIZE": state.size, "NUMBER": state.num_communities, "N_INDEXED": state.n_indexed,
        "CAPACITY": state.capacity_of(layer), "LENGTH": length, "FIRST": first, "TALLY": state.tally, "IDS": ids,
    }  # fmt: skip
    kernel = RenderedKernel("select_summaries", ["attended", "threshold"], constants)
    kernel((batch * num_graphs, 1, 1), tensors, count)
    return ids, count


def sparse_attention(
    query,
    key,
    value,
    tokens,
    count,
    n_indexed,
    capacity,
    length,
    first,
    sink_logits,
    layer,
    scale,
    sinks,
    window,
    described=(),
    **tuned,
):
    """``ckv::sparse_attention`` by its kernels: ``[B, Hq, Q, Dv]``. described: its arguments from summaries on."""
    others = (tokens, count, n_indexed, capacity, length, first)
    return _attention(query, key, value, others, sink_logits, scale, sinks, window, tuned, described=described)


def sparse_attention_edges(
    query,
    key,
    value,
    tokens,
    count,
    n_indexed,
    capacity,
    length,
    first,
    sink_logits,
    candidate,
    candidate_score,
    candidate_rest,
    candidate_norm,
    new_key,
    layer,
    scale,
    sinks,
    window,
    kappa,
    source,
    described=(),
    **tuned,
):
    """``ckv::sparse_attention_edges`` by its kernels: ``[B, Hq, 1, Dv]``; the candidates and new_key are written."""
    from ckv_compile.lowering import edges as lowering

    others = (tokens, count, n_indexed, capacity, length, first)
    kept = (candidate, candidate_score, candidate_rest, candidate_norm)
    edges = lowering.Edges(source == "keys", kappa, *kept, new_key)
    batch, kv_heads, _, dim = key.shape
    if edges.keys and tokens.shape[1] < kv_heads:
        constants = lowering.constants_of(batch, kv_heads, dim, tokens.shape[2], sinks, window, kappa)
        constants |= {**lowering.configs(key.dtype, dim, constants["KEPT"])[0], **tuned}
        constants = {name: value for name, value in constants.items() if name not in ("LIST_STAGES", "TAIL_STAGES")}
        number = poisoned((batch, constants["SPLITS"]), torch.int32, key.device)
        tensors = {**_attended(others), **_candidates(edges), "KEY": key}
        kernel = RenderedKernel("edges", ["attended", "edge_entries"], constants)
        kernel((constants["SPLITS"], batch, 1), tensors, number)
        edges.stored = True
    return _attention(query, key, value, others, sink_logits, scale, sinks, window, tuned, edges, described)


def _attended(others):
    return dict(zip(("TOKENS", "COUNT", "N_INDEXED", "CAPACITY", "LENGTH", "FIRST"), others, strict=True))


def _candidates(edges):
    return {
        "CANDIDATE": edges.candidate, "CANDIDATE_SCORE": edges.score, "CANDIDATE_REST": edges.rest, "NORM": edges.norm,
        "NEW_KEY": edges.new_key,
    }  # fmt: skip


def _attention(query, key, value, others, sink_logits, scale, sinks, window, tuned, edges=None, described=()):
    from ckv_compile.lowering import edges as edge_lowering
    from ckv_compile.lowering import sparse_attention as lowering

    (batch, heads, queries, dim), value_dim = query.shape, value.shape[3]
    _, graphs, budget = others[0].shape
    constants = lowering.attend_constants(
        batch, heads, key.shape[1], dim, value_dim, scale, graphs, budget, sinks, window, queries
    )
    means = _means(query, value, others, described, constants) if described else {}
    if edges is not None and not edges.stored:
        constants |= edge_lowering.edge_constants(edges.keys, edges.kappa, constants)
    rows = constants["BLOCK_H"] if queries > 1 else 0
    constants |= lowering.configs(query.dtype, max(dim, value_dim), rows, constants.get("KEPT", 0))[0]
    constants |= tuned
    splits = constants["SPLITS"]
    total = poisoned((batch, splits, heads * queries, value_dim), torch.float32, query.device)
    top, mass = (poisoned((batch, splits, heads * queries), torch.float32, query.device) for _ in range(2))
    tensors = {**_attended(others), "QUERY": query, "KEY": key, "VALUE": value, "TOP": top, "MASS": mass}
    if edges is not None:
        tensors |= _candidates(edges)
    kernel = RenderedKernel("sparse_attention", ["attended", "edge_entries"], constants)
    kernel((splits, batch * constants["LISTS"], 1), tensors, total)
    out = poisoned((batch, heads, queries, value_dim), query.dtype, query.device)
    constants = lowering.merge_constants(batch, heads, value_dim, splits, queries, has_sinks=sink_logits is not None)
    tensors |= {"TOTAL": total, "SINK_LOGITS": sink_logits, **means}
    if described:
        constants["SUMMARIES"] = described[0].shape[2]
    if edges is not None and not edges.keys:
        constants["EDGES"] = True
    merged = RenderedKernel("merge_splits", [], {**constants, **lowering.merge_configs(constants)[0]})
    merged((batch * heads * queries, 1, 1), tensors, out)
    return out


def pick_edges(
    candidate, candidate_score, candidate_rest, candidate_norm, num_places, budget, sinks, kappa, source, **tuned
):  # fmt: skip
    """``ckv::pick_edges`` by its kernel: (neighbor, weight) of all layers; the candidates in full."""
    from ckv_compile.lowering import pick_edges as lowering

    layers, batch, lists = candidate_norm.shape
    constants = lowering.constants_of(layers, batch, num_places, lists, budget, sinks, kappa, source == "keys")
    constants |= {**lowering.configs()[0], **tuned}
    shape, device = (layers, batch, lists, kappa), candidate.device
    neighbor, weight = poisoned(shape, torch.int32, device), poisoned(shape, torch.float32, device)
    tensors = {
        "CANDIDATE": candidate, "SCORE": candidate_score, "REST": candidate_rest, "NORM": candidate_norm, "WEIGHT": weight,
    }  # fmt: skip
    RenderedKernel("pick_edges", ["edge_entries"], constants)((batch * lists, layers, 1), tensors, neighbor)
    return neighbor, weight


def _means(query, value, others, described, attends):
    """The kernel over communities: what its merge takes of it, by name."""
    from ckv_compile.lowering import attend_summaries as lowering

    summaries = lowering.Summaries(*described)
    (batch, heads, _, dim), value_dim, device = query.shape, value.shape[3], query.device
    constants = lowering.constants_of(
        attends, summaries.ids.shape[2], query.dtype, values=summaries.new_value is not None
    )
    constants |= lowering.configs(query.dtype, max(dim, value_dim))[0]
    total = poisoned((batch, heads, value_dim), torch.float32, device)
    top, mass = (poisoned((batch, heads), torch.float32, device) for _ in range(2))
    tensors = {
        **_attended(others), "QUERY": query, "VALUE": value, "IDS": summaries.ids, "CENTROID": summaries.centroid,
        "CENTROID_SCALE": summaries.centroid_scale, "CHANNEL_SCALE": summaries.channel_scale, "SIZE": summaries.size,
        "MEAN_VALUE": summaries.mean_value, "NEW_VALUE": summaries.new_value, "TOP": top, "MASS": mass,
    }  # fmt: skip
    RenderedKernel("attend_summaries", [], constants)((batch * constants["LISTS"], 1, 1), tensors, total)
    return {"SUMMARY_TOTAL": total, "SUMMARY_TOP": top, "SUMMARY_MASS": mass}


def assign_tokens(
    new_neighbor, new_weight, new_key, state, length, first, num_graphs, sinks, lam, new_value=None, mean_value=None,
    log_value=None,
):  # fmt: skip
    """``ckv::assign_tokens`` by its kernels: int32 ``[L, B]``, the tokens that got a community. state: an ``IndexState``,
    which is changed. new_neighbor, new_weight: ``[L, B, H, kappa]``. new_key and new_value: ``[L, B, Hkv, D]``.
    """
    from ckv_compile.lowering import assign_tokens as lowering

    layers, batch, lists, kappa = new_neighbor.shape
    plans = lowering.plan_constants(layers, batch, num_graphs, lists, kappa, sinks, lam)
    entries = plans["BLOCK_L"] * plans["BLOCK_K"]
    graphs, device = (layers, batch, num_graphs), new_neighbor.device
    plan = poisoned(graphs, torch.int32, device)
    scratch = {
        "TOKEN": poisoned(graphs, torch.int32, device),
        "COMMUNITY": poisoned((*graphs, entries), torch.int32, device),
        "INCREMENT": poisoned((*graphs, entries), torch.float32, device),
        "TIE": poisoned((*graphs, entries), torch.float32, device),
        "SUMS": poisoned((*graphs, 2), torch.float32, device),
    }
    shared = {
        "LABEL": state.label, "COMMUNITY_WEIGHT": state.community_weight, "TOTAL": state.total_weight,
        "NUMBER": state.num_communities, "N_INDEXED": state.n_indexed, "LOG_FIRST": state.log_first,
        "CAPACITY": state.capacity, "LENGTH": length, "LOG": state.log_community,
    }  # fmt: skip
    planned = {
        "NEIGHBOR": new_neighbor, "WEIGHT": new_weight, "GAMMA": state.gamma, "FIRST": first,
        "EDGE_NEIGHBOR": state.edge_neighbor, "EDGE_WEIGHT": state.edge_weight,
    }  # fmt: skip
    grid = lowering.programs(plans)
    commits = lowering.commit_constants(layers, batch, num_graphs, *new_key.shape[2:], entries)
    tensors = {
        "PLAN": plan,
        "NEW_KEY": new_key,
        "CHANNEL_SCALE": state.channel_scale,
        "CENTROID": state.centroid,
        "CENTROID_SCALE": state.centroid_scale,
        "LOG_MEAN": state.log_mean,
        "MEAN_AT": state.mean_at,
        "START": state.start,
        "STORED": state.stored,
        "SIZE": state.size,
    }
    if new_value is not None:
        commits["VALUES"] = True
        tensors |= {"NEW_VALUE": new_value, "MEAN_VALUE": mean_value, "LOG_VALUE": log_value}
    total = torch.zeros((layers, batch), dtype=torch.int32, device=device)
    for turn in range(ASSIGNED_AT_ONCE):
        later, assigned = {"LATER": turn > 0}, poisoned((layers, batch), torch.int32, device)
        RenderedKernel("plan_tokens", [], {**plans, **later, **lowering.plan_configs(plans)[0]})(
            grid, {**shared, **planned, **scratch}, plan
        )
        RenderedKernel("assign_tokens", [], {**commits, **later, **lowering.commit_configs()[0]})(
            grid, {**shared, **tensors, **scratch}, assigned
        )
        total += assigned
    return total


def poisoned(shape, dtype: torch.dtype, device) -> torch.Tensor:
    """Memory that shows whatever a kernel left unwritten: NaN, or a large negative integer."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -0x5A5A5A5A, dtype=dtype, device=device)


# ---------------------------------------------------------------------- prefill


def topk_prefill(query, key, value, length, first, scale, sinks, kappa, sink_logits=None, topk="fast", **tuned):
    """``ckv::topk_prefill`` by its kernels: (out, neighbor, weight); (out, None, None) with kappa 0."""
    launches, results = topk_prefill_launches(
        query, key, value, length, first, scale, sinks, kappa, sink_logits, topk, **tuned
    )
    for launch in launches:
        launch()
    return results


def topk_prefill_launches(
    query, key, value, length, first, scale, sinks, kappa, sink_logits=None, topk="fast", TMA=False, look=None, **tuned
):  # fmt: skip
    """Its kernels as functions to be called in order, and the results that they write."""
    from ckv_compile.lowering import topk_prefill as lowering

    (batch, heads, queries, dim), (_, kv_heads, _, value_dim) = query.shape, value.shape
    exact = topk == "exact" and kappa > 0
    constants = lowering.attend_constants(
        heads, kv_heads, dim, value_dim, scale, sinks, kappa, exact=exact, has_sinks=sink_logits is not None, tma=TMA
    )
    architecture = lowering.architecture_of(query.device)
    config = lowering.attend_config(query.dtype, max(dim, value_dim), kappa, exact, architecture)
    constants |= {**config, **tuned}
    out = poisoned((batch, queries, heads, value_dim), query.dtype, query.device)
    tensors = {
        "QUERY": query, "KEY": key, "VALUE": value, "LENGTH": length, "FIRST": first, "SINK_LOGITS": sink_logits,
    }  # fmt: skip

    def launch(name, constants, grid, output):
        return functools.partial(RenderedKernel(name, [], constants), grid, tensors, output)

    launches = [launch("topk_prefill", constants, (-(-queries // constants["BLOCK_M"]), heads, batch), out)]
    if not kappa:
        return launches, (out.transpose(1, 2), None, None)
    lists, device = (batch, heads, queries, kappa), query.device
    neighbor, cell = poisoned(lists, torch.int32, device), poisoned(lists, torch.int32, device)
    weight = poisoned(lists, torch.float32, device)
    tensors |= {"CELL": cell, "WEIGHT": weight, "NEIGHBOR": neighbor}
    looks = lowering.look_up_constants(constants)
    looks |= {**lowering.look_up_config(looks), **(look or {})}
    launches.append(launch("topk_neighbors", looks, (-(-queries // looks["ROWS"]), heads, batch), neighbor))
    if exact:
        tensors["COUNT"] = poisoned((batch, kv_heads), torch.int32, device)
        tensors["DOUBTFUL"] = poisoned((batch, kv_heads, heads // kv_heads * queries), torch.int32, device)
        repairs = lowering.repair_constants(looks) | lowering.repair_config(query.dtype, dim, kappa, architecture)
        had = poisoned((batch, kv_heads, repairs["PROGRAMS"]), torch.int32, device)
        launches.append(launch("topk_repair", repairs, (repairs["PROGRAMS"], kv_heads, batch), had))
    return launches, (out.transpose(1, 2), neighbor, weight)
