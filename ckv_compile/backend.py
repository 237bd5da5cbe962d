"""The entry of ``torch.compile(model, backend="communitykv")``.

Dynamo's graph is copied, its attention is found and rewritten to ``ckv::`` operators, and Inductor compiles the rest.
A graph that cannot be rewritten is compiled as it is, and the report says why.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import logging
import operator
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import ckv_compile
from ckv_compile import generate, recompile_limit, report
from ckv_compile.config import CommunityConfig
from ckv_compile.passes import graph_edit
from ckv_compile.passes.group_projections import group_projections
from ckv_compile.passes.index_expressions import memory_owner, mutated_argument
from ckv_compile.passes.match_attention import Cache, find_sites
from ckv_compile.passes.rewrite_decode import rewrite_decode
from ckv_compile.passes.rewrite_plan import RewritePlan, uniform
from ckv_compile.passes.rewrite_prefill import rewrite_prefill
from ckv_compile.passes.several_queries import step_queries
from ckv_compile.runtime import cuda_graphs, device_graph
from ckv_compile.runtime.cuda_graphs import CudaGraphs
from ckv_compile.runtime.runner import GraphRunner, prepare

log = logging.getLogger(__name__)
LEAST_CAPABILITY = (8, 0)
# Operators of others that read lengths on the host, without saying so (``cudagraph_unsafe``): experts of float16 or float32.
SYNCHRONIZING = frozenset({"transformers::grouped_mm_fallback"})


def communitykv(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
):
    """Compile one graph of dynamo's. ``mode`` is Inductor's; ``options`` are ours (``CommunityConfig``) and Inductor's.

    Raises ValueError or TypeError for options that are unknown or impossible.
    """
    cuda_graphs.require_no_capture("the first call of a model or of a kind of cache, which compiles,")
    config, inductor_options = CommunityConfig.from_options(options)
    recompile_limit.warn_at_the_last()
    patches = inductor_patches(config, mode, inductor_options)
    record = report.GraphRecord(config)
    copied = graph_edit.copy_graph(gm)
    graph_edit.inline_numbers(copied.graph)
    sites, refusals = find_sites(copied)
    record.names = [site.name for site in sites]
    record.refusals = [(refusal.name, refusal.reason) for refusal in refusals]
    entry_of = functools.partial(report.entry_of, _parameter_position(copied.graph), record)

    reason = _why_not(copied, sites, refusals)
    plan = None
    if reason is None:
        plan, reason = _rewrite(copied, sites, config)
    if plan is None:
        record.refusals += [(site.name, reason or "") for site in sites]
        record.names = []
        return _dense(gm, patches, record, entry_of)

    record.phase, record.cache, record.symbolic = plan.phase, plan.cache.name, plan.symbolic
    record.queries, record.exact = plan.queries, plan.exact
    if plan.geometry.device.type == "cuda":
        importlib.import_module("ckv_compile.lowering")  # registers the kernels; imports triton
        if plan.phase == "decode":
            record.grouped = group_projections(copied, config.group_projections)
        else:
            device_graph.prepare(plan.geometry, config)
    log.info("rewrote %d attention layers of a %s graph (%s cache)", len(sites), plan.phase, record.cache)
    counts = _advances_counter(copied.graph, plan)
    record.cuda_graphs = CudaGraphs(
        _why_not_captured(copied.graph, plan, config, mode, patches), _outputs(copied, plan)
    )
    patches["triton.cudagraphs"] = record.cuda_graphs.refusal is None
    _mark_written_inputs(copied.graph)
    fakes = [node.meta["example_value"] for node in graph_edit.placeholders(copied.graph)]
    compiled = record.cuda_graphs.compile(lambda: _compile(copied, fakes, patches))
    prepare(config)
    dense = graph_edit.copy_graph(gm).forward
    return GraphRunner(plan, config, compiled, dense, entry_of, record.cuda_graphs, counts)


def _why_not(gm: fx.GraphModule, sites: list, refusals: list) -> str | None:
    """Why the graph stays dense, or None. A layer that was refused keeps its own reason; the others get this one.

    Layers that see nearby keys only stay as they are, beside others that are rewritten.
    """
    if not sites:
        return "no attention to rewrite"
    if torch.is_grad_enabled() and any(_requires_grad(node) for node in graph_edit.placeholders(gm.graph)):
        return "gradients are enabled and an input requires grad; call the model under torch.no_grad()"
    if others := [refusal for refusal in refusals if not refusal.local]:
        return f"another layer of the same graph was refused ({others[0].name}: {others[0].reason})"
    if (unsupported := device_reason(sites[0].device)) is not None:
        return unsupported
    if sites[0].cache is Cache.NONE:
        return "no cache: the keys and values of this call are not kept"
    return uniform(sites)


def device_reason(device: torch.device) -> str | None:
    """Why attention on this device is left alone, or None. Judged by what a GPU can do, never by its name."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"device {device.type}; supported are cpu and cuda"
    if torch.version.hip is not None:
        return "a ROCm build of torch; supported are cpu and CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"CUDA compute capability {capability[0]}.{capability[1]}; supported are 8.0 and later"
    return None


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _rewrite(gm: fx.GraphModule, sites: list, config: CommunityConfig) -> tuple[RewritePlan | None, str | None]:
    try:
        queries, exact = step_queries(sites, config)
        if queries is not None:
            return rewrite_decode(gm, sites, config, queries), None
        return dataclasses.replace(rewrite_prefill(gm, sites, config), exact=exact), None
    except ValueError as error:
        return None, str(error)


