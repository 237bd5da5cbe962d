"""Linear layers of one decode step: python -m bench.grouped_linear [--rows 1 4] [--repetitions 5]

Separate calls of cuBLAS, one call on a joined copy of the matrices, and every configuration of our kernel, which leaves
the matrices where they are. One CUDA graph per arm multiplies with several sets of matrices in turn, so that none is
found in a cache. Products are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.results_file import write_results
from bench.timing import capture, copy_ceiling, interleaved, timing

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of a relative L2 error


@dataclasses.dataclass(frozen=True)
class Case:
    """Matrices ``[n, channels]`` of one input, for every n of ``sizes``; ``models`` have them once a layer."""

    name: str
    sizes: tuple[int, ...]
    channels: int
    models: tuple[str, ...]

    def nbytes(self, rows: int, itemsize: int) -> int:
        return (sum(self.sizes) * (self.channels + rows) + rows * self.channels) * itemsize


CASES = [
    Case("qkv", (4096, 1024, 1024), 4096, ("qwen3-8b", "llama-3.1-8b")),
    Case("o", (4096,), 4096, ("qwen3-8b", "llama-3.1-8b")),
    Case("gate_up_12288", (12288, 12288), 4096, ("qwen3-8b",)),
    Case("down_12288", (4096,), 12288, ("qwen3-8b",)),
    Case("gate_up_14336", (14336, 14336), 4096, ("llama-3.1-8b",)),
    Case("down_14336", (4096,), 14336, ("llama-3.1-8b",)),
    Case("head", (151936,), 4096, ()),
]
SMALL = [Case("qkv", (32, 16, 16), 64, ("tiny",)), Case("down", (64,), 96, ("tiny",))]


# ---------------------------------------------------------------------- arms


def label(tuned: dict[str, int]) -> str:
    return "ours {BLOCK_N}x{BLOCK_K} warps={num_warps} stages={STAGES} unroll={UNROLL}".format(**tuned)


def configs_of(case: Case, rows: int, dtype: torch.dtype, most: int | None) -> list[dict[str, int]]:
    from ckv_compile.lowering.grouped_linear import configs

    return configs(rows, case.channels, dtype)[:most]


def build(case: Case, rows: int, dtype: torch.dtype, tuned: dict[str, int]) -> None:
    """Compile one kernel; Triton keeps it on disk. For a process that does nothing else."""
    from ckv_compile import rendered

    given = torch.empty(rows, case.channels, dtype=dtype, device="meta")
    weights = [torch.empty(size, case.channels, dtype=dtype, device="meta") for size in case.sizes]
    kernel, grid = rendered.grouped_linear_kernel(given, weights, **tuned)
    tensors = {**rendered.grouped_linear_tensors(given, weights), "OUT": given.new_empty(rows, sum(case.sizes))}
    kernel.kernel.warmup(*kernel.values(tensors), grid=grid, **kernel.options)


def build_all(cases: list[tuple[Case, int]], dtype: torch.dtype, most: int | None) -> None:
    """Compile side by side. Before CUDA is initialized: the processes are forks."""
    import ckv_compile.lowering  # noqa: F401  (once, not in every process)

    workers = max(1, min(16, os.cpu_count() or 1))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        tasks = [
            pool.submit(build, case, rows, dtype, tuned)
            for case, rows in cases
            for tuned in configs_of(case, rows, dtype, most)
        ]
        for task in tasks:
            task.exception()  # what fails here fails again, and is reported, where it is timed


def kernel_of(tuned: dict[str, int], given: Tensor, weights: list[Tensor], out: Tensor) -> Callable:
    """Multiplies with any set of matrices of these shapes."""
    from ckv_compile import rendered

    kernel, grid = rendered.grouped_linear_kernel(given, weights, **tuned)
    return lambda weights: kernel(grid, rendered.grouped_linear_tensors(given, weights), out)


def measure(
    case: Case, rows: int, dtype: torch.dtype, device: str, repetitions: int, most: int | None, sets: int, least: int
) -> list[dict]:
    """Rows of all arms. sets: how many sets of matrices, unless fewer hold ``least`` bytes."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    given = random(rows, case.channels)
    sets = max(1, min(sets, -(-least // case.nbytes(rows, dtype.itemsize))))
    weights = [[random(size, case.channels).mul_(case.channels**-0.5) for size in case.sizes] for _ in range(sets)]
    joined = [torch.cat(one) if len(one) > 1 else one[0] for one in weights]
    expected = F.linear(given.float(), joined[0].float())
    out = torch.empty(rows, sum(case.sizes), dtype=dtype, device=device)
    arms: dict[str, Callable] = {"separate": lambda: [[F.linear(given, weight) for weight in one] for one in weights]}
    if len(case.sizes) > 1:
        arms["joined"] = lambda: [F.linear(given, one) for one in joined]
    common = {"case": case.name, "rows": rows, "sets": sets}
    results: list[dict] = []
    errors, tunings = {}, {}
    for tuned in configs_of(case, rows, dtype, most):
        name = label(tuned)
        try:
            multiply = kernel_of(tuned, given, weights[0], out.fill_(torch.nan))
            multiply(weights[0])
            errors[name] = float((out.float() - expected).norm() / expected.norm())
            if not errors[name] <= TOLERANCE[dtype]:
                raise ValueError(f"relative error {errors[name]:.1e}")
        except Exception as error:
            results.append({"kind": "failure", "arm": name, "error": str(error)[:300], **common})
            continue
        tunings[name] = tuned
        arms[name] = lambda multiply=multiply: [multiply(one) for one in weights]
    captured = {name: capture(function, device) for name, function in arms.items()}
    for name, times in interleaved(captured, repetitions, device).items():
        row = {"kind": "speed", "arm": name, **common, **timing([time / sets for time in times])}
        results.append({**row, **({"tuned": tunings[name], "rel_l2": errors[name]} if name in tunings else {})})
    return results


# ---------------------------------------------------------------------- results


def claims_of(rows: list[dict], cases: list[Case]) -> dict[str, float]:
    """Microseconds of the linear layers of one decoder layer, by model and rows of input.

    "first" has the first configuration in every case, "best" the fastest of each.
    """
    claims: dict[str, float] = {}
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "speed":
            speeds.setdefault((row["case"], row["rows"]), {})[row["arm"]] = 1e3 * row["median_ms"]
    floors = {(row["case"], row["rows"]): 1e3 * row["floor_ms"] for row in rows if row["kind"] == "speed"}
    for model in dict.fromkeys(model for case in cases for model in case.models):
        names = [case.name for case in cases if model in case.models]
        for count in dict.fromkeys(count for _, count in speeds):
            found = [speeds.get((name, count), {}) for name in names]
            ours = [[time for arm, time in one.items() if arm.startswith("ours")] for one in found]
            if not all(ours):
                continue
            totals = {
                "separate": sum(one["separate"] for one in found),
                "joined": sum(one.get("joined", one["separate"]) for one in found),
                "first": sum(times[0] for times in ours),
                "best": sum(map(min, ours)),
                "floor": sum(floors[name, count] for name in names),
            }
            claims |= {f"layer_us_{arm}_{model}_m{count}": time for arm, time in totals.items()}
    return claims


def ranking(rows: list[dict], count: int) -> list[tuple[str, float, int]]:
    """Configurations for ``count`` rows of input, best first: (name, mean time over the floor, number of cases)."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["rows"] == count and "tuned" in row:
            name = "BLOCK_N={BLOCK_N} warps={num_warps} stages={STAGES} unroll={UNROLL}".format(**row["tuned"])
            if count > 1:
                name += " BLOCK_K={BLOCK_K}".format(**row["tuned"])
            ratios.setdefault(name, []).append(row["median_ms"] / row["floor_ms"])
    ranked = [(name, statistics.mean(values), len(values)) for name, values in ratios.items()]
    return sorted(ranked, key=lambda entry: (-entry[2], entry[1]))


def show(console: Console, rows: list[dict]) -> None:
    table = Table("case", "M", "arm", "us", "of the floor")
    for row in rows:
        name = row["case"], str(row["rows"]), row["arm"]
        if row["kind"] == "failure":
            table.add_row(*name, "failed", row["error"].splitlines()[-1][:60] if row["error"] else "")
        else:
            table.add_row(*name, f"{1e3 * row['median_ms']:.2f}", f"{row['median_ms'] / row['floor_ms']:.2f}")
    console.print(table)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows of the input")
    parser.add_argument("--cases", nargs="+", help=f"of {', '.join(case.name for case in CASES)}; all by default")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sets", type=int, default=8, help="sets of matrices in one CUDA graph")
    parser.add_argument("--ceiling", type=float, help="TB/s for the floors; measured by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that everything runs")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    console = Console(width=None if Console().is_terminal else 140)
    on_gpu = args.device.startswith("cuda")
    if not on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    dtype = torch.bfloat16 if on_gpu else torch.float32
    cases = [case for case in (SMALL if args.small else CASES) if not args.cases or case.name in args.cases]
    most = 2 if args.small else None
    pairs = [(case, rows) for rows in args.rows for case in cases if case.models or rows == 1]
    if on_gpu:
        build_all(pairs, dtype, most)
    ceiling = args.ceiling or copy_ceiling(args.device, (4 << 30) if on_gpu else (64 << 20))
    console.print(f"copy {ceiling:.2f} TB/s")
    results: list[dict] = []
    for case, rows in pairs:
        found = measure(case, rows, dtype, args.device, args.repetitions, most, args.sets, 2 << 30)
        floor = case.nbytes(rows, dtype.itemsize) / ceiling / 1e9
        results += [{**row, "floor_ms": floor} for row in found]
    show(console, results)
    claims = claims_of(results, cases)
    for name, value in claims.items():
        console.print(f"{name}: {value:.1f}")
    for count in args.rows:
        for name, ratio, number in ranking(results, count)[:3]:
            console.print(f"M={count}: {name}: {ratio:.2f} of the floor, mean of {number} cases")
    path = write_results(
        "grouped_linear", results, claims, device=args.device, label="small" if args.small else "", folder=args.out,
        copy_tb_per_s=ceiling, unit="ms per input",
    )  # fmt: skip
    console.print(f"wrote {path}")
    return claims


if __name__ == "__main__":
    main()
