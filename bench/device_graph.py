"""How long a device builds the token graphs of one layer, stage by stage, and what a prefill beside it loses.

Lists like those of text (bench/planted.py); 32 lists in 8 groups, as of a model with 32 query heads and 8 KV heads, and 8
lists in 8 groups. Times of stages are CUDA events around them, medians; they add up to the whole but for the waits. The
peak is what torch had allocated beyond lists at most. Before anything is timed, both forms build graphs of 4,096 tokens,
which must be equal to the bit.

    lists   lists without what does not count, and how often each node is listed
    places  where each node is listed, together (counting sort), and rows by their number of terms
    sum     edges of all rows
    prune   the weak ones out, CSR
    copy    to the host, as the outbox does it

``--beside`` also runs causal attention of a layer (32 heads, head_dim 128, as long as the lists) and a large product on the
current stream, with and without a build on another one: how much longer they take per layer.

    python -m bench.device_graph --beside                          # some 40 s on an H200
    python -m bench.device_graph --small --device cpu              # the torch form alone
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.planted import planted_lists
from bench.results_file import write_results
from ckv_compile.runtime import device_graph
from ckv_compile.runtime.device_graph import build_graphs, terms_of

FIRST, KAPPA, LAM, PRUNE, GRAPHS = 10, 8, 0.5, 0.03, 8
STAGES = ("lists", "places", "sum", "prune", "copy")


class Clock:
    """Milliseconds between marks: of the device's current stream, or of the host."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.marks = cuda, [self._now(cuda)]

    @staticmethod
    def _now(cuda: bool) -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self.marks.append(self._now(self.cuda))

    def spans(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [1e3 * (end - begin) for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def lists_of(tokens: int, heads: int, device: str) -> tuple[Tensor, Tensor]:
    neighbor, weight = planted_lists(heads, GRAPHS, tokens, KAPPA, FIRST, device)
    return neighbor[0], weight[0]


def arguments(lists: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"neighbor": lists[0][None], "weight": lists[1][None], "first": [FIRST], "graphs": GRAPHS, "lam": LAM} | {
        "prune": PRUNE
    }


def staged(lists: tuple[Tensor, Tensor]) -> dict[str, float]:
    """ms of each stage of the kernels, all graphs at once."""
    from ckv_compile.kernels import token_graph

    tokens, kappa = lists[0].shape[1:]
    neighbor, weight = (one.view(GRAPHS, -1, tokens, kappa) for one in lists)
    first = torch.full((GRAPHS,), FIRST, device=neighbor.device)
    terms = token_graph.ROW_TERMS
    clock = Clock(True)
    made = token_graph.cleaned(neighbor, weight, first)
    scale = device_graph._scale(made.ids, made.alpha, LAM)
    numbers = torch.stack([LAM / 2 * scale, (1 - LAM) * scale, scale, torch.full_like(scale, PRUNE)], 1)
    clock.mark()
    placed, start = token_graph.placed_entries(made)
    rows, counts, places = token_graph.rows_by_terms(start, made.ids.shape[1], made.ids.shape[3], terms)
    clock.mark()
    edges = token_graph.unpruned_edges(made, placed, start, rows, counts, places, numbers, terms)
    clock.mark()
    csr = token_graph.pruned_csr(made, edges, start, rows, counts[-1], first, numbers)
    clock.mark()
    for one in csr:
        torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
    clock.mark()
    return dict(zip(STAGES, clock.spans(), strict=True)) | {"rows_by_terms": counts}


def built(lists: tuple[Tensor, Tensor], **options: Any) -> list[device_graph.JointGraphs]:
    return list(build_graphs(**arguments(lists), **options))


def check(device: str, kernels: bool) -> None:
    """Raises where kernels and torch differ."""
    lists = lists_of(4096, 4 * GRAPHS, device)
    if not kernels:
        return
    ours, theirs = (built(lists, kernels=one, terms_at_once=1 << 26) for one in (True, False))
    for one, two in zip(ours[0].tensors(), theirs[0].tensors(), strict=True):
        if not torch.equal(one, two):
            raise RuntimeError("the kernels build other graphs than torch")


def measure(
    tokens: int, heads: int, form: str, device: str, repetitions: int, lists: tuple[Tensor, Tensor]
) -> dict[str, Any]:  # fmt: skip
    cuda = device.startswith("cuda")
    options = {"kernels": form != "torch" and cuda}
    parts = built(lists, **options)  # compiles
    row = {
        "tokens": tokens, "lists": heads, "groups": GRAPHS, "kappa": KAPPA, "form": form,
        "terms": heads * tokens * terms_of(KAPPA), "edges": sum(len(part.indices) for part in parts) // 2,
    }  # fmt: skip
    del parts
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repetitions):
        clock = Clock(cuda)
        for part in build_graphs(**arguments(lists), **options):
            del part
        clock.mark()
        times += clock.spans()
    row["raw_ms"], row["median_ms"] = times, statistics.median(times)
    row["peak_bytes"] = torch.cuda.max_memory_allocated() - before if cuda else None
    if cuda and form != "torch":
        staged(lists)
        found = [staged(lists) for _ in range(repetitions)]
        row["rows_by_terms"] = found[0]["rows_by_terms"]
        row |= {f"{stage}_ms": statistics.median(one[stage] for one in found) for stage in STAGES}
    return row


def beside(tokens: int, build: Callable[[], object], repetitions: int) -> dict[str, float]:
    """ms of what occupies the current stream, alone and with a build on another stream."""
    query, key = (torch.randn(1, count, tokens, 128, device="cuda", dtype=torch.bfloat16) for count in (32, 8))
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    stream = torch.cuda.Stream()

    def work() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        for _ in range(40):
            left @ right

    found: dict[str, list[float]] = {"alone": [], "beside": []}
    work()
    for _ in range(repetitions):
        for name, times in found.items():
            torch.cuda.synchronize()
            clock = Clock(True)
            work()
            clock.mark()
            if name == "beside":
                with torch.cuda.stream(stream):
                    build()
            times += clock.spans()
    alone, both = (statistics.median(times) for times in found.values())
    return {"main_alone_ms": alone, "main_beside_ms": both, "main_slower_ms": both - alone}


def show(rows: list[dict], console: Console) -> None:
    table = Table("tokens", "lists", "form", "ms", *STAGES, "edges", "peak MiB", "main slower, ms")
    for row in rows:
        stages = [f"{row[f'{stage}_ms']:.2f}" if f"{stage}_ms" in row else "" for stage in STAGES]
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        slower = f"{row['main_slower_ms']:.1f}" if "main_slower_ms" in row else ""
        table.add_row(
            f"{row['tokens']}", f"{row['lists']}", row["form"], f"{row['median_ms']:.1f}", *stages,
            f"{row['edges'] / 1e6:.2f} M", peak, slower,
        )  # fmt: skip
    console.print(table)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--lists", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--forms", nargs="+", default=["kernels"], choices=("kernels", "torch"))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="also time what a prefill loses, at the largest context")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="few tokens, to see that it works")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    if args.small:
        args.tokens, args.repetitions = [512], 2
    cuda = args.device.startswith("cuda")
    forms = args.forms if cuda else ["torch"]
    check(args.device, cuda)
    rows = []
    for tokens in args.tokens:
        for heads in args.lists:
            lists = lists_of(tokens, heads, args.device)
            for form in forms:
                row = measure(tokens, heads, form, args.device, args.repetitions, lists)
                if args.beside and cuda and tokens == max(args.tokens):
                    options = {"kernels": form != "torch"}
                    row |= beside(tokens, lambda lists=lists, options=options: built(lists, **options), 3)
                rows.append(row)
    console = Console()
    show(rows, console)
    claims = {f"ms_{row['form']}_{row['lists']}_lists_{row['tokens']}": row["median_ms"] for row in rows}
    path = write_results("device_graph", rows, claims, device=args.device, folder=args.out)
    console.print(f"wrote {path}")
    return rows


if __name__ == "__main__":
    main()
