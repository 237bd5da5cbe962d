"""``ckv::append_kv`` on CUDA: a part of the kernel of ``ckv::route`` that follows it, or one small kernel.

A scatter of Inductor's own would fuse with what computes the new keys, but Inductor times such kernels on copies of what
they write, and a copy of a nominal view has no room for the position.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from typing import Any

import torch
from torch import fx
from torch._inductor.virtualized import V

from ckv_compile.lowering.template_call import Template, fixed, lowers, next_power_of_2, static_size

BESIDES = (operator.getitem, torch.ops.ckv.route_coarse.default)  # what may stand between it and route


@dataclasses.dataclass(frozen=True)
class Appended:
    """What the kernel of route stores besides: nodes in memory, the cache's last."""

    key_new: Any
    value_new: Any
    length: Any
    key: Any
    value: Any

    def constants(self) -> dict[str, Any]:
        _, heads, tokens, dim = static_size(self.key_new)
        return {"APPEND": True, **new_constants(heads, tokens, dim, static_size(self.value_new)[3])}


_left: weakref.WeakKeyDictionary[Any, dict[fx.Node, Appended]] = weakref.WeakKeyDictionary()  # by graph, then by route

template = Template("append_kv", lambda meta: (meta["BATCH"] * meta["HEADS"], meta["TOKENS"], 1))


@lowers(torch.ops.ckv.append_kv.default)
def append_kv(key: Any, value: Any, key_new: Any, value_new: Any, length: Any) -> None:
    batch, heads, tokens, dim = static_size(key_new)
    value_dim = static_size(value_new)[3]
    key, value = fixed(key, value)
    key_new, value_new, length = fixed(key_new, value_new, length)
    route = following_route(V.graph.current_node)
    if route is not None:
        _left.setdefault(V.graph, {})[route] = Appended(key_new, value_new, length, key, value)
        return None
    inputs = [key_new, value_new, length, key, value]
    constants = constants_of(batch, heads, tokens, dim, value_dim)
    template(
        inputs, ([batch, heads, tokens], torch.int32), [key, value], constants, [{"num_warps": 1, "num_stages": 1}]
    )
    return None


def following_route(node: fx.Node) -> fx.Node | None:
    """The ``ckv::route`` with a kernel that comes right after an append: nothing between them reads the cache."""
    node = node.next
    while node.target in BESIDES:
        node = node.next
    if node.target is not torch.ops.ckv.route.default:
        return None
    values = [given.meta["val"] for given in node.all_input_nodes]
    return node if all(value.device.type == "cuda" for value in values if isinstance(value, torch.Tensor)) else None


def left_to(route: fx.Node) -> Appended | None:
    """What ``append_kv`` left to this ``ckv::route`` of the graph that is being lowered."""
    return _left.get(V.graph, {}).pop(route, None)


def new_constants(heads: int, tokens: int, dim: int, value_dim: int) -> dict[str, Any]:
    """What the kernel of route has for new tokens of so many KV heads."""
    block = next_power_of_2(max(dim, value_dim))
    return {"KV_HEADS": heads, "TOKENS": tokens, "DV": value_dim, "BLOCK_NEW": block}


def constants_of(batch: int, heads: int, tokens: int, dim: int, value_dim: int) -> dict[str, Any]:
    return {
        "BATCH": batch,
        "HEADS": heads,
        "TOKENS": tokens,
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": next_power_of_2(max(dim, value_dim)),
    }
