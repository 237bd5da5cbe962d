"""One JSON file per benchmark run: what ran on what, the raw rows, and the claims computed from them."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "igraph", "leidenalg", "ckv-compile")


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def commit() -> str:
    """The commit of the sources, with "+" where tracked files differ from it."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None:
        return "no repository"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def device_name(device: str = "cpu") -> str:
    """The GPU's name, or the processor's and the number of cores."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else name


def write_results(
    bench: str, rows: list[dict], claims: dict[str, float], *, device: str = "cpu", label: str = "",
    folder: Path | None = None, **more: Any,
) -> Path:  # fmt: skip
    """Write ``bench-label-date.json`` and return its path. ``more`` are further entries of the file, such as units.

    folder: ``bench/results`` if it is not given.
    """
    now = datetime.datetime.now(datetime.UTC)
    result = {
        "bench": bench,
        "device": device_name(device),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
        "commit": commit(),
        "command": " ".join([f"python -m bench.{bench}", *sys.argv[1:]]),
        "date": now.isoformat(timespec="seconds"),
        **more,
        "claims": claims,
        "rows": rows,
    }
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join(filter(None, (bench, label, f"{now:%Y%m%d-%H%M%S}")))
    for number in itertools.count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x") as file:  # never over a run that ended in the same second
                file.write(json.dumps(result, indent=1) + "\n")
        except FileExistsError:
            continue
        return path
    raise AssertionError


def rounded(values: Any) -> list[float]:
    """A tensor of one dimension as raw numbers of a row: four digits each."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def read_runs(paths: list[Path], *same: str) -> tuple[list[dict], list[dict]]:
    """Result files whose rows are to be joined, and what each says of its run.

    Raises ValueError where they differ in the entries ``same``, or in a text that several know by its hash.
    """
    files = [json.loads(path.read_text()) for path in paths]
    hashes: dict[str, str] = {}
    for path, file in zip(paths, files, strict=True):
        for name in same:
            if file[name] != files[0][name]:
                raise ValueError(
                    f"the runs must share {name}; {path} has {file[name]!r}, {paths[0]} has {files[0][name]!r}"
                )
        for name, digest in file.get("texts_sha256", {}).items():
            if hashes.setdefault(name, digest) != digest:
                raise ValueError(f"the runs must share their texts; {name} of {path} has sha256 {digest}")
    return files, [{key: file[key] for key in ("command", "device", "versions", "commit", "date")} for file in files]


def rows_and_texts(files: list[dict]) -> tuple[list[dict], dict[str, str]]:
    """All rows of result files, and the hashes of their texts."""
    hashes = {name: digest for file in files for name, digest in file.get("texts_sha256", {}).items()}
    return [row for file in files for row in file["rows"]], hashes


def draw(console: Console, plot: Callable[[Path], Path], path: Path) -> None:
    """Draw a result file, or say how to draw it later where matplotlib is missing."""
    try:
        console.print(f"drew {plot(path)}")
    except ImportError:
        console.print("matplotlib is not installed: draw the figure later with --plot")
