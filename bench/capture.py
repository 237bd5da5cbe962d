"""What attention sees in SmolLM2-135M over a text: keys, queries, and the strongest keys of every token (eq. 1).

python -m bench.capture FILE --text python --layers 0 14 29    # for ``bench.topk_prefill --activations FILE``
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ckv_compile.reference.top_entries import top_entries

SINKS = 10
KAPPA = 8
ROWS = 512  # queries whose scores are held at a time


@dataclasses.dataclass
class Captured:
    """One text of n tokens through some layers; keys and queries are as attention takes them, with positions in them.

    layers: their numbers. keys: float32 [L, 1, Hkv, n, D]. queries: float32 [L, 1, Hq, n - start, D], of positions
    from ``start`` on. ids, alphas: int32 and float32 [L, Hq, n, kappa], positions past the sinks and their share of the
    softmax over all earlier keys; -1 and 0 where there are fewer. scale: of the products. Where they were asked for,
    values: float32 [L, 1, Hkv, n, D], and hidden: float32 [1, n - start, H], the model's last hidden states.
    """

    layers: list[int]
    keys: Tensor
    queries: Tensor
    ids: np.ndarray
    alphas: np.ndarray
    start: int
    scale: float
    values: Tensor | None = None
    hidden: Tensor | None = None


def causal_top(
    query: Tensor, key: Tensor, scale: float, kappa: int = KAPPA, sinks: int = SINKS
) -> tuple[Tensor, Tensor]:
    """The strongest keys past the sinks of every query, strongest first, and their probabilities: [Hq, n, kappa].

    query: [Hq, n, D], key: [Hkv, n, D].
    """
    heads, n, _ = query.shape
    ids = torch.full((heads, n, kappa), -1, dtype=torch.int32)
    alphas = torch.zeros(heads, n, kappa)
    for head in range(heads):
        keys = key[head * len(key) // heads]
        for begin in range(0, n, ROWS):
            end = min(n, begin + ROWS)
            scores = (query[head, begin:end] * scale) @ keys[:end].T
            later = torch.arange(end) > torch.arange(begin, end)[:, None]
            scores.masked_fill_(later, -math.inf)
            normaliser = scores.logsumexp(-1, keepdim=True)
            scores[:, :sinks] = -math.inf
            value, index = top_entries(scores, kappa)
            found = value > -math.inf
            ids[head, begin:end, : value.shape[1]] = torch.where(found, index, -1).int()
            alphas[head, begin:end, : value.shape[1]] = (value - normaliser).exp().masked_fill(~found, 0.0)
    return ids, alphas


@torch.inference_mode()
def capture(
    model,
    tokens: list[int],
    layers: Sequence[int] | None = None,
    *,
    start: int = 0,
    lists: bool = True,
    outputs: bool = False,
    advance: Callable[[], object],
) -> Captured:
    """One forward of a Llama-like model over ``tokens``; ``advance`` is called once a layer. The model stays as it was.

    layers: all of them when None. lists: whether ids and alphas are wanted; else they hold no token. outputs: whether
    values and hidden states are.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, before = model.config, model.config._attn_implementation
    layers = list(range(config.num_hidden_layers) if layers is None else layers)
    found: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    values: dict[int, Tensor] = {}
    scales = []

    def attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        advance()
        if module.layer_idx in layers:
            kept = key.clone(), query[:, :, start:].clone()
            top = causal_top(query[0, :, : None if lists else 0], key[0], scaling)
            found[module.layer_idx] = (*kept, *top)
            if outputs:
                values[module.layer_idx] = value.clone()
            scales.append(scaling)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["bench_capture"] = attention
    model.set_attn_implementation("bench_capture")
    try:
        hidden = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
    finally:
        model.set_attn_implementation(before)
    keys, queries, ids, alphas = (torch.stack(parts) for parts in zip(*(found[one] for one in layers), strict=True))
    common = layers, keys, queries, ids.numpy(), alphas.numpy(), start, scales[0]
    if not outputs:
        return Captured(*common)
    return Captured(*common, torch.stack([values[one] for one in layers]), hidden[:, start:])


def main(argv: list[str] | None = None) -> None:
    """Write layers, queries [L, Hq, n, D] and keys [L, Hkv, n, D], float16, of a text."""
    from rich.progress import track

    from bench.texts import LENGTH, frozen_text
    from ckv_compile.smollm2 import load_smollm2

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", default="python", choices=("python", "prose"))
    parser.add_argument("--tokens", type=int, default=LENGTH)
    parser.add_argument("--layers", type=int, nargs="+")
    args = parser.parse_args(argv)
    tokenizer, model = load_smollm2()
    steps = iter(track(range(model.config.num_hidden_layers), "layers"))
    captured = capture(
        model, frozen_text(args.text, tokenizer)[: args.tokens], args.layers, advance=lambda: next(steps, None)
    )
    halves = {"queries": captured.queries[:, 0].half(), "keys": captured.keys[:, 0].half()}
    torch.save({"layers": captured.layers, **halves}, args.file)


if __name__ == "__main__":
    main()
