"""Finds the attention of a graph: what each one computes if it can be rewritten, or why it is left alone.

Works on dynamo's graph before AOTAutograd, where scaled_dot_product_attention is one node. ``find_sites`` only reads.
A site is claimed only if its meaning follows from the graph: a wrong match is a wrong token, a missed one costs time.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from ckv_compile.passes.index_expressions import (
    IndexedTensor,
    IndexExpressions,
    Load,
    NotAnExpression,
    is_tensor,
    memory_owner,
    mutated_argument,
    shape_of,
    size_expr,
    target_name,
)
from ckv_compile.passes.mask_analysis import MaskRule, UnknownMaskError, attention_mask, judge_mask
from ckv_compile.passes.other_attention import describe_other_attention, nested_attention

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8


class Cache(enum.Enum):
    """Where the keys that a query sees come from."""

    NONE = "none"  # from this call alone, and they are not kept
    EMPTY = (
        "empty"  # from this call alone; ``cat([tensor([]), k], -2)`` is a graph output: first call of a DynamicCache
    )
    DYNAMIC = "dynamic"  # ``cat([past, k], -2)`` of a graph input, a graph output
    STATIC = "static"  # ``index_copy_`` of k into a buffer; the whole buffer is read


@dataclass(frozen=True)
class AttentionSite:
    """One causal self-attention, exactly as the graph computes it.

    Query ``i`` of ``[batch, num_query_heads, num_queries, head_dim]`` sees the keys at positions up to its own, of those
    only the ones that ``padding`` or ``mask`` allow. Its own position is ``i`` if ``starts_empty``, else ``position[i]``
    (STATIC) or ``length of past_key + i`` (DYNAMIC). Query head ``h`` reads KV head
    ``h // (num_query_heads // num_kv_heads)``.

    node: the SDPA call; its output is what users of the node (a view, a transpose) see, and they stay.
    index: order among all attention of the graph, refused ones included.
    name: path of the module, "model.layers.3.self_attn".
    key_new, value_new: keys and values of this call, [batch, num_kv_heads, num_queries, head_dim].
    key_cache, value_cache: the updated cache. NONE: ``key_new`` itself. EMPTY, DYNAMIC: the ``cat``, which is read by
        this attention and returned, nothing else. STATIC: the buffer, a graph input or, when the cache is created in this
        graph, a node that is a graph output; nothing but the write and this attention touches it.
    past_key, past_value: DYNAMIC: the graph inputs that ``cat`` extends; nothing else reads more than their sizes.
        STATIC: the buffers if they are graph inputs. Else None.
    write_key, write_value: STATIC: the ``index_copy_`` nodes, which come before ``node``.
    position: STATIC: their index, int64 [num_queries], consecutive.
    padding: graph input [batch, n], nonzero where a key may be seen, contents unknown until run time. STATIC: keys at
        ``n`` and after are not seen.
    mask: graph input, bool [batch or 1, 1, num_queries, length of the buffer], in place of a mask computed in the graph
        (STATIC only: ``generate`` makes it beforehand). Until its contents are checked at run time nothing is known of
        what queries see.
    starts_empty: no key precedes this call's. For STATIC with ``is_causal=True`` this is transformers' own shortcut: its
        masking takes it only if the cache holds no token, and then drops the mask.
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
    """An attention that stays as it is; ``reason`` completes "left alone: ..." for users."""

    name: str
    index: int
    reason: str


class _RefusedError(Exception):
    """Ends the examination of one attention; the message is the reason."""


def find_sites(gm: fx.GraphModule) -> tuple[list[AttentionSite], list[Refusal]]:
    """Every attention of the graph, each in exactly one of the lists, both in graph order."""
    sites, refusals = [], []
    finder = _Finder(gm.graph)
    for index, (node, reason) in enumerate(_attention(gm)):
        name = module_path(node) or f"attention {index}"
        try:
            if reason is not None:
                raise _RefusedError(reason)
            sites.append(finder.examine(node, index, name))
        except _RefusedError as refused:
            refusals.append(Refusal(name, index, str(refused)))
    return _unshared(sites, refusals)