def _dense(gm: fx.GraphModule, patches: dict[str, Any], record: report.GraphRecord, entry_of):
    """The graph as dynamo gave it, compiled by Inductor."""
    record.phase = "dense"
    if record.refusals:
        name, reason = record.refusals[0]
        log.info("a graph stays dense: %s: %s", name, reason)
        report.warn_once(f"communitykv left attention dense: {name}: {reason}")
    graph = graph_edit.copy_graph(gm)
    fakes = [node.meta["example_value"] for node in graph_edit.placeholders(graph.graph)]
    asked = patches.get("triton.cudagraphs", inductor_config().triton.cudagraphs)
    record.cuda_graphs = CudaGraphs(None if asked else "a dense graph, for which mode and options ask for none")
    compiled = record.cuda_graphs.compile(lambda: _compile(graph, fakes, patches))

    def run(*args):
        entry_of(args)
        return compiled(*args)

    return run


def _compile(gm: fx.GraphModule, fakes: list[Any], patches: dict[str, Any]):
    from torch._inductor.compile_fx import compile_fx

    with warnings.catch_warnings():
        return compile_fx(gm, fakes, config_patches=patches)


def _parameter_position(graph: fx.Graph) -> int | None:
    for position, node in enumerate(graph_edit.placeholders(graph)):
        if isinstance(node.meta.get("example_value"), torch.nn.Parameter):
            return position
    return None


# ---------------------------------------------------------------------- CUDA graphs


def _why_not_captured(
    graph: fx.Graph, plan: RewritePlan, config: CommunityConfig, mode: str | None, patches: dict[str, Any]
) -> str | None:
    """Why a rewritten graph is not recorded, or None: decode graphs on CUDA are, unless somebody says otherwise."""
    if plan.geometry.device.type != "cuda":
        return f"it runs on the {plan.geometry.device.type}"
    if plan.phase != "decode":
        return "a prefill hands keys to the host"
    if not config.cuda_graphs:
        return "options['cuda_graphs'] is False"
    if patches.get("triton.cudagraphs") is False:
        return "options['triton.cudagraphs'] is False"
    if mode is not None and mode.endswith("-no-cudagraphs"):
        return f"mode is {mode!r}"
    if (name := _host_operator(graph)) is not None:
        return f"{name} has no kernel that a CUDA graph can hold"
    if not patches.get("graph_partition", inductor_config().graph_partition) and (name := _synchronizing(graph)):
        return f"{name} reads lengths on the host, and graph_partition, which would leave it out, is off"
    if sizes := _sizes_of_inputs(graph):
        return f"sizes change from call to call ({', '.join(sizes)})"
    return None


def _host_operator(graph: fx.Graph) -> str | None:
    """An operator of ours that only its reference implements, which reads lengths on the host: no CUDA graph holds it.

    One that says so itself (``cudagraph_unsafe``) is left to Inductor, which records what lies between.
    """
    from torch._inductor.lowering import lowerings

    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "ckv":
            continue
        lowering = lowerings.get(target)
        unlowered = lowering is None or getattr(lowering, "_is_fallback_handler", False)
        if unlowered and torch.Tag.cudagraph_unsafe not in target.tags:
            return str(target)
    return None


