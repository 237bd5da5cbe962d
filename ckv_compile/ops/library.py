"""The ``ckv`` operator library: one place that declares an operator, and the checks that its arguments share.

Nominal views: K, V and index state enter graphs as small views of larger buffers, so that no capacity is compiled in.
A fake therefore never looks at the sizes of such an argument beyond batch, heads and head_dim.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("ckv", "FRAGMENT")
TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
INT_DTYPES = (torch.int32, torch.int64)


def register_op(
    schema: str,
    check: Callable[..., None] | Sequence[Callable[..., None]],
    fake: Callable[..., Any] | None = None,
    implementation: Callable[..., Any] | str | None = None,
) -> None:
    """Declare ``ckv::<schema>`` for every device, and what tracing sees of it.

    check: one function or more that raise for bad arguments, in order. fake: makes results to trace with, if there are
    any. implementation: runs the operator; a module instead of a function is imported at the first call and holds one of
    the operator's name, as does the default ``ckv_compile.reference.<name>``. Each function gets those of the operator's
    arguments that it names, by name.
    """
    parsed = torch._C.parse_schema(f"ckv::{schema}")
    name, arguments = parsed.name.removeprefix("ckv::"), tuple(argument.name for argument in parsed.arguments)
    defaults = {a.name: a.default_value for a in parsed.arguments if a.has_default_value()}
    checks = [_chosen(function, arguments) for function in ([check] if callable(check) else check)]
    make = None if fake is None else _chosen(fake, arguments)
    module = implementation if isinstance(implementation, str) else f"ckv_compile.reference.{name}"

    def given(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        values = {**defaults, **dict(zip(arguments, args, strict=False)), **kwargs}
        for function in checks:
            function(values)
        return values

    def call(*args: Any, **kwargs: Any) -> Any:
        values = given(args, kwargs)
        run = implementation if callable(implementation) else getattr(importlib.import_module(module), name)
        return _chosen(run, arguments)(values)

    def trace(*args: Any, **kwargs: Any) -> Any:
        values = given(args, kwargs)
        return None if make is None else make(values)

    LIBRARY.define(schema, tags=TAGS)
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ckv::{name}", trace, lib=LIBRARY)


@functools.lru_cache(maxsize=256)
def _chosen(function: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    """``function`` of a dictionary of arguments: it takes those that it names, or all; others must have a default."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names = list(arguments)
        elif parameter.name in arguments:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise TypeError(f"{function.__qualname__} asks for {parameter.name}, which is no argument of the operator")
    return lambda values: function(**{name: values[name] for name in names})


def require(condition: bool, argument: str, requirement: str, value: object) -> None:
    """Raise ``ValueError`` that names the argument, what it must be, and what it was."""
    if not condition:
        raise ValueError(f"{argument} must {requirement}, got {value}")


def require_cache(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """query [B, Hq, Q, D], key [B, Hkv, NOM, D], value [B, Hkv, NOM, Dv], with Hkv dividing Hq."""
    require(query.dim() == 4, "query", "have 4 dimensions [batch, heads, tokens, head_dim]", tuple(query.shape))
    batch, num_query_heads, _, head_dim = query.shape
    require(
        key.dim() == 4 and key.shape[0] == batch and key.shape[3] == head_dim,
        "key",
        f"be [{batch}, num_kv_heads, any, {head_dim}]",
        tuple(key.shape),
    )
    require(key.dtype == query.dtype, "key", f"have query's dtype {query.dtype}", key.dtype)
    require(
        num_query_heads % key.shape[1] == 0,
        "key",
        f"have a number of heads that divides the {num_query_heads} query heads",
        key.shape[1],
    )
    if value is not None:
        require(
            value.dim() == 4 and value.shape[:2] == key.shape[:2],
            "value",
            f"be [{batch}, {key.shape[1]}, any, head_dim]",
            tuple(value.shape),
        )
        require(value.dtype == key.dtype, "value", f"have key's dtype {key.dtype}", value.dtype)


def require_sink_logits(query: Tensor, sink_logits: Tensor | None) -> None:
    if sink_logits is not None:
        require(
            sink_logits.dim() == 1 and sink_logits.shape[0] == query.shape[1],
            "sink_logits",
            f"be [{query.shape[1]}], one per query head",
            tuple(sink_logits.shape),
        )


def require_length(length: Tensor) -> None:
    require(length.dtype in INT_DTYPES, "length", "be int32 or int64", length.dtype)
    require(length.dim() <= 1 and length.numel() == 1, "length", "have one element", tuple(length.shape))


def require_first(first: Tensor, batch: int) -> None:
    require(first.dtype in INT_DTYPES, "first", "be int32 or int64", first.dtype)
    require(first.dim() == 1 and first.shape[0] == batch, "first", f"be [{batch}], one per row", tuple(first.shape))


def require_graphs(num_graphs: int, num_query_heads: int, num_kv_heads: int) -> None:
    """One graph per KV head, per query head, or one in all."""
    require(
        num_graphs in (1, num_kv_heads, num_query_heads),
        "num_graphs",
        f"be 1, the number of KV heads ({num_kv_heads}) or of query heads ({num_query_heads})",
        num_graphs,
    )


def require_tokens(query: Tensor, key: Tensor, tokens: Tensor, count: Tensor) -> None:
    """tokens int32 [B, G, T] and count int32 [B, G] of one decode step."""
    require(
        tokens.dim() == 3 and tokens.shape[0] == query.shape[0],
        "tokens",
        "be [batch, graphs, any]",
        tuple(tokens.shape),
    )
    require_graphs(tokens.shape[1], query.shape[1], key.shape[1])
    require(tokens.dtype in INT_DTYPES, "tokens", "be int32 or int64", tokens.dtype)
    require(count.shape == tokens.shape[:2], "count", f"be {tuple(tokens.shape[:2])}", tuple(count.shape))


def require_one_query(query: Tensor) -> None:
    require(query.shape[2] == 1, "query", "hold one token per row", tuple(query.shape))


def require_at_least(argument: str, value: int, least: int) -> None:
    require(value >= least, argument, f"be at least {least}", value)
