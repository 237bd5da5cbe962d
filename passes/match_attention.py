"""Finds the attention of a graph: what each one computes if it can be rewritten, or why it is left alone.

Works on dynamo's graph before AOTAutograd, where scaled_dot_product_attention is one node and attention that a model
writes out is as it was written (``eager_attention``). ``find_sites`` only reads.
A site is claimed only if its meaning follows from the graph: a wrong match is a wrong token, a missed one costs time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ckv_compile.passes.attention_call import AttentionCall, BlockLists, dtype_of, is_sdpa, sdpa_call
from ckv_compile.passes.eager_attention import eager_call, is_eager_attention
from ckv_compile.passes.flex_attention import flex_call, is_flex_attention
from ckv_compile.passes.index_expressions import (
    IndexedTensor,
    IndexExpressions,
    Load,
    NotAnExpression,
    shape_of,
    size_expr,
)
from ckv_compile.passes.kv_sources import (
    Cache,
    KVSource,
    KVSources,
    LocalAttentionError,
    RefusedError,
    check_pair,
    peel_repeat_kv,
)
from ckv_compile.passes.mask_analysis import LocalMaskError, MaskRule, UnknownMaskError, judge_flex_mask, judge_mask
from ckv_compile.passes.other_attention import describe_other_attention, nested_attention

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8


@dataclass(frozen=True)
class AttentionSite:
    """One causal self-attention, exactly as the graph computes it.

    Query ``i`` of ``[batch, num_query_heads, num_queries, head_dim]`` sees the keys at positions up to its own, of
    those only the ones that ``padding`` or ``mask`` allow. Its own position is ``i`` if ``starts_empty``, else
    ``position[i]`` (STATIC) or ``length of past_key + i`` (DYNAMIC). Query head ``h`` reads KV head
    ``h // (num_query_heads // num_kv_heads)``.

    node: the SDPA call, the last product of eager attention or the first output of flex_attention; its value is what
        users of the node (a view, a transpose) see, and they stay.
    index: order among all attention of the graph, refused ones included.
    name: path of the module, "model.layers.3.self_attn".
    key_new, value_new: keys and values of this call, [batch, num_kv_heads, num_queries, head_dim].
    key_cache, value_cache: the updated cache. NONE: ``key_new`` itself. EMPTY, DYNAMIC: the ``cat``, which is read by
        this attention and returned, nothing else. STATIC: the buffer, a graph input or, when the cache is created in
        this graph, a node that is a graph output; nothing but the write and this attention touches it.
    past_key, past_value: DYNAMIC: the graph inputs that ``cat`` extends; nothing else reads more than their sizes.
        STATIC: the buffers if they are graph inputs. Else None.
    write_key, write_value: STATIC: the ``index_copy_`` nodes, which come before ``node``.
    position: STATIC: their index, int64 [num_queries], consecutive.
    padding: graph input [batch, n], nonzero where a key may be seen, contents unknown until run time. STATIC: keys at
        ``n`` and after are not seen.
    mask: graph input [batch or 1, 1, num_queries, length of the buffer], bool or additive, in place of a mask computed
        in the graph (STATIC only: ``generate`` makes it beforehand). Until its contents are checked at run time nothing
        is known of what queries see.
    blocks: what flex_attention visits. Until these lists are checked at run time nothing is known of what queries see.
    offset: an integer input that must be the number of cached tokens at run time, for the same reason.
    ahead: STATIC: what is said here holds if ``padding`` hides so many positions after the query's own.
    sink_logits: floating point [num_query_heads], in the softmax of every query beside its keys, without a value.
    starts_empty: no key precedes this call's. For STATIC with ``is_causal=True`` this is transformers' own shortcut:
        its masking takes it only if the cache holds no token, and then drops the mask.
    is_decode: one query, and keys precede it.
    batch: rows of the query, a number or a symbol.
    """

    node: fx.Node
    index: int
    name: str
    query: fx.Node
    key_new: fx.Node
    value_new: fx.Node
    cache: Cache
    key_cache: fx.Node
    value_cache: fx.Node
    past_key: fx.Node | None
    past_value: fx.Node | None
    write_key: fx.Node | None
    write_value: fx.Node | None
    position: fx.Node | None
    padding: fx.Node | None
    mask: fx.Node | None
    blocks: BlockLists | None
    offset: fx.Node | None
    ahead: int
    sink_logits: fx.Node | None
    starts_empty: bool
    is_decode: bool
    scale: float
    batch: int | torch.SymInt
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Refusal:
    """An attention that stays as it is; ``reason`` completes "left alone: ..." for users.

    local: it sees keys near its query only, and others of its graph may be rewritten.
    """

    name: str
    index: int
    reason: str
    local: bool = False


def find_sites(gm: fx.GraphModule) -> tuple[list[AttentionSite], list[Refusal]]:
    """Every attention of the graph, each in exactly one of the lists, both in graph order."""
    sites, refusals = [], []
    finder = _Finder(gm.graph)
    for index, (node, read) in enumerate(_attention(gm)):
        name = module_path(node) or f"attention {index}"
        try:
            sites.append(finder.examine(read(node), index, name))
        except RefusedError as refused:
            refusals.append(Refusal(name, index, str(refused), isinstance(refused, LocalAttentionError)))
    return _unshared(sites, refusals)


def _attention(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Callable[[fx.Node], AttentionCall]]]:
    """All attention in graph order, each with what reads it; that raises RefusedError for forms that are not known."""
    for node in gm.graph.nodes:
        if is_sdpa(node):
            yield node, sdpa_call
        elif is_eager_attention(node):
            yield node, eager_call
        elif is_flex_attention(node):
            yield node, functools.partial(flex_call, gm)
        elif (reason := describe_other_attention(node)) is not None:
            yield node, _refuse(reason)
        for reason in nested_attention(gm, node):
            yield node, _refuse(reason)


def _refuse(reason: str) -> Callable[[fx.Node], AttentionCall]:
    def read(node: fx.Node) -> AttentionCall:
        raise RefusedError(reason)

    return read


def _unshared(sites: list[AttentionSite], refusals: list[Refusal]) -> tuple[list[AttentionSite], list[Refusal]]:
    """Refuse sites that read one cache together: rewriting one would take it from the other."""
    owners: dict[fx.Node, list[str]] = {}
    for site in sites:
        for node in {site.key_cache, site.value_cache} if site.cache is not Cache.NONE else ():
            owners.setdefault(node, []).append(site.name)
    kept = []
    for site in sites:
        others = {name for node in (site.key_cache, site.value_cache) for name in owners.get(node, ())} - {site.name}
        repeated = any(len(owners.get(node, ())) > 1 for node in (site.key_cache, site.value_cache))
        if repeated:
            shared = f"K or V is shared with another attention ({', '.join(sorted(others)) or site.name})"
            refusals.append(Refusal(site.name, site.index, shared))
        else:
            kept.append(site)
    return kept, sorted(refusals, key=lambda refusal: refusal.index)


def module_path(node: fx.Node) -> str | None:
    """Path of the module that ran ``node``, counted from the compiled module: "model.layers.3.self_attn"."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    path = re.sub(r"^L\.(args\.\d+|\w+)\.?", "", path).strip(".")
    return re.sub(r"(^|\.)_modules\.", r"\1", path) or None