def _synchronizing(graph: fx.Graph) -> str | None:
    """The first operator of ``SYNCHRONIZING``."""
    names = (node.target.name() for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return next((name for name in names if name.removesuffix(".default") in SYNCHRONIZING), None)


def _sizes_of_inputs(graph: fx.Graph) -> list[str]:
    """Symbols in the shapes of inputs, but for the batch size: each of its values may have a recording of its own."""
    symbols: set[Any] = set()
    batch: set[Any] = set()
    for node in graph_edit.placeholders(graph):
        value = node.meta["example_value"]
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        found = {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
        if node.name == "ckv_first":
            batch = found
        symbols |= found
    return sorted(str(symbol) for symbol in symbols - batch)


def _outputs(gm: fx.GraphModule, plan: RewritePlan) -> list[tuple[int, int | None]]:
    """Tensors that a rewritten graph returns, each with the input (of dynamo's) of which it may be a view."""
    inputs = graph_edit.placeholders(gm.graph)
    outputs = []
    returned: Any = graph_edit.output_node(gm.graph).args[0]
    for position, node in enumerate(returned):
        if isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor):
            owner = memory_owner(node)
            kept = inputs.index(owner) if owner.op == "placeholder" else None
            outputs.append((position, plan.keep[kept] if kept is not None and kept < len(plan.keep) else None))
    return outputs


def _mark_written_inputs(graph: fx.Graph) -> None:
    """Inputs that a graph writes stay where they are: the buffers and counters of a static cache, as its layers say.

    A prefill that dynamo compiled made them itself, and then transformers does not mark them; without the mark Inductor
    would refuse to record the graph ("mutated inputs").
    """
    for node in graph.nodes:
        written = mutated_argument(node)
        owner = None if written is None else memory_owner(written)
        if owner is not None and owner.op == "placeholder":
            marks = owner.meta.get("tensor_dict", {})
            owner.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded", **marks}


def _advances_counter(graph: fx.Graph, plan: RewritePlan) -> bool:
    """Whether a decode graph itself adds its new tokens, once, to the counter of its static cache."""
    if plan.phase != "decode" or plan.static_length is None or plan.static_length not in plan.keep:
        return False
    counter = graph_edit.placeholders(graph)[plan.keep.index(plan.static_length)]
    writes = [
        node
        for node in graph.nodes
        if (written := mutated_argument(node)) is not None and memory_owner(written) is counter
    ]
    return len(writes) == 1 and writes[0].target in ("add_", operator.iadd) and writes[0].args[1:] == (plan.queries,)


# ---------------------------------------------------------------------- Inductor's configuration


def inductor_config() -> Any:
    from torch._inductor import config

    return config


@functools.cache
def sources_digest() -> str:
    """Hash of every source of this package: lowerings and templates are in no cache key of Inductor's."""
    root = Path(ckv_compile.__file__).parent
    folders = [root, *(Path(module.__path__[0]) for module in _folders())]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.jinja")]):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _folders() -> list[Any]:
    """Packages of ours that lie outside the folder of this one."""
    return [importlib.import_module(f"ckv_compile.{name}") for name in ("passes", "templates")]


class CacheKeyPass(CustomGraphPass):
    """Rewrites nothing: puts our sources and options into the keys of Inductor's and AOTAutograd's caches.

    A pass of the user's that stood in its place still runs, and its identity is part of the key.
    """

    def __init__(self, config: CommunityConfig, users: Any = None) -> None:
        self.config, self.users = config, users

    def __call__(self, graph: fx.Graph) -> None:
        if self.users is not None:
            self.users(graph)

    def uuid(self) -> Any:
        users = self.users.uuid() if isinstance(self.users, CustomGraphPass) else None
        return ("communitykv", sources_digest(), self.config.digest(), users)


def inductor_patches(config: CommunityConfig, mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Config patches for ``compile_fx``: Inductor's mode, the user's own options, our cache key."""
    from torch._inductor import list_mode_options

    patches = {key.replace("-", "_"): value for key, value in list_mode_options(mode).items()} if mode else {}
    patches.update(options)
    apart = patches.get("custom_should_partition_ops", inductor_config().custom_should_partition_ops)
    patches["custom_should_partition_ops"] = [*apart, *sorted(SYNCHRONIZING - set(apart))]
    users = patches.get("post_grad_custom_post_pass", inductor_config().post_grad_custom_post_pass)
    patches["post_grad_custom_post_pass"] = CacheKeyPass(config, users)
    return patches


generate.install(communitykv)
recompile_limit.install(communitykv)
