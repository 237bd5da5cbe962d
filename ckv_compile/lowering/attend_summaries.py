"""Communities as keys of sparse attention on CUDA: a kernel for them, whose result its merge takes for one more split."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ckv_compile.lowering.template_call import Config, Template, empty, fixed, next_power_of_2, static_size

template = Template("attend_summaries", lambda meta: (meta["BATCH"] * meta["LISTS"], 1, 1))


@dataclasses.dataclass
class Summaries:
    """Nodes of the operator's arguments; ``new_value`` is state that gets the value of a new token besides."""

    ids: Any
    centroid: Any
    centroid_scale: Any
    channel_scale: Any
    size: Any
    mean_value: Any
    new_value: Any | None = None

    @classmethod
    def of(cls, arguments: tuple) -> Summaries | None:
        """Of the last arguments of an operator; None without communities."""
        return None if not arguments or arguments[0] is None else cls(*arguments)


def configs(dtype: torch.dtype, dim: int) -> list[Config]:
    """16 communities at a time; exact products need more registers."""
    return [{"BLOCK_N": 16, "num_warps": 8 if dtype.itemsize == 4 or dim > 128 else 4, "num_stages": 1}]


def constants_of(attends: dict[str, Any], reserved: int, dtype: torch.dtype, *, values: bool) -> dict[str, Any]:
    """attends: the constants of sparse attention (``attend_constants``). values: whether the new value is kept."""
    names = ("BATCH", "LISTS", "GRAPHS", "KV_HEADS", "HEADS", "D", "DV", "BLOCK_D", "BLOCK_DV", "SM_SCALE")
    return {
        **{name: attends[name] for name in names},
        "BLOCK_H": max(16, next_power_of_2(attends["HEADS"])),
        "PARTS": attends["KV_HEADS"] if attends["GRAPHS"] == 1 else 1,
        "SUMMARIES": reserved,
        "SPLIT": dtype.itemsize < 4,
        **({"VALUES": True} if values else {}),
    }


def lower_summaries(
    query: Any, value: Any, capacity: Any, length: Any, summaries: Summaries, attends: dict[str, Any]
) -> list[Any]:
    """Nodes of TOTAL fp32 [B, HQ, DV], TOP and MASS fp32 [B, HQ] over the communities."""
    device, dtype = query.get_device(), query.get_dtype()
    batch, heads, _, _ = static_size(query)
    constants = constants_of(attends, static_size(summaries.ids)[2], dtype, values=summaries.new_value is not None)
    top, mass = (empty([batch, heads], torch.float32, device) for _ in range(2))
    means = (summaries.ids, summaries.centroid, summaries.centroid_scale, summaries.channel_scale, summaries.size)
    inputs, written = [*fixed(query, *means, summaries.mean_value, capacity), top, mass], [top, mass]
    if summaries.new_value is not None:
        new_value = fixed(summaries.new_value)
        inputs += [*fixed(value, length), *new_value]
        written += new_value
    shape = [batch, heads, constants["DV"]]
    dims = max(constants["D"], constants["DV"])
    total = template(inputs, (shape, torch.float32), written, constants, configs(dtype, dims))
    return [*fixed(total), top, mass]