class _Finder:
    def __init__(self, graph: fx.Graph):
        self.expressions = IndexExpressions(graph)
        self.sources = KVSources(graph)
        self.rules: dict[tuple, MaskRule | RefusedError] = {}

    def examine(self, call: AttentionCall, index: int, name: str) -> AttentionSite:
        num_keys = _check_operands(call)

        key_read, key_repeats = peel_repeat_kv(call.key)
        value_read, value_repeats = peel_repeat_kv(call.value)
        key_source = self.sources.of(key_read, call.key_reader, call.query)
        value_source = self.sources.of(value_read, call.value_reader, call.query)
        check_pair(key_source, value_source, call.query)
        source = key_source
        num_queries = size_expr(call.query.meta["example_value"].shape[2])
        heads = _heads(call, key_source.new, value_source.new, key_repeats, value_repeats)

        try:
            rule = self._rule(call, source, num_queries, num_keys)
        except RefusedError as refused:
            if source.cache is not Cache.NONE or call.mask is None or isinstance(refused, LocalAttentionError):
                raise
            raise RefusedError(f"this call's keys are not kept, as with use_cache=False, and {refused}") from None
        if source.num_read is not None and not (rule.from_start and source.num_read == num_queries):
            raise RefusedError("only a part of the static cache is read")
        starts_empty = source.cache in (Cache.NONE, Cache.EMPTY) or rule.from_start or source.made_here

        example = call.query.meta["example_value"]
        return AttentionSite(
            node=call.node,
            index=index,
            name=name,
            query=call.query,
            key_new=source.new,
            value_new=value_source.new,
            cache=source.cache,
            key_cache=source.updated,
            value_cache=value_source.updated,
            past_key=source.past,
            past_value=value_source.past,
            write_key=source.write,
            write_value=value_source.write,
            position=source.position,
            padding=rule.padding,
            mask=rule.given,
            blocks=None if call.flex_mask is None else call.flex_mask.blocks,
            offset=rule.offset,
            ahead=rule.ahead,
            sink_logits=call.sink_logits,
            starts_empty=starts_empty,
            is_decode=num_queries == 1 and not starts_empty,
            scale=float(call.scale) if call.scale is not None else 1.0 / math.sqrt(heads[2]),
            batch=example.shape[0],
            num_query_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            dtype=example.dtype,
            device=example.device,
        )

    # ------------------------------------------------------------------ which keys a query sees

    def _rule(self, call: AttentionCall, source: KVSource, num_queries: sympy.Expr, num_keys: sympy.Expr) -> MaskRule:
        if call.flex_mask is not None:
            return self._rule_of_flex_mask(call, source, num_queries, num_keys)
        if call.mask is not None:
            if call.is_causal:
                raise RefusedError("both a mask and is_causal=True are given")
            return self._rule_of_mask(call.mask, source, shape_of(call.query)[0], num_queries, num_keys)
        if call.is_causal:
            # torch aligns this to the first key: query i sees keys 0..i, however many keys there are.
            if source.cache is Cache.STATIC:
                start = self._position(source, num_queries).at((sympy.S.Zero,))
                if start != 0 and (num_queries == 1 or not isinstance(start, Load) or start.index):
                    raise RefusedError(
                        "is_causal=True counts from the first key, but this call's keys are written elsewhere"
                    )
            if source.cache is Cache.DYNAMIC:
                raise RefusedError("not causal: is_causal=True counts from the first of the cached tokens")
            return MaskRule(from_start=True)
        if num_queries == 1 and (source.cache is not Cache.STATIC or num_keys == 1):
            return MaskRule(from_start=False)
        if source.cache is Cache.STATIC:
            raise RefusedError(
                "not causal: every query sees the whole static cache, positions not yet written included"
            )
        raise RefusedError("not causal: every query sees every key")

    def _rule_of_mask(
        self, mask: fx.Node, source: KVSource, num_rows: sympy.Expr, num_queries: sympy.Expr, num_keys: sympy.Expr
    ) -> MaskRule:
        position = self._position(source, num_queries) if source.cache is Cache.STATIC else None
        own = None if position is None else position.at((sympy.Symbol("i", integer=True, nonnegative=True),))
        key = (mask, num_rows, num_queries, num_keys, own)
        if key not in self.rules:  # layers share their masks
            try:
                self.rules[key] = judge_mask(
                    self.expressions,
                    mask,
                    num_rows=num_rows,
                    num_queries=num_queries,
                    num_keys=num_keys,
                    position=position,
                )
            except UnknownMaskError as error:
                self.rules[key] = _refused(error)
        rule = self.rules[key]
        if isinstance(rule, RefusedError):
            raise rule
        if rule.given is not None and "sliding" in rule.given.name:
            raise LocalAttentionError(f"sliding window attention (the mask is {rule.given.name})")
        if rule.given is not None and source.cache is not Cache.STATIC:
            kind = "an additive" if dtype_of(rule.given).is_floating_point else "a"
            raise RefusedError(f"the mask is {kind} 4-D tensor given by the caller ({rule.given.name})")
        if rule.from_start and source.cache is Cache.DYNAMIC:
            raise RefusedError("not causal: query i sees keys 0..i of a cache that already holds earlier tokens")
        if (
            rule.from_start
            and source.cache is Cache.STATIC
            and not source.made_here
            and position.at((sympy.S.Zero,)) != 0
        ):
            raise RefusedError("the mask counts from the first key, but this call's keys are written elsewhere")
        return rule

    def _rule_of_flex_mask(
        self, call: AttentionCall, source: KVSource, num_queries: sympy.Expr, num_keys: sympy.Expr
    ) -> MaskRule:
        position = self._position(source, num_queries) if source.cache is Cache.STATIC else None
        if source.num_read is not None:
            raise RefusedError("flex_attention over a part of the static cache")
        try:
            rule = judge_flex_mask(
                self.expressions,
                call.flex_mask,
                call.key_reader,
                num_rows=shape_of(call.query)[0],
                num_queries=num_queries,
                num_keys=num_keys,
                position=position,
            )
        except UnknownMaskError as error:
            raise _refused(error) from None
        if rule.from_start and position is not None and not source.made_here and position.at((sympy.S.Zero,)) != 0:
            raise RefusedError("the mask counts from the first key, but this call's keys are written elsewhere")
        if rule.from_start and source.cache is Cache.DYNAMIC:
            raise RefusedError("not causal: query i sees keys 0..i of a cache that already holds earlier tokens")
        if rule.offset is not None and source.cache not in (Cache.DYNAMIC, Cache.STATIC):
            raise RefusedError(f"the mask of flex_attention counts from {rule.offset.name} although nothing is cached")
        return rule

    def _position(self, source: KVSource, num_queries: sympy.Expr) -> IndexedTensor:
        """Where this call's keys are written; refuses if they are not known to be consecutive."""
        try:
            position = self.expressions.of(source.position)
        except NotAnExpression as error:
            raise RefusedError(f"the position in the static cache is computed in an unknown way ({error})") from None
        i = sympy.Symbol("i", integer=True, nonnegative=True)
        if num_queries != 1 and sympy.expand(position.at((i,)) - position.at((sympy.S.Zero,)) - i) != 0:
            raise RefusedError("the positions in the static cache are not known to be consecutive")
        return position