def _attention(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, str | None]]:
    """All attention in graph order; a reason if it is not an SDPA call of this very graph."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            yield node, None
        elif (reason := describe_other_attention(node)) is not None:
            yield node, reason
        for reason in nested_attention(gm, node):
            yield node, reason


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


@dataclass(frozen=True)
class _Source:
    """Where the K or V of an attention comes from."""

    cache: Cache
    new: fx.Node
    updated: fx.Node
    past: fx.Node | None = None
    write: fx.Node | None = None
    position: fx.Node | None = None
    made_here: bool = False  # STATIC: the buffer is created in this graph
    num_read: sympy.Expr | None = None  # STATIC: only this many leading positions are read


class _Finder:
    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.expressions = IndexExpressions(graph)
        output = next(node for node in graph.nodes if node.op == "output")
        self.outputs = set(output.all_input_nodes)
        self.rules: dict[tuple, MaskRule | str] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def examine(self, node: fx.Node, index: int, name: str) -> AttentionSite:
        call = _sdpa_arguments(node)
        query, key, value = (call[k] for k in ("query", "key", "value"))
        num_keys = _check_operands(call)
        mask = attention_mask(node)

        key_read, key_repeats = peel_repeat_kv(key)
        value_read, value_repeats = peel_repeat_kv(value)
        key_source, value_source = self._source(key_read, node), self._source(value_read, node)
        self._check_pair(key_source, value_source, query)
        source = key_source
        num_queries = size_expr(query.meta["example_value"].shape[2])
        heads = _heads(call, key_source.new, value_source.new, key_repeats, value_repeats)

        rule = self._rule(call, mask, source, num_queries, num_keys)
        if source.num_read is not None and not (rule.from_start and source.num_read == num_queries):
            raise _RefusedError("only a part of the static cache is read")
        starts_empty = source.cache in (Cache.NONE, Cache.EMPTY) or rule.from_start or source.made_here

        example = query.meta["example_value"]
        return AttentionSite(
            node=node,
            index=index,
            name=name,
            query=query,
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
            sink_logits=None,
            starts_empty=starts_empty,
            is_decode=num_queries == 1 and not starts_empty,
            scale=float(call["scale"]) if call["scale"] is not None else 1.0 / math.sqrt(heads[2]),
            batch=example.shape[0],
            num_query_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            dtype=example.dtype,
            device=example.device,
        )

    # ------------------------------------------------------------------ which keys a query sees

    def _rule(
        self, call: dict, mask: fx.Node | None, source: _Source, num_queries: sympy.Expr, num_keys: sympy.Expr
    ) -> MaskRule:
        query = call["query"].meta["example_value"]
        if mask is not None:
            if call["is_causal"]:
                raise _RefusedError("both a mask and is_causal=True are given")
            return self._rule_of_mask(mask, source, size_expr(query.shape[0]), num_queries, num_keys)
        if call["is_causal"]:
            # torch aligns this to the first key: query i sees keys 0..i, however many keys there are.
            if source.cache is Cache.STATIC:
                start = self._position(source, num_queries).at((sympy.S.Zero,))
                if start != 0 and (num_queries == 1 or not isinstance(start, Load) or start.index):
                    raise _RefusedError(
                        "is_causal=True counts from the first key, but this call's keys are written elsewhere"
                    )
            if source.cache is Cache.DYNAMIC:
                raise _RefusedError("not causal: is_causal=True counts from the first of the cached tokens")
            return MaskRule(from_start=True)
        if num_queries == 1 and (source.cache is not Cache.STATIC or num_keys == 1):
            return MaskRule(from_start=False)
        if source.cache is Cache.STATIC:
            raise _RefusedError(
                "not causal: every query sees the whole static cache, positions not yet written included"
            )
        raise _RefusedError("not causal: every query sees every key")

    def _rule_of_mask(
        self, mask: fx.Node, source: _Source, num_rows: sympy.Expr, num_queries: sympy.Expr, num_keys: sympy.Expr
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
                self.rules[key] = str(error)
        rule = self.rules[key]
        if isinstance(rule, str):
            raise _RefusedError(rule)
        if rule.given is not None and "sliding" in rule.given.name:
            raise _RefusedError(f"sliding window attention (the mask is {rule.given.name})")
        if rule.given is not None and source.cache is not Cache.STATIC:
            raise _RefusedError(f"the mask is a 4-D tensor given by the caller ({rule.given.name})")
        if rule.from_start and source.cache is Cache.DYNAMIC:
            raise _RefusedError("not causal: query i sees keys 0..i of a cache that already holds earlier tokens")
        if (
            rule.from_start
            and source.cache is Cache.STATIC
            and not source.made_here
            and position.at((sympy.S.Zero,)) != 0
        ):
            raise _RefusedError("the mask counts from the first key, but this call's keys are written elsewhere")
        return rule

    def _position(self, source: _Source, num_queries: sympy.Expr) -> IndexedTensor:
        """Where this call's keys are written; refuses if they are not known to be consecutive."""
        try:
            position = self.expressions.of(source.position)
        except NotAnExpression as error:
            raise _RefusedError(f"the position in the static cache is computed in an unknown way ({error})") from None
        i = sympy.Symbol("i", integer=True, nonnegative=True)
        if num_queries != 1 and sympy.expand(position.at((i,)) - position.at((sympy.S.Zero,)) - i) != 0:
            raise _RefusedError("the positions in the static cache are not known to be consecutive")
        return position

    # ------------------------------------------------------------------ where K and V come from

    def _source(self, read: fx.Node, attention: fx.Node) -> _Source:
        """``read`` is what the attention reads, [batch, num_kv_heads, keys, head_dim]."""
        base, start_of = read, None
        if (whole := _leading_positions(read)) is not None:
            base, start_of = peel_harmless(whole), shape_of(read)[2]
        base = _written_buffer(base)
        if start_of is None and base.op == "call_function" and target_name(base) in ("cat", "concat", "concatenate"):
            return self._concatenated(base, attention)
        if self._writes(base):
            return self._static(base, start_of, attention)
        if start_of is not None:
            base = read
        return self._plain(base)

    def _concatenated(self, cat: fx.Node, attention: fx.Node) -> _Source:
        tensors = cat.args[0] if cat.args else cat.kwargs.get("tensors")
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", cat.kwargs.get("axis", 0))
        if dim not in (-2, 2):
            raise _RefusedError(f"K or V is concatenated along dimension {dim}, not along the tokens")
        if len(tensors) != 2:
            raise _RefusedError(f"K or V is put together from {len(tensors)} parts")
        past, new = tensors
        if crop := self._cropped(cat):
            raise _RefusedError(sliding_window(crop))
        if cat not in self.outputs:
            raise _RefusedError("K or V is concatenated with earlier tokens but not returned as the updated cache")
        if self._writes(cat):
            raise _RefusedError("the updated cache is written in place")
        self._only_read_by(cat, attention)
        if _is_empty(past):
            return _Source(Cache.EMPTY, new=new, updated=cat)
        if past.op != "placeholder":
            if new.op == "placeholder":
                raise _RefusedError("K or V has this call's tokens before the cached ones")
            raise _RefusedError(f"the cached K or V is not an input of the graph but computed ({target_name(past)})")
        self._only_sizes_read(past, but=cat)
        return _Source(Cache.DYNAMIC, new=new, updated=cat, past=past)

    def _static(self, buffer: fx.Node, num_read: sympy.Expr | None, attention: fx.Node) -> _Source:
        writes = self._writes(buffer)
        write = writes[0]
        if len(writes) != 1 or target_name(write) != "index_copy_":
            names = ", ".join(sorted({target_name(w) for w in writes}))
            if "copy_" in names.split(", "):
                raise _RefusedError(sliding_window(shape_of(buffer)[2]))  # the buffer is shifted when it is full
            raise _RefusedError(f"K or V is updated in an unknown way ({names})")
        target, dim, position, new = _positional(write, "self", "dim", "index", "source")
        if target is not buffer or dim not in (2, -2):
            raise _RefusedError("K or V is written to a part of the static cache or along another dimension")
        if self.order[write] > self.order[attention]:
            raise _RefusedError("the static cache is written after it is read")
        made_here = buffer.op == "call_function" and target_name(buffer) in ("zeros", "empty")
        if not made_here and buffer.op != "placeholder":
            raise _RefusedError(f"the static cache is not an input of the graph but computed ({target_name(buffer)})")
        if made_here and buffer not in self.outputs:
            raise _RefusedError("the static cache made in this graph is not returned")
        self._only_read_by(buffer, attention, but=write)
        return _Source(
            Cache.STATIC, new=new, updated=buffer, past=None if made_here else buffer, write=write, position=position,
            made_here=made_here, num_read=num_read,
        )  # fmt: skip

    def _plain(self, base: fx.Node) -> _Source:
        if base.op == "placeholder":
            raise _RefusedError(
                f"cross-attention: keys are an input of the graph ({base.name}), not this call's tokens"
            )
        for node in _same_rank_ancestors(base):
            joins = target_name(node) in ("cat", "concat", "concatenate") and _arg(node, 1, "dim", 0) in (-2, 2)
            if joins or mutated_argument(node) is not None or node.op == "placeholder":
                raise _RefusedError(f"K or V is changed between the cache and the attention ({target_name(base)})")
        for user in self._aliases(base):
            if target_name(user) == "copy_":  # of the last tokens, into a static cache that they overflow
                raise _RefusedError(sliding_window(shape_of(user)[2]))
        return _Source(Cache.NONE, new=base, updated=base)

    def _check_pair(self, key: _Source, value: _Source, query: fx.Node) -> None:
        if key.cache is not value.cache or key.num_read != value.num_read or key.made_here != value.made_here:
            raise _RefusedError(f"K comes from a {key.cache.value} cache and V from a {value.cache.value} one")
        if key.cache is Cache.STATIC and key.position is not value.position:
            raise _RefusedError("K and V are written at different positions")
        if key.past is not None and not _belong_together(key.past.name, value.past.name):
            raise _RefusedError(f"K and V are not the halves of one cache ({key.past.name}, {value.past.name})")
        num_queries = shape_of(query)[2]
        for new in (key.new, value.new):
            if not is_tensor(new) or len(shape_of(new)) != 4 or shape_of(new)[2] != num_queries:
                raise _RefusedError("cross-attention: keys do not come from this call's tokens")
            if shape_of(new)[0] != shape_of(query)[0]:
                raise _RefusedError("queries and keys differ in batch size")

    # ------------------------------------------------------------------ who else uses them

    def _aliases(self, node: fx.Node) -> Iterator[fx.Node]:
        """Users of ``node`` and of its views, each once."""
        seen, pending = set(), list(node.users)
        while pending:
            user = pending.pop(0)
            if user in seen:
                continue
            seen.add(user)
            yield user
            if memory_owner(user) is not user and memory_owner(user) is memory_owner(node):
                pending.extend(user.users)

    def _writes(self, node: fx.Node) -> list[fx.Node]:
        """What writes into the memory of ``node``."""
        owner = memory_owner(node)
        written = ((user, mutated_argument(user)) for user in self._aliases(node))
        return [user for user, argument in written if argument is not None and memory_owner(argument) is owner]

    def _only_read_by(self, cache: fx.Node, attention: fx.Node, but: fx.Node | None = None) -> None:
        """Refuse if anything but this attention, the output and size queries reads the updated cache."""
        pending = [cache]
        while pending:
            for user in pending.pop().users:
                if user is attention or user.op == "output" or _is_size(user):
                    continue
                if user is but:
                    pending.append(user)  # index_copy_ returns the buffer
                    continue
                if attention not in _reached(user) or len(_reached(user)) > 1:
                    raise _RefusedError(f"K or V is also read by something else than this attention ({user.name})")

    def _only_sizes_read(self, past: fx.Node, but: fx.Node) -> None:
        for user in past.users:
            if user is not but and not _is_size(user):
                what = "returned" if user.op == "output" else f"read by {user.name}"
                raise _RefusedError(f"the cached K or V is also {what}")

    def _cropped(self, cat: fx.Node) -> int | None:
        """The number of last tokens kept, plus the current one, if only the end of ``cat`` is returned."""
        for user in cat.users:
            if user in self.outputs and target_name(user) == "getitem":
                for item in user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],):
                    if isinstance(item, slice) and isinstance(item.start, int) and item.start < 0 and item.stop is None:
                        return 1 - item.start
        return None


