"""What the lowerings share: realize the inputs, offer one or more configurations, call the template."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering
from torch._inductor.select_algorithm import SymbolicGridFn, realize_inputs
from torch._inductor.virtualized import V

from ckv_compile.lowering.inductor_compat import dependent_launch, make_template, select
from ckv_compile.templates import load_template

Config = dict[str, Any]  # num_warps, num_stages and the template's constants that are tuned


class Template:
    """A Triton template that lowerings call. ``grid`` gets the constants and returns the launch grid.

    Where sizes may be symbols, ``sized_grid`` stands for it: it gets the output's sizes, the constants and a division
    that rounds up.
    """

    def __init__(
        self,
        name: str,
        grid: Callable[[dict[str, Any]], tuple[int, int, int]] | None = None,
        *helpers: str,
        sized_grid: Callable[[Sequence[Any], dict[str, Any], Callable], tuple[Any, Any, Any]] | None = None,
    ) -> None:
        self.name = name
        # Inductor passes call_sizes first, then the constants.
        if sized_grid is not None:
            symbolic = SymbolicGridFn(lambda *given, cdiv: sized_grid(given[:-1], given[-1], cdiv))
        else:
            assert grid is not None
            symbolic = SymbolicGridFn(lambda *arguments: grid(arguments[-1]))
        self.source = load_template(name, *helpers)
        self.template = make_template(f"ckv_{name}", symbolic, self.source)

    def argument_names(self, constants: dict[str, Any]) -> list[str]:
        """The tensor arguments of the kernel with these constants."""
        names: list[str] = []

        def nothing(*_: Any, **__: Any) -> str:
            return ""

        environment = {
            "def_kernel": lambda *given: names.extend(given), "stride": nothing, "size": nothing, "store_output": nothing,
        }  # fmt: skip
        jinja2.Environment().from_string(self.source).render(**environment, **constants, PDL=False)
        return names

    def __call__(
        self,
        inputs: Sequence[Any],
        output: tuple[Sequence[int], torch.dtype],
        mutated: Sequence[Any],
        constants: dict[str, Any],
        configs: Iterable[Config],
        examples: dict[str, Callable] | None = None,
    ) -> Any:
        """The output node. inputs: all arguments of the kernel in order, ``mutated`` ones included.

        output: its size (contiguous) and dtype. Of configs the first is taken, unless ``max_autotune`` is on and
        ``examples`` make inputs to time them with, by argument (see ``example_inputs``).
        """
        device = inputs[0].get_device()
        inputs = list(inputs)
        layout = contiguous(device, *output)
        configs = list(configs)
        choices: list[Any] = []
        overlaps = "gdc_wait" in self.source and dependent_launch(device)
        tunes = bool(examples) and inductor_config.max_autotune
        for tuned in configs if tunes else configs[:1]:
            error = self.template.maybe_append_choice(
                choices=choices,
                input_nodes=inputs,
                layout=layout,
                mutated_inputs=list(mutated),
                call_sizes=list(output[0]),
                PDL=overlaps,
                **({"triton_meta": {"launch_pdl": True}} if overlaps else {}),
                **constants,
                **tuned,
            )
            if error is not None:
                raise error
        makers = {}
        if examples and tunes:
            names = self.argument_names(constants)
            assert len(names) == len(inputs), f"{self.name} takes {names}"
            makers = {place: examples[name] for place, name in enumerate(names) if name in examples}
        return select(self.template.name, choices, inputs, layout, makers)


def lowers(op: Any) -> Callable[[Callable], Callable]:
    """Register a lowering of ``op`` for graphs in which all of its tensors are on the GPU; elsewhere the operator runs."""

    def register(function: Callable) -> Callable:
        @register_lowering(op, type_promotion_kind=None)
        @functools.wraps(function)
        def lowering(*args: Any, **kwargs: Any) -> Any:
            nodes = [node for node in (*args, *kwargs.values()) if isinstance(node, ir.IRNode)]
            if all((device := node.get_device()) is not None and device.type == "cuda" for node in nodes):
                return function(*args, **kwargs)
            return fallback_handler(op)(*args, **kwargs)

        return function

    return register


def static_size(node: Any) -> list[int]:
    """Sizes as integers; a symbol is specialised, which guards the graph on it."""
    return [V.graph.sizevars.guard_int(size) for size in node.get_size()]


def fixed(*nodes: Any) -> list[Any]:
    """The nodes in memory, their layouts decided: templates read strides."""
    realized = (
        [ir.ExternKernel.realize_input(node) for node in realize_inputs(*nodes)]
        if len(nodes) > 1
        else [ir.ExternKernel.realize_input(realize_inputs(*nodes))]
    )
    for node in realized:
        with contextlib.suppress(NotImplementedError):  # views have the layout of what they view
            node.freeze_layout()
    return realized


def empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    return empty_strided(list(size), None, dtype=dtype, device=device)


def contiguous(device: torch.device, size: Sequence[int], dtype: torch.dtype) -> ir.FixedLayout:
    return ir.FixedLayout(device, dtype, list(size), ir.FlexibleLayout.contiguous_strides(list(size)))


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