# ---------------------------------------------------------------------- pieces that need no graph


def _refused(error: UnknownMaskError) -> RefusedError:
    return (LocalAttentionError if isinstance(error, LocalMaskError) else RefusedError)(str(error))


def _check_operands(call: AttentionCall) -> sympy.Expr:
    """Refuse what the operators do not compute; returns the number of keys."""
    query, key, value = (node.meta["example_value"] for node in (call.query, call.key, call.value))
    if isinstance(call.dropout_p, fx.Node) or call.dropout_p != 0:
        raise RefusedError(f"dropout_p is {call.dropout_p}; only inference is rewritten")
    if any(tensor.requires_grad for tensor in (query, key, value)):
        raise RefusedError("gradients are recorded; call the model under torch.no_grad() or torch.inference_mode()")
    for name, flag in (("is_causal", call.is_causal), ("enable_gqa", call.enable_gqa)):
        if not isinstance(flag, bool):
            raise RefusedError(f"{name} is not known at compile time")
    if call.scale is not None and not isinstance(call.scale, int | float):
        raise RefusedError("scale is not known at compile time")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RefusedError(f"{name} has {tensor.dim()} dimensions; supported is [batch, heads, tokens, head_dim]")
    if query.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise RefusedError(f"dtype {str(query.dtype).removeprefix('torch.')}; supported are {names}")
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        raise RefusedError("query, key and value differ in dtype or device")
    dims = [tensor.shape[3] for tensor in (query, key, value)]
    if not all(isinstance(dim, int) for dim in dims) or len(set(dims)) != 1:
        raise RefusedError(f"head_dim differs between query, key and value ({', '.join(map(str, dims))})")
    if dims[0] % HEAD_DIM_STEP or not MIN_HEAD_DIM <= dims[0] <= MAX_HEAD_DIM:
        raise RefusedError(
            f"head_dim {dims[0]}; supported are multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        )
    return size_expr(key.shape[2])


def _heads(
    call: AttentionCall, key_new: fx.Node, value_new: fx.Node, key_repeats: int, value_repeats: int
) -> tuple[int, int, int]:
    """(num_query_heads, num_kv_heads, head_dim), if query heads read KV heads in groups of equal size, in order."""
    num_query_heads = call.query.meta["example_value"].shape[1]
    num_kv_heads, value_heads = (node.meta["example_value"].shape[1] for node in (key_new, value_new))
    if not all(isinstance(n, int) for n in (num_query_heads, num_kv_heads, value_heads)):
        raise RefusedError("the number of heads is not known at compile time")
    group, rest = divmod(num_query_heads, num_kv_heads)
    grouped = key_repeats == value_repeats and num_kv_heads == value_heads and rest == 0
    # One head of each is broadcast to all query heads, asked or not (Falcon).
    shared = call.enable_gqa or (num_kv_heads == key_repeats == 1)
    if not grouped or not (key_repeats == group or (shared and group % key_repeats == 0)):
        raise RefusedError(
            f"{num_query_heads} query heads do not read {num_kv_heads} key heads and {value_heads} value heads "
            "in groups of equal size"
        )
    return num_query_heads, num_kv_heads, key_new.meta["example_value"].shape[3]
