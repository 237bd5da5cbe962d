"""``ckv::grouped_linear``: linear layers of one input, side by side, their weights where they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ckv_compile.ops.library import register_op, require


def _check(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    require(input.dim() >= 1, "input", "have at least one dimension", tuple(input.shape))
    require(len(weights) >= 1, "weights", "hold at least one matrix", len(weights))
    require(len(biases) == len(weights), "biases", f"hold {len(weights)}, one per matrix or None", len(biases))
    for weight, bias in zip(weights, biases, strict=True):
        require(
            weight.dim() == 2 and weight.shape[1] == input.shape[-1],
            "weights",
            f"be [any, {input.shape[-1]}]",
            tuple(weight.shape),
        )
        require(weight.dtype == input.dtype, "weights", f"have input's dtype {input.dtype}", weight.dtype)
        if bias is not None:
            require(bias.shape == weight.shape[:1], "biases", f"be [{weight.shape[0]}]", tuple(bias.shape))
            require(bias.dtype == input.dtype, "biases", f"have input's dtype {input.dtype}", bias.dtype)


def _outputs(input: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return input.new_empty(*input.shape[:-1], sum(weight.shape[0] for weight in weights))


register_op(
    "grouped_linear(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor",
    _check,
    _outputs,
)
