"""The Inductor interfaces that moved between torch 2.11 and 2.14, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.select_algorithm import TritonTemplate, autotune_select_algorithm

_ACCEPTED = inspect.signature(TritonTemplate.__init__).parameters
_TAKES_META = "triton_meta" in inspect.signature(TritonTemplate.generate).parameters


def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it is over, and wait for it where it says so (sm_90 on)."""
    return _TAKES_META and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def make_template(name: str, grid: Any, source: str) -> TritonTemplate:
    """A template of a globally unique name; the one that exists if this module is imported a second time."""
    if name in TritonTemplate.all_templates:
        return TritonTemplate.all_templates[name]
    options = {"always_freeze_layout": True} if "always_freeze_layout" in _ACCEPTED else {}
    return TritonTemplate(name=name, grid=grid, source=source, **options)


def select(name: str, choices: list, inputs: Sequence[Any], layout: ir.Layout, generators: dict) -> Any:
    """The fastest choice as a node; the only one is taken unmeasured."""
    chosen = autotune_select_algorithm(
        name, choices, list(inputs), layout, input_gen_fns=generators, return_multi_template=False
    )
    return chosen[0] if isinstance(chosen, tuple) else chosen  # torch 2.13 returns (node, choice)
