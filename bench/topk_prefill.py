"""Prefill with lists: python -m bench.topk_prefill [--contexts 32768 65536 131072] [--heads 8/2 32/8] [--repetitions 5]

Causal attention of a whole prompt by torch's flash and cuDNN kernels, by flex_attention, by our kernel without lists, and
by it with every query's strongest keys, "fast" and "exact"; the nearest keys of graph="keys" beside them. The lists are
compared with ``torch.topk`` of scores in float32 on sampled rows before anything is timed. TF/s count the products below
the diagonal: 2 * n * n * head_dim * query heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.results_file import draw, write_results
from bench.timing import interleaved, label_contexts, timing

SINKS, SAMPLED = 10, 256
Function = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt of one sequence. data: "normal", or "local" where keys drift and repeat by topics, with strong sinks."""

    context: int
    heads: int
    kv_heads: int
    head_dim: int
    kappa: int
    data: str

    @property
    def flops(self) -> int:
        return 2 * self.context**2 * self.head_dim * self.heads

    @property
    def name(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def tensors_of(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, Hq, n, D], key and value [1, Hkv, n, D]: token-major in memory, as the model and the cache have them."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    n, dim = case.context, case.head_dim
    query, key, value = (
        torch.empty(n, 1, heads, dim, dtype=dtype, device=device).permute(1, 2, 0, 3)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    for head in range(case.kv_heads):
        value[0, head] = normal(n, dim).to(dtype)
        own = range(head * case.heads // case.kv_heads, (head + 1) * case.heads // case.kv_heads)
        if case.data == "normal":
            key[0, head] = normal(n, dim).to(dtype)
            for i in own:
                query[0, i] = normal(n, dim).to(dtype)
            continue
        topics = normal(256, dim)
        segment = (torch.rand(n, device=device, generator=generator) < 0.05).long().cumsum(0)
        topic = torch.randint(256, (n + 1,), device=device, generator=generator)
        fading = 0.93 ** torch.arange(64, device=device, dtype=torch.float32)
        drift = F.conv1d(normal(dim, 1, n + 63), (fading / fading.norm()).view(1, 1, -1)).squeeze(1).T
        sink = normal(dim)
        key[0, head] = (0.6 * topics[topic[segment]] + 0.5 * drift + 0.62 * normal(n, dim)).to(dtype)
        key[0, head, :3] = (3 * sink).to(dtype)
        for i in own:
            elsewhere = torch.randint(256, (n + 1,), device=device, generator=generator)
            asked = torch.where(torch.rand(n + 1, device=device, generator=generator) < 0.4, elsewhere, topic)[segment]
            mixed = 0.6 * topics[asked] + 0.5 * drift + 0.62 * normal(n, dim)
            query[0, i] = (1.5 * mixed + 0.3 * sink).to(dtype)
    return query, key, value


# ---------------------------------------------------------------------- arms


def torch_arm(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Function:
    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return attend


def flex_arm(query: Tensor, key: Tensor, value: Tensor) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = query.shape[2]
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, n, n, device=query.device, _compile=True)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)


def our_arm(
    query: Tensor, key: Tensor, value: Tensor, kappa: int, topk: str, tuned: dict[str, Any]
) -> tuple[Function, tuple]:
    """Our kernels as one function, and what they write: (out, neighbor, weight)."""
    from ckv_compile import rendered
    from ckv_compile.lowering.topk_prefill import has_tma

    length, first = (torch.zeros(1, dtype=torch.int32, device=query.device) for _ in range(2))
    launches, results = rendered.topk_prefill_launches(
        query, key, value, length, first, query.shape[3] ** -0.5, SINKS, kappa, None, topk, TMA=has_tma(query.device),
        **tuned,
    )  # fmt: skip

    def run() -> None:
        for launch in launches:
            launch()

    return run, results


def arms_of(case: Case, dtype: torch.dtype, device: str, tuned: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, function that makes the arm); making one may fail where a kernel does not exist."""
    tensors = tensors_of(case, dtype, device)
    if device.startswith("cuda"):
        yield "flash", lambda: (torch_arm(SDPBackend.FLASH_ATTENTION, *tensors), None)
        yield "cudnn", lambda: (torch_arm(SDPBackend.CUDNN_ATTENTION, *tensors), None)
        yield "flex", lambda: (flex_arm(*tensors), None)
    else:
        yield "math", lambda: (torch_arm(SDPBackend.MATH, *tensors), None)
    for name, kappa, topk in (("alone", 0, "fast"), ("fast", case.kappa, "fast"), ("exact", case.kappa, "exact")):
        yield name, functools.partial(our_arm, *tensors, kappa, topk, tuned)


# ---------------------------------------------------------------------- what the lists hold


def quality(case: Case, query: Tensor, key: Tensor, neighbor: Tensor, *, everywhere: bool = False) -> dict[str, float]:
    """The part of lists that are those of ``torch.topk`` up to ties, and the probability that lists keep.

    Of sampled rows of some heads, or everywhere.
    """
    n, group = case.context, case.heads // case.kv_heads
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(n) if everywhere else torch.randint(n, (SAMPLED,), generator=generator)
    rows = rows.to(query.device)
    position = torch.arange(n, device=query.device)
    equal, kept = [], []
    for head in range(0, case.heads, 1 if everywhere else max(1, case.heads // 4)):
        score = query[0, head, rows].float() @ key[0, head // group].float().T * case.head_dim**-0.5
        score = score.masked_fill(position > rows[:, None], -torch.inf)
        norm = torch.logsumexp(score, 1, keepdim=True)
        score[:, :SINKS] = -torch.inf
        best = torch.topk(score, min(case.kappa, n)).values
        listed = neighbor[0, head, rows, : best.shape[1]].long()
        own = torch.where(listed >= 0, score.gather(1, listed.clamp(min=0)), -torch.inf)
        own = own.sort(1, descending=True).values
        distinct = (listed.sort(1).values.diff(dim=1).ne(0) | (listed.sort(1).values[:, 1:] < 0)).all(1)
        equal.append(((own == best) | ((own - best).abs() <= 2e-5)).all(1) & distinct)
        all_of, ours = (torch.exp(x - norm).sum(1) for x in (best, own))
        kept.append(torch.where(all_of > 0, ours / all_of, 1.0))
    return {"equal_sets": torch.cat(equal).double().mean().item(), "kept_mass": torch.cat(kept).double().mean().item()}


def error_of(case: Case, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> float:
    """Relative L2 error of the output against float64, on sampled rows."""
    n, group = case.context, case.heads // case.kv_heads
    rows = torch.randint(n, (SAMPLED,), generator=torch.Generator().manual_seed(2)).to(query.device)
    difference = norm = 0.0
    for head in range(0, case.heads, max(1, case.heads // 4)):
        score = query[0, head, rows].double() @ key[0, head // group].double().T * case.head_dim**-0.5
        score = score.masked_fill(torch.arange(n, device=query.device) > rows[:, None], -torch.inf)
        want = torch.softmax(score, 1) @ value[0, head // group].double()
        difference += float((out[0, head, rows].double() - want).square().sum())
        norm += float(want.square().sum())
    return (difference / norm) ** 0.5


# ---------------------------------------------------------------------- results


def measure(case: Case, dtype: torch.dtype, device: str, repetitions: int, tuned: dict[str, Any]) -> list[dict]:
    """Rows of one case: quality, error, speed. An arm that fails is a row that says why."""
    rows: list[dict] = []
    functions = {}
    query, key, value = tensors_of(case, dtype, device)
    for name, make in arms_of(case, dtype, device, tuned):
        try:
            function, results = make()
            out = function()
            if results is not None:
                out, neighbor, _ = results
                if neighbor is not None:
                    rows.append({"kind": "quality", "arm": name, **case.name, **quality(case, query, key, neighbor)})
            rows.append({"kind": "error", "arm": name, **case.name, "rel_l2": error_of(case, query, key, value, out)})
            functions[name] = function
        except Exception as error:
            rows.append({"kind": "failure", "arm": name, **case.name, "error": str(error)[:300]})
    for name, times in interleaved(functions, repetitions, device).items():
        taken = timing(times)
        tflops = case.flops / taken["median_ms"] / 1e9
        rows.append({"kind": "speed", "arm": name, **case.name, "tflops": tflops, **taken})
    return rows


def measure_activations(path: Path, kappa: int, dtype: torch.dtype, device: str, tuned: dict[str, Any]) -> list[dict]:
    """Rows of what a model's attention saw (see ``bench.capture``), a layer at a time: every list of every head."""
    captured = torch.load(path, weights_only=True)
    rows = []
    for layer, query, key in zip(captured["layers"], captured["queries"], captured["keys"], strict=True):
        (heads, n, dim), kv_heads = query.shape, len(key)
        case = Case(n, heads, kv_heads, dim, kappa, f"layer {layer}")
        query, key = (one[None].to(device, dtype) for one in (query, key))
        for arm in ("fast", "exact"):
            function, (_, neighbor, _) = our_arm(query, key, key, kappa, arm, tuned)
            function()
            rows.append(
                {"kind": "quality", "arm": arm, **case.name, **quality(case, query, key, neighbor, everywhere=True)}
            )
    return rows


def measure_keys(
    context: int, kv_heads: int, head_dim: int, block: int, dtype: torch.dtype, device: str, repetitions: int,
    tuned: dict[str, Any],
) -> list[dict]:  # fmt: skip
    """Rows of the nearest keys of one layer, all blocks at once."""
    from ckv_compile.kernels.key_neighbors import key_neighbors

    key = torch.randn(context, 1, kv_heads, head_dim, device=device).to(dtype).permute(1, 2, 0, 3)
    first = torch.zeros(1, dtype=torch.int32)
    arms = {"keys": lambda: key_neighbors(key, first, 0, context, block, 8, SINKS, **tuned)}
    times = interleaved(arms, repetitions, device)["keys"]
    shape = {"context": context, "kv_heads": kv_heads, "head_dim": head_dim, "block": block, "kappa": 8}
    taken = timing(times)
    tflops = context * block * head_dim * kv_heads / taken["median_ms"] / 1e9
    return [{"kind": "keys", "arm": "keys", **shape, "tflops": tflops, **taken}]


def claims_of(rows: list[dict]) -> dict[str, float]:
    """Over our kernel alone, against torch's flash, and what lists keep, by context, heads and data."""
    claims: dict[str, float] = {}
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "keys":
            claims[f"keys_ms_per_layer_{row['context']}"] = row["median_ms"]
            continue
        place = f"{row['context']}_{row['heads']}_{row['kv_heads']}_{row['data']}"
        if row["kind"] == "speed":
            times.setdefault(place, {})[row["arm"]] = row["median_ms"]
        elif row["kind"] == "quality":
            claims[f"{row['arm']}_kept_mass_{place}"] = row["kept_mass"]
            claims[f"{row['arm']}_equal_sets_{place}"] = row["equal_sets"]
    for place, found in times.items():
        for arm in ("fast", "exact"):
            if arm in found and "alone" in found:
                claims[f"{arm}_over_alone_{place}"] = found[arm] / found["alone"] - 1
            for other in ("flash", "cudnn"):
                if arm in found and other in found:
                    claims[f"{arm}_speedup_over_{other}_{place}"] = found[other] / found[arm]
    return claims


def show(console: Console, rows: list[dict]) -> None:
    table = Table("context", "heads", "data", "arm", "ms", "TF/s", "")
    for row in rows:
        if row["kind"] == "keys":
            shape = (str(row["context"]), str(row["kv_heads"]), f"blocks of {row['block']}")
        else:
            shape = (str(row["context"]), f"{row['heads']}/{row['kv_heads']}", row["data"])
        if row["kind"] in ("speed", "keys"):
            table.add_row(*shape, row["arm"], f"{row['median_ms']:.3f}", f"{row['tflops']:.0f}", "")
        elif row["kind"] == "quality":
            kept = f"equal sets {row['equal_sets']:.4f}, kept mass {row['kept_mass']:.5f}"
            table.add_row(*shape, row["arm"], "", "", kept)
        elif row["kind"] == "error":
            table.add_row(*shape, row["arm"], "", "", f"error {row['rel_l2']:.1e}")
        else:
            table.add_row(*shape, row["arm"], "failed", "", row["error"][-60:])
    console.print(table)


def plot(path: Path) -> Path:
    """TF/s over the context, one panel per shape and data, from a result file; the picture lies beside it."""
    from matplotlib.figure import Figure

    speeds = [row for row in json.loads(path.read_text())["rows"] if row["kind"] == "speed"]
    panels = list(dict.fromkeys((row["heads"], row["kv_heads"], row["data"]) for row in speeds))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        here = [row for row in speeds if (row["heads"], row["kv_heads"], row["data"]) == panel]
        for arm in dict.fromkeys(row["arm"] for row in here):
            points = sorted((row["context"], row["tflops"]) for row in here if row["arm"] == arm)
            axes.plot(*zip(*points, strict=True), marker="o", label=arm)
        label_contexts(axes, {row["context"] for row in here})
        axes.set_title("{}/{} heads, {} data".format(*panel))
        axes.set_xlabel("tokens")
        axes.set_ylabel("TF/s")
        axes.set_ylim(bottom=0)
        axes.legend()
    picture = path.with_suffix(".svg")
    figure.savefig(picture)
    return picture


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[32768, 65536, 131072], help="tokens")
    parser.add_argument("--activations", type=Path, help="keys and queries of a model, from bench.capture")
    parser.add_argument("--heads", nargs="+", default=["8/2", "32/8"], help="query heads / KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kappa", type=int, default=8)
    parser.add_argument("--data", nargs="+", default=["normal", "local"], choices=("normal", "local"))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw a result file")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that everything runs")
    parser.add_argument("--out", type=Path, help="folder of the result file and the plot")
    args = parser.parse_args(argv)
    console = Console(width=None if Console().is_terminal else 140)
    if args.plot:
        console.print(f"drew {plot(args.plot)}")
        return {}
    on_gpu = args.device.startswith("cuda")
    if not on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    dtype = torch.bfloat16 if on_gpu else torch.float32
    contexts, shapes, head_dim = args.contexts, args.heads, args.head_dim
    tuned: dict[str, Any] = {}
    keys_context, keys_heads, block = max(contexts, default=0), 8, 2048
    if args.small:
        contexts, shapes, head_dim = [64], ["2/1"], 16
        tuned = {"BLOCK_M": 32, "BLOCK_N": 32}
        keys_context, keys_heads, block = 128, 2, 64
    results: list[dict] = []
    for shape in shapes:
        heads, kv_heads = map(int, shape.split("/"))
        for data in args.data:
            for context in contexts:
                case = Case(context, heads, kv_heads, head_dim, args.kappa, data)
                results += measure(case, dtype, args.device, args.repetitions, tuned)
    if keys_context:
        results += measure_keys(
            keys_context, keys_heads, head_dim, block, dtype, args.device, args.repetitions, tuned
        )  # fmt: skip
    if args.activations:
        results += measure_activations(args.activations, args.kappa, dtype, args.device, tuned)
    show(console, results)
    claims = claims_of(results)
    for name, value in claims.items():
        console.print(f"{name}: {value:.4g}")
    path = write_results(
        "topk_prefill", results, claims, device=args.device, label="small" if args.small else "", folder=args.out,
        unit="ms per layer", repetitions=args.repetitions,
    )  # fmt: skip
    console.print(f"wrote {path}")
    if any(row["kind"] == "speed" for row in results):
        draw(console, plot, path)
    return claims


if __name__ == "__main__":
    main()
