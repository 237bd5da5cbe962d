"""Host time of the wrapper around a decode graph: python -m bench.wrapper_host [--layers 36] [--steps 400]

A stub stands for the compiled graph, so what is left is what the wrapper costs at every step: before the compiled call,
and in all. Dynamic and static caches, short and long contexts; medians, because the machine has other things to do.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from bench.results_file import write_results
from ckv_compile import report
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import state_dtypes
from ckv_compile.passes.match_attention import Cache
from ckv_compile.passes.rewrite_plan import AttentionGeometry, RewritePlan
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.runner import GraphRunner

PARAMETERS_PER_LAYER = 11  # of Qwen3: dynamo hands every one of them to the backend at every call
HEADS, DIM = 2, 16  # small: only the number of tensors costs time here
WARM_UP = 50


class Stub:
    """Stands for the compiled graph: counts the token, and notes when it was called. ``length`` is where to count."""

    def __init__(self, length: int | None, vocab: int = 8) -> None:
        self.length = length
        self.logits = torch.zeros(1, 1, vocab)
        self.called = 0

    def __call__(self, *args: Tensor) -> tuple[Tensor]:
        self.called = time.perf_counter_ns()
        if self.length is not None:
            args[self.length].add_(1)
        return (self.logits,)


def _plan(cache: Cache, layers: int, parameters: int, masked: bool, config: CommunityConfig) -> RewritePlan:
    geometry = AttentionGeometry(layers, HEADS, HEADS, DIM, torch.float32, torch.device("cpu"))
    index = ["first", *(f"capacity_{layer}" for layer in range(layers)), *state_dtypes(config, torch.float32)]
    given = list(range(parameters, parameters + 2 * layers))
    common = {"phase": "decode", "cache": cache, "geometry": geometry, "names": ["layer"] * layers}
    if cache is Cache.STATIC:
        return RewritePlan(
            **common, num_inputs=parameters + 2 * layers + 2, num_outputs=1, kept_outputs=[0], state=index,
            keep=list(range(parameters + 2 * layers + 2)), static_keys=given[::2], static_length=parameters + 2 * layers + 1,
        )  # fmt: skip
    state = [f"{kind}_{layer}" for layer in range(layers) for kind in ("key", "value")]
    return RewritePlan(
        **common, num_inputs=parameters + 2 * layers + 1, num_outputs=1 + 2 * layers, kept_outputs=[0],
        keep=[*range(parameters), parameters + 2 * layers], state=[*state, "length", *index], past=given,
        kv_outputs=list(range(1, 1 + 2 * layers)), padding=parameters + 2 * layers + 1 if masked else None,
    )  # fmt: skip


def measure(
    cache: str = "dynamic", layers: int = 36, context: int = 4096, steps: int = 400, *, masked: bool = False
) -> dict:
    """Median and 90th percentile milliseconds of one decode step: ``before`` the compiled call, and ``total``.

    masked: a padding mask comes along (dynamic caches) and is verified later, as on CUDA.
    """
    config = CommunityConfig(min_context=1 << 30, workers=0)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(PARAMETERS_PER_LAYER * layers)]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    plan = _plan(Cache[cache.upper()], layers, len(parameters), masked, config)
    record = report.GraphRecord(config, names=plan.names)
    stub = Stub(None)

    def entry_of(args):
        return report.entry_of(0, record, args)

    runner = GraphRunner(plan, config, stub, stub, entry_of, None, cache == "static")
    runner._verifies_later = masked
    capacity = context + WARM_UP + steps + 8
    if cache == "static":
        kv = [torch.zeros(1, HEADS, capacity, DIM) for _ in range(2 * layers)]
        counter = torch.tensor(context)
        arguments = [*parameters, *kv, ids, counter]
        stub.length = len(arguments) - 1
    else:
        slab = REGISTRY.pool.take(plan.geometry, 1, capacity)
        sequence = REGISTRY.attach(slab, config, plan.geometry, 1)
        sequence.restart([0], context)
        views = slab.views(context)
        slab.reserved = False
        arguments = [*parameters, *views, ids]
        del views
    before, total = [], []
    with torch.no_grad():
        for number in range(WARM_UP + steps):
            args = (*arguments, torch.ones(1, context + number + 1, dtype=torch.int64)) if masked else tuple(arguments)
            began = time.perf_counter_ns()
            outputs = runner(*args)
            ended = time.perf_counter_ns()
            if cache == "dynamic":
                arguments[len(parameters) : -1] = outputs[1:]
            del args, outputs
            if number >= WARM_UP:
                before.append((stub.called - began) / 1e6)
                total.append((ended - began) / 1e6)
    return {
        "cache": cache, "masked": masked, "layers": layers, "context": context, "steps": steps,
        "before_ms": statistics.median(before), "total_ms": statistics.median(total),
        "before_p90_ms": statistics.quantiles(before, n=10)[-1], "total_p90_ms": statistics.quantiles(total, n=10)[-1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", action="store_true", help="write a results file")
    arguments = parser.parse_args()
    rows = [
        measure(cache, arguments.layers, context, arguments.steps)
        for cache in ("dynamic", "static")
        for context in (4096, 65536)
    ]
    rows.append(measure("dynamic", arguments.layers, 4096, arguments.steps, masked=True))
    for row in rows:
        print(
            f"{row['cache']}{' masked' if row['masked'] else ''}, {row['layers']} layers, context {row['context']}: "
            f"{row['before_ms']:.3f} ms before the compiled call (p90 {row['before_p90_ms']:.3f}), "
            f"{row['total_ms']:.3f} ms in all (p90 {row['total_p90_ms']:.3f})"
        )
    worst = max(row["total_ms"] for row in rows)
    claims = {"wrapper_host_ms": worst, "wrapper_host_before_ms": max(row["before_ms"] for row in rows)}
    print(claims)
    if arguments.write:
        print(write_results("wrapper_host", rows, claims))


if __name__ == "__main__":
    main()