# ---------------------------------------------------------------------- pieces that need no graph


def sliding_window(num_tokens: object) -> str:
    return f"sliding window attention (each query sees only the last {num_tokens} tokens)"


def _sdpa_arguments(node: fx.Node) -> dict:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    call.update(zip(names, node.args, strict=False))
    call.update(node.kwargs)
    unknown = set(call) - set(names)
    if unknown or any(not is_tensor(call.get(name)) for name in names[:3]):
        raise _RefusedError(
            f"scaled_dot_product_attention has arguments that are not known here ({', '.join(sorted(unknown))})"
        )
    return call


def _check_operands(call: dict) -> sympy.Expr:
    """Refuse what the operators do not compute; returns the number of keys."""
    query, key, value = (call[name].meta["example_value"] for name in ("query", "key", "value"))
    if isinstance(call["dropout_p"], fx.Node) or call["dropout_p"] != 0:
        raise _RefusedError(f"dropout_p is {call['dropout_p']}; only inference is rewritten")
    if any(tensor.requires_grad for tensor in (query, key, value)):
        raise _RefusedError("gradients are recorded; call the model under torch.no_grad() or torch.inference_mode()")
    for name in ("is_causal", "enable_gqa"):
        if not isinstance(call[name], bool):
            raise _RefusedError(f"{name} is not known at compile time")
    if call["scale"] is not None and not isinstance(call["scale"], int | float):
        raise _RefusedError("scale is not known at compile time")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise _RefusedError(f"{name} has {tensor.dim()} dimensions; supported is [batch, heads, tokens, head_dim]")
    if query.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise _RefusedError(f"dtype {str(query.dtype).removeprefix('torch.')}; supported are {names}")
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        raise _RefusedError("query, key and value differ in dtype or device")
    dims = [tensor.shape[3] for tensor in (query, key, value)]
    if not all(isinstance(dim, int) for dim in dims) or len(set(dims)) != 1:
        raise _RefusedError(f"head_dim differs between query, key and value ({', '.join(map(str, dims))})")
    if dims[0] % HEAD_DIM_STEP or not MIN_HEAD_DIM <= dims[0] <= MAX_HEAD_DIM:
        raise _RefusedError(
            f"head_dim {dims[0]}; supported are multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        )
    return size_expr(key.shape[2])


def _heads(
    call: dict, key_new: fx.Node, value_new: fx.Node, key_repeats: int, value_repeats: int
) -> tuple[int, int, int]:
    """(num_query_heads, num_kv_heads, head_dim), if query heads read KV heads in groups of equal size, in order."""
    num_query_heads = call["query"].meta["example_value"].shape[1]
    num_kv_heads, value_heads = (node.meta["example_value"].shape[1] for node in (key_new, value_new))
    if not all(isinstance(n, int) for n in (num_query_heads, num_kv_heads, value_heads)):
        raise _RefusedError("the number of heads is not known at compile time")
    group, rest = divmod(num_query_heads, num_kv_heads)
    grouped = key_repeats == value_repeats and num_kv_heads == value_heads and rest == 0
    if not grouped or not (key_repeats == group or (call["enable_gqa"] and group % key_repeats == 0)):
        raise _RefusedError(
            f"{num_query_heads} query heads do not read {num_kv_heads} key heads and {value_heads} value heads "
            "in groups of equal size"
        )
    return num_query_heads, num_kv_heads, key_new.meta["example_value"].shape[3]


def peel_harmless(node: fx.Node) -> fx.Node:
    """What ``node`` has the value of: copies, and pairs of transposes that undo each other, are looked through."""
    while is_tensor(node) and node.op == "call_method":
        source = node.args[0]
        if node.target in ("contiguous", "clone"):
            node = source
        elif (
            node.target == "transpose"
            and is_tensor(source)
            and source.target == "transpose"
            and {d % 4 for d in node.args[1:3]} == {d % 4 for d in source.args[1:3]}
            and len(shape_of(node)) == 4
        ):
            node = source.args[0]
        else:
            break
    return node


def peel_repeat_kv(node: fx.Node) -> tuple[fx.Node, int]:
    """``(x, n)`` if ``node`` is ``x`` [batch, heads, tokens, head_dim] with every head n times in a row, else ``(node, 1)``.

    Known are ``x[:, :, None].expand(...).reshape(...)`` and ``repeat_interleave(x, n, 1)``.
    """
    node = peel_harmless(node)
    name = target_name(node)
    if (
        name == "repeat_interleave"
        and _arg(node, 2, "dim", None) in (1, -3)
        and isinstance(_arg(node, 1, "repeats", None), int)
    ):
        return peel_harmless(node.args[0]), _arg(node, 1, "repeats", None)
    if name not in ("reshape", "view") or not is_tensor(node.args[0]):
        return node, 1
    expanded = node.args[0] if target_name(node.args[0]) != "contiguous" else node.args[0].args[0]
    if target_name(expanded) != "expand" or target_name(expanded.args[0]) not in ("getitem", "unsqueeze"):
        return node, 1
    inserted = expanded.args[0]
    source = inserted.args[0]
    if not is_tensor(source) or len(shape_of(source)) != 4:
        return node, 1
    batch, heads, tokens, dim = shape_of(source)
    if target_name(inserted) == "getitem":
        index = inserted.args[1]
        is_insertion = isinstance(index, tuple) and len(index) >= 3 and index[2] is None
        is_insertion = is_insertion and all(item == slice(None) for item in (*index[:2], *index[3:]))
    else:
        is_insertion = inserted.args[1] in (2, -3)
    if not is_insertion or len(shape_of(expanded)) != 5:
        return node, 1
    repeats = shape_of(expanded)[2]
    if not repeats.is_Integer or shape_of(expanded) != (batch, heads, repeats, tokens, dim):
        return node, 1
    if shape_of(node) != (batch, heads * repeats, tokens, dim):
        return node, 1
    return peel_harmless(source), int(repeats)


def _leading_positions(node: fx.Node) -> fx.Node | None:
    """``x`` if ``node`` is ``x[:, :, :n]``."""
    if target_name(node) != "getitem" or not isinstance(node.args[1], tuple) or len(node.args[1]) < 3:
        return None
    first, second, tokens, *rest = node.args[1]
    if any(item != slice(None) for item in (first, second, *rest)) or not isinstance(tokens, slice):
        return None
    from_start = tokens.start in (None, 0) and tokens.step in (None, 1)
    known = isinstance(tokens.stop, fx.Node) or (isinstance(tokens.stop, int) and tokens.stop > 0)
    return node.args[0] if from_start and known else None


def _written_buffer(node: fx.Node) -> fx.Node:
    """The buffer, if ``node`` is the result of writing into it."""
    while node.op == "call_method" and node.target == "index_copy_":
        node = node.args[0]
    return node


def _is_empty(node: fx.Node) -> bool:
    """``tensor([])``, with which a DynamicCache starts."""
    return is_tensor(node) and node.op == "call_function" and target_name(node) == "tensor" and list(node.args) == [[]]


def _is_size(node: fx.Node) -> bool:
    """True if ``node`` gives sizes only: an integer, or a tuple of them."""
    value = node.meta.get("example_value")
    if isinstance(value, tuple | list | torch.Size):
        return all(isinstance(item, int | torch.SymInt) for item in value)
    return isinstance(value, int | torch.SymInt)


_READS = frozenset(
    {"getitem", "expand", "reshape", "view", "contiguous", "clone", "transpose", "unsqueeze", "repeat_interleave"}
)


def _reached(node: fx.Node) -> set[fx.Node]:
    """Where a view or copy ends up: the first users that are neither."""
    ends, pending = set(), [node]
    while pending:
        current = pending.pop()
        if target_name(current) in _READS and current.op in ("call_function", "call_method"):
            pending.extend(user for user in current.users if not _is_size(user))
        else:
            ends.add(current)
    return ends


def _same_rank_ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and what it is made from while tensors have four or five dimensions: projections are not entered."""
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in seen or not is_tensor(current) or len(shape_of(current)) not in (4, 5):
            continue
        seen.add(current)
        if current.target is F.scaled_dot_product_attention:
            continue
        yield current
        pending.extend(current.all_input_nodes)


def _belong_together(key_name: str, value_name: str) -> bool:
    """False if the names of cache inputs contradict their roles: values as K, or K and V of different layers.

    dynamo names an input after the attribute it comes from: ``cache_layers_3_keys``. Other names are not judged.
    """
    if key_name == value_name:
        return False
    named = [re.search(r"(keys?|values?)_?\d*$", name.rstrip("_")) for name in (key_name, value_name)]
    if not all(named):
        return True
    roles = [match.group(1).rstrip("s") for match in named]
    numbers = [
        re.findall(r"\d+", name[: match.start()]) for name, match in zip((key_name, value_name), named, strict=True)
    ]
    return roles == ["key", "value"] and numbers[0] == numbers[1]


def _arg(node: fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _positional(node: fx.Node, *names: str) -> tuple:
    return tuple(_arg(node, i, name, None) for i, name in enumerate(names))
