"""Graphs with a few new tokens per row on a cache that holds some: decode steps too, where that is possible.

Assisted decoding verifies drafted tokens with such calls. One retrieval serves the queries of a row, and how many there
are is compiled into the kernels, so a symbolic number is specialised: dynamo then compiles once for each that occurs.
"""

from __future__ import annotations

import torch
from torch._dynamo import config as dynamo_config
from torch._guards import CompileContext, TracingContext

from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import assigns_tokens
from ckv_compile.passes.index_expressions import hint_of
from ckv_compile.passes.match_attention import AttentionSite

MAX_QUERIES = 8
MAX_ROWS = 64  # queries times query heads of a KV head: what the kernels keep in registers
SPARE_COMPILATIONS = 2  # of those that dynamo allows: one for every other number of tokens, one for a step of one


def step_queries(sites: list[AttentionSite], config: CommunityConfig) -> tuple[int | None, str | None]:
    """(new tokens per row of a decode step, None), or (None, why a graph with so few is attended exactly).

    (None, None) is a prefill: a first call, or one with more tokens. May specialise the number, or guard that it is more.
    """
    first = sites[0]
    if first.is_decode:
        return 1, None
    size = first.query.meta["example_value"].shape[2]
    if first.starts_empty:
        return None, None
    known = hint_of(size)
    if known is None:
        return None, "the number of new tokens is symbolic and has no example"
    reason = _why_exact(first, config, known) if known <= MAX_QUERIES else None
    if reason is not None:
        return None, reason
    if isinstance(size, torch.SymInt) and not size.node.expr.is_Integer:
        unsplit = _why_one_for_all()
        if unsplit is not None:
            return None, unsplit if known <= MAX_QUERIES else None
        if known > MAX_QUERIES:
            if _why_exact(first, config, 2) is None:
                bool(size > MAX_QUERIES)  # fewer tokens get a graph of their own
            return None, None
        int(size)
    return (known, None) if known <= MAX_QUERIES else (None, None)


def _why_exact(site: AttentionSite, config: CommunityConfig, queries: int) -> str | None:
    if assigns_tokens(config):
        return "several new tokens at a time are not assigned to communities"
    if config.centroid_budget:
        return "several new tokens at a time do not attend to means of communities (centroid_budget)"
    rows = queries * (site.num_query_heads // site.num_kv_heads)
    if rows > MAX_ROWS:
        return f"{queries} new tokens of the query heads of a KV head are {rows} rows; supported are {MAX_ROWS}"
    return None


def _why_one_for_all() -> str | None:
    """Why a symbolic number of tokens stays symbolic, or None."""
    tracing = TracingContext.try_get()
    for context in tracing.tensor_to_context.values() if tracing is not None else ():
        for constraint in getattr(context, "constraint_sizes", None) or ():
            if constraint is not None and not constraint.warn_only:
                return "a size was marked as dynamic, so the number of new tokens is not specialised"
    compiling = CompileContext.try_get()
    number = getattr(compiling.compile_id, "frame_compile_id", None) if compiling is not None else None
    if number is not None and number >= dynamo_config.recompile_limit - SPARE_COMPILATIONS:
        return "torch._dynamo.config.recompile_limit leaves no compilation for another number of new tokens"
    return None
