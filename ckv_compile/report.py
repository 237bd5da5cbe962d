"""What matched, what was refused and why, and what ran: ``explain(model)``."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
import weakref
from typing import Any

import torch

from ckv_compile.config import CommunityConfig
from ckv_compile.runtime.cuda_graphs import CudaGraphs
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.statistics import RunStatistics

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class GraphRecord:
    """One graph that dynamo handed to the backend."""

    config: CommunityConfig
    phase: str = "dense"  # "prefill" | "decode" | "dense"
    cache: str = ""  # "EMPTY" | "DYNAMIC" | "STATIC"
    names: list[str] = dataclasses.field(default_factory=list)  # rewritten layers
    refusals: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (layer, reason)
    symbolic: list[str] = dataclasses.field(default_factory=list)
    queries: int = 1  # new tokens per row of a decode step
    exact: str | None = None  # why a prefill of few tokens is no decode step
    grouped: tuple[int, int] = (0, 0)  # linears, and the kernels that compute them
    cuda_graphs: CudaGraphs | None = None  # what Inductor recorded of it, or why not


@dataclasses.dataclass(eq=False)
class ModelEntry:
    """What is recorded about one model: graphs that ran with its parameters, and counters."""

    parameter: weakref.ref | None
    graphs: dict[GraphRecord, int] = dataclasses.field(default_factory=dict)  # calls: other models may share a graph
    statistics: RunStatistics = dataclasses.field(default_factory=lambda: RunStatistics(0))
    deferred_stops: int = 0  # generations that read whether to stop one step late


_entries: dict[int, ModelEntry] = {}
_warned: set[str] = set()


def entry_of(position: int | None, record: GraphRecord, args: Any) -> ModelEntry:
    """The entry of the model whose first parameter is ``args[position]``; counts a call of the graph."""
    parameter = None if position is None else args[position]
    key = id(parameter)
    entry = _entries.get(key)
    if entry is None or (entry.parameter is not None and entry.parameter() is not parameter):
        reference = None if parameter is None else weakref.ref(parameter, lambda _: _entries.pop(key, None))
        entry = _entries[key] = ModelEntry(reference)
    if record not in entry.graphs:
        entry.graphs[record] = 0
        entry.statistics.grow_to(len(record.names))
    entry.graphs[record] += 1
    return entry


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)


def entries_of(model: torch.nn.Module) -> list[ModelEntry]:
    keys = {id(parameter) for parameter in model.parameters()}
    return [entry for key, entry in list(_entries.items()) if key in keys]


def rewritten_calls(model: torch.nn.Module) -> int:
    """How often graphs of this model that were rewritten have run."""
    return sum(calls for entry in entries_of(model) for graph, calls in list(entry.graphs.items()) if graph.names)


def broken_steps(model: torch.nn.Module) -> list[str]:
    """What is known of steps of this model that were not what they were taken for. Waits for the device."""
    REGISTRY.audit()
    return [message for entry in entries_of(model) for message in entry.statistics.broken]


# ---------------------------------------------------------------------- explain

NO_ATTENTION = (
    "no attention was found in any graph: nothing is scaled_dot_product_attention, flex_attention or a softmax between two "
    "products; load the model with attn_implementation='sdpa'"
)


@dataclasses.dataclass
class Explanation:
    """What the backend did with one model. Printed by ``explain``; the fields are what the lines are made of."""

    rewritten: dict[str, list[str]]  # layer -> kinds of graph in which it was rewritten
    refused: dict[str, list[str]]  # layer -> reasons
    graphs: dict[GraphRecord, int]  # graph -> calls by this model
    cache_kinds: list[str]
    prefills: int
    decode_steps: int
    sparse_steps: int
    dense_steps: dict[str, int]  # reason -> steps
    caches_adopted: int
    caches_reordered: int
    tokens_attended: int  # summed over rows, graphs and layers
    tokens_in_context: int
    communities: int
    mean_community_size: float
    largest_community: int
    edges_dropped: int
    partition_seconds: float
    waited_seconds: float
    index_lag_seconds: list[float]
    fallbacks: list[str]
    captured: dict[GraphRecord, str]  # graph -> "captured", or why not
    deferred_stops: int  # generations whose stop check did not wait for the device
    broken_steps: list[str]  # steps whose mask or counter was another one than was assumed

    def lines(self) -> list[str]:
        if not self.graphs:
            return [
                "The backend has not compiled a graph of this model yet.",
                "It is reached by torch.compile(model, backend='communitykv') and a call or generate on what that "
                "returns, by model.compile(backend='communitykv'), or by compiling model.forward.",
            ]
        lines = [f"graphs: {len(self.graphs)} ({', '.join(itertools.starmap(_describe, self.graphs.items()))})"]
        lines.append(f"attention layers rewritten: {len(self.rewritten)}")
        if not self.rewritten and not self.refused:
            lines.append(NO_ATTENTION)
        for reason, layers in _by_reason(self.refused).items():
            lines.append(f"attention layers left as they were: {len(layers)} ({_span(layers)}): {reason}")
        lines += [f"{_kind(graph)} is exact: {graph.exact}" for graph in self.graphs if graph.exact is not None]
        lines.append(
            f"steps: {self.prefills} prefills, {self.decode_steps} decode steps, {self.sparse_steps} of them sparse"
        )
        for reason, count in self.dense_steps.items():
            lines.append(f"  dense: {count} x {reason}")
        if self.caches_adopted:
            lines.append(f"caches met without their prefill, or copied: {self.caches_adopted}")
        if self.caches_reordered:
            lines.append(f"caches whose rows had moved, and the index with them: {self.caches_reordered}")
        if self.tokens_in_context:
            share = self.tokens_attended / self.tokens_in_context
            lines.append(f"tokens attended: {share:.1%} of the context, over all layers and decode steps")
        if self.communities:
            lines.append(
                f"communities: {self.communities}, mean size {self.mean_community_size:.1f}, "
                f"largest {self.largest_community}"
            )
        if self.edges_dropped:
            lines.append(f"edges dropped because their weight was not a finite number: {self.edges_dropped}")
        if self.partition_seconds or self.index_lag_seconds:
            worst = max(self.index_lag_seconds, default=0.0)
            lines.append(
                f"partition: {self.partition_seconds:.2f} CPU seconds in workers, {self.waited_seconds:.2f} s waited "
                f"for, index ready at most {worst:.2f} s after the end of a prefill"
            )
        for fallback in self.fallbacks:
            lines.append(f"contiguous pages stood in for a partition: {fallback}")
        for graph in self.graphs:
            linears, kernels = graph.grouped
            if linears:
                lines.append(f"linear layers in grouped kernels: {_kind(graph)}: {linears} in {kernels}")
        lines += [f"CUDA graphs: {_kind(graph)}: {verdict}" for graph, verdict in self.captured.items()]
        if self.deferred_stops:
            lines.append(f"generations that did not wait for their stop check: {self.deferred_stops}")
        lines += [f"NOT TO BE TRUSTED: {message}" for message in self.broken_steps]
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def explain(model: torch.nn.Module, *, show: bool = True) -> Explanation:
    """What the backend matched, refused and ran for ``model``; printed unless ``show`` is false, and returned.

    model: what was compiled, or what ``torch.compile`` returned for it.
    """
    entries = entries_of(getattr(model, "_orig_mod", model))
    REGISTRY.settle()
    graphs: dict[GraphRecord, int] = {}
    for entry in entries:
        for graph, calls in list(entry.graphs.items()):
            graphs[graph] = graphs.get(graph, 0) + calls
    rewritten: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for graph in graphs:
        for name in graph.names:
            kinds = rewritten.setdefault(name, [])
            if graph.phase not in kinds:
                kinds.append(graph.phase)
        for name, reason in graph.refusals:
            reasons = refused.setdefault(name, [])
            if reason not in reasons:
                reasons.append(reason)
    if not rewritten:  # a graph behind a graph break may hold no parameter that says whose it is
        unowned = _entries.get(id(None))
        for graph in unowned.graphs if unowned is not None else ():
            for name, reason in graph.refusals:
                reasons = refused.setdefault(f"{name} of a graph without parameters", [])
                reasons += [reason] if reason not in reasons else []
    statistics = [entry.statistics for entry in entries]
    layers = [layer for one in statistics for layer in one.layers]
    communities = sum(layer.communities for layer in layers)
    dense: dict[str, int] = {}
    for one in statistics:
        for reason, count in one.dense_reasons.items():
            dense[reason] = dense.get(reason, 0) + count
    explanation = Explanation(
        rewritten=rewritten,
        refused=refused,
        graphs=graphs,
        cache_kinds=sorted({graph.cache for graph in graphs if graph.cache}),
        prefills=sum(one.prefills for one in statistics),
        decode_steps=sum(one.decode_steps for one in statistics),
        sparse_steps=sum(one.sparse_steps for one in statistics),
        dense_steps=dense,
        caches_adopted=sum(one.adopted for one in statistics),
        caches_reordered=sum(one.reordered for one in statistics),
        tokens_attended=sum(one.tokens_attended for one in statistics),
        tokens_in_context=sum(one.tokens_in_context for one in statistics),
        communities=communities,
        mean_community_size=sum(layer.members for layer in layers) / max(1, communities),
        largest_community=max((layer.largest for layer in layers), default=0),
        edges_dropped=sum(layer.dropped for layer in layers),
        partition_seconds=sum(one.partition_seconds for one in statistics),
        waited_seconds=sum(one.waited_seconds for one in statistics),
        index_lag_seconds=[lag for one in statistics for lag in one.index_lag_seconds],
        fallbacks=[failure for one in statistics for failure in one.failures],
        captured={graph: graph.cuda_graphs.verdict() for graph in graphs if graph.cuda_graphs is not None},
        deferred_stops=sum(entry.deferred_stops for entry in entries),
        broken_steps=[message for one in statistics for message in one.broken],
    )
    if show:
        print(explanation)
    return explanation


def _describe(graph: GraphRecord, calls: int) -> str:
    return f"{_kind(graph)}, {calls} calls"


def _kind(graph: GraphRecord) -> str:
    if graph.phase == "dense":
        return "dense"
    cache = {"EMPTY": "new dynamic cache", "DYNAMIC": "dynamic cache", "STATIC": "static cache"}[graph.cache]
    tokens = f" of {graph.queries} tokens" if graph.queries > 1 else ""
    return f"{graph.phase}{tokens} with a {cache}"


def _by_reason(refused: dict[str, list[str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, reasons in refused.items():
        for reason in reasons:
            grouped.setdefault(reason, []).append(name)
    return grouped


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}" if len(names) > 2 else ", ".join(names)
