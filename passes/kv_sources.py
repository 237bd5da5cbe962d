"""Where the K and V that an attention reads come from: this call's tokens, a growing cache, or a static one."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from ckv_compile.passes.index_expressions import is_tensor, memory_owner, mutated_argument, shape_of, target_name


class RefusedError(Exception):
    """Ends the examination of one attention; the message is the reason."""


class LocalAttentionError(RefusedError):
    """It sees keys near its query only, and stays as it is beside layers that see all."""


class Cache(enum.Enum):
    """Where the keys that a query sees come from.

    NONE: this call's tokens, and they are not kept.
    EMPTY: this call's tokens; ``cat([tensor([]), k], -2)`` is a graph output: the first call of a DynamicCache.
    DYNAMIC: ``cat([past, k], -2)`` of a graph input, which is a graph output.
    STATIC: a buffer into which ``index_copy_`` writes k; all of it is read, or its first ``num_queries`` positions.
    """

    NONE = "none"
    EMPTY = "empty"
    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True)
class KVSource:
    """Where the K or V of an attention comes from."""

    cache: Cache
    new: fx.Node
    updated: fx.Node
    past: fx.Node | None = None
    write: fx.Node | None = None
    position: fx.Node | None = None
    made_here: bool = False  # STATIC: the buffer is created in this graph
    num_read: sympy.Expr | None = None  # STATIC: only this many leading positions are read


class KVSources:
    """Follows K and V of one graph back to their origin; raises RefusedError for any that is not known."""

    def __init__(self, graph: fx.Graph):
        output = next(node for node in graph.nodes if node.op == "output")
        self.outputs = set(output.all_input_nodes)
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def of(self, read: fx.Node, attention: fx.Node, query: fx.Node) -> KVSource:
        """``read`` is what the attention of ``query`` reads, [batch, num_kv_heads, keys, head_dim]."""
        base, start_of = read, None
        if (whole := _leading_positions(read)) is not None:
            base, start_of = peel_harmless(whole), shape_of(read)[2]
        base = _written_buffer(base)
        if start_of is None and _is_concatenation(base):
            return self._concatenated(base, attention)
        if self._writes(base):
            return self._static(base, start_of, attention)
        if start_of is not None:
            base = read
        if (last := _last_positions(base)) is not None and _is_concatenation(peel_harmless(base.args[0])):
            queries = shape_of(attention)[-2] if is_tensor(attention) else 1
            raise LocalAttentionError(sliding_window(sympy.expand(last + 1 - queries)))
        return self._plain(base, query)

    def _concatenated(self, cat: fx.Node, attention: fx.Node) -> KVSource:
        tensors = cat.args[0] if cat.args else cat.kwargs.get("tensors")
        dim = _concatenated_dim(cat)
        if dim not in (-2, 2):
            raise RefusedError(f"K or V is concatenated along dimension {dim}, not along the tokens")
        if len(tensors) != 2:
            raise RefusedError(f"K or V is put together from {len(tensors)} parts")
        past, new = tensors
        if crop := self._cropped(cat):
            raise LocalAttentionError(sliding_window(crop))
        if cat not in self.outputs:
            raise RefusedError("K or V is concatenated with earlier tokens but not returned as the updated cache")
        if self._writes(cat):
            raise RefusedError("the updated cache is written in place")
        self._only_read_by(cat, attention)
        if _is_empty(past):
            return KVSource(Cache.EMPTY, new=new, updated=cat)
        if past.op != "placeholder":
            if new.op == "placeholder":
                raise RefusedError("K or V has this call's tokens before the cached ones")
            raise RefusedError(f"the cached K or V is not an input of the graph but computed ({target_name(past)})")
        self._only_sizes_read(past, but=cat)
        return KVSource(Cache.DYNAMIC, new=new, updated=cat, past=past)

    def _static(self, buffer: fx.Node, num_read: sympy.Expr | None, attention: fx.Node) -> KVSource:
        writes = self._writes(buffer)
        write = writes[0]
        if len(writes) != 1 or target_name(write) != "index_copy_":
            names = ", ".join(sorted({target_name(w) for w in writes}))
            if "copy_" in names.split(", "):
                raise LocalAttentionError(sliding_window(shape_of(buffer)[2]))  # the buffer is shifted when it is full
            raise RefusedError(f"K or V is updated in an unknown way ({names})")
        target, dim, position, new = _positional(write, "self", "dim", "index", "source")
        if target is not buffer or dim not in (2, -2):
            raise RefusedError("K or V is written to a part of the static cache or along another dimension")
        if self.order[write] > self.order[attention]:
            raise RefusedError("the static cache is written after it is read")
        made_here = buffer.op == "call_function" and target_name(buffer) in ("zeros", "empty")
        if not made_here and buffer.op != "placeholder":
            raise RefusedError(f"the static cache is not an input of the graph but computed ({target_name(buffer)})")
        if made_here and buffer not in self.outputs:
            raise RefusedError("the static cache made in this graph is not returned")
        self._only_read_by(buffer, attention, but=write)
        return KVSource(
            Cache.STATIC, new=new, updated=buffer, past=None if made_here else buffer, write=write, position=position,
            made_here=made_here, num_read=num_read,
        )  # fmt: skip

    def _plain(self, base: fx.Node, query: fx.Node) -> KVSource:
        if base.op == "placeholder":
            if peel_harmless(query).op == "placeholder":
                raise RefusedError(
                    "query and keys are inputs of the graph: a graph break (output_attentions=True makes one, and so does "
                    "paged attention) parts the attention from what makes them"
                )
            raise RefusedError(f"cross-attention: keys are an input of the graph ({base.name}), not this call's tokens")
        for node in _same_rank_ancestors(base):
            joins = target_name(node) in ("cat", "concat", "concatenate") and _arg(node, 1, "dim", 0) in (-2, 2)
            if joins or mutated_argument(node) is not None or node.op == "placeholder":
                raise RefusedError(f"K or V is changed between the cache and the attention ({target_name(base)})")
        for user in self._aliases(base):
            if target_name(user) == "copy_":  # of the last tokens, into a static cache that they overflow
                raise LocalAttentionError(sliding_window(shape_of(user)[2]))
        return KVSource(Cache.NONE, new=base, updated=base)

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
                    raise RefusedError(
                        f"K or V is also read by something else than this attention ({user.name}), for one by another "
                        "layer that shares them"
                    )

    def _only_sizes_read(self, past: fx.Node, but: fx.Node) -> None:
        for user in past.users:
            if user is not but and not _is_size(user):
                what = "returned" if user.op == "output" else f"read by {user.name}"
                raise RefusedError(f"the cached K or V is also {what}")

    def _cropped(self, cat: fx.Node) -> int | None:
        """The number of last tokens kept, plus the current one, if only the end of ``cat`` is returned."""
        for user in cat.users:
            if user in self.outputs and target_name(user) == "getitem":
                for item in user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],):
                    if isinstance(item, slice) and isinstance(item.start, int) and item.start < 0 and item.stop is None:
                        return 1 - item.start
        return None


def check_pair(key: KVSource, value: KVSource, query: fx.Node) -> None:
    """Refuse a K and a V that are not written and read alike."""
    if key.cache is not value.cache or key.num_read != value.num_read or key.made_here != value.made_here:
        raise RefusedError(f"K comes from a {key.cache.value} cache and V from a {value.cache.value} one")
    if key.cache is Cache.STATIC and key.position is not value.position:
        raise RefusedError("K and V are written at different positions")
    if key.past is not None and not _belong_together(key.past.name, value.past.name):
        raise RefusedError(f"K and V are not the halves of one cache ({key.past.name}, {value.past.name})")
    num_queries = shape_of(query)[2]
    for new in (key.new, value.new):
        if not is_tensor(new) or len(shape_of(new)) != 4 or shape_of(new)[2] != num_queries:
            raise RefusedError("cross-attention: keys do not come from this call's tokens")
        if shape_of(new)[0] != shape_of(query)[0]:
            raise RefusedError("queries and keys differ in batch size")


def sliding_window(num_tokens: object) -> str:
    return f"sliding window attention (each query sees only the last {num_tokens} tokens)"


def peel_harmless(node: fx.Node) -> fx.Node:
    """What ``node`` has the value of: copies, and pairs of transposes that undo each other, are looked through."""
    node = _uncopied(node)
    while node.op == "call_method" and node.target == "transpose":
        inner, rank = _uncopied(node.args[0]), len(shape_of(node))
        dims = [{d % rank for d in n.args[1:] if isinstance(d, int)} for n in (node, inner)]
        if inner.target != "transpose" or dims[0] != dims[1] or len(dims[0]) != 2:
            break
        node = _uncopied(inner.args[0])
    return node


def _uncopied(node: fx.Node) -> fx.Node:
    while node.op == "call_method" and node.target in ("contiguous", "clone"):
        node = node.args[0]
    return node


def peel_repeat_kv(node: fx.Node) -> tuple[fx.Node, int]:
    """``(x, n)`` if ``node`` is ``x`` [batch, heads, tokens, dim] with every head n times in a row, else ``(node, 1)``.

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


def _last_positions(node: fx.Node) -> int | None:
    """``n`` if ``node`` is ``x[:, :, -n:]``, of 4 dimensions."""
    index = node.args[1] if target_name(node) == "getitem" else None
    if not isinstance(index, tuple) or len(index) < 3 or not isinstance(index[2], slice):
        return None
    if any(item != slice(None) for item in (*index[:2], *index[3:])) or index[2].stop is not None:
        return None
    start, step = index[2].start, index[2].step
    return -start if isinstance(start, int) and start < 0 and step in (None, 1) else None


def _is_concatenation(node: fx.Node) -> bool:
    """Along anything but the last dimension: there a rotary embedding joins the halves of a head."""
    return (
        node.op == "call_function"
        and target_name(node) in ("cat", "concat", "concatenate")
        and _concatenated_dim(node) not in (-1, 3)
    )


def _concatenated_dim(cat: fx.Node) -> object:
    return cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", cat.kwargs.get("axis", 0))


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
