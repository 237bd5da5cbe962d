"""The package as installed: entry point, wheel contents, import time, who may import whom."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"ckv_compile.passes": ROOT / "passes", "ckv_compile.templates": ROOT / "templates"}
# Who may import whom, by part; a part may always import itself.
MAY_IMPORT = {
    "backend": {"lowering", "passes", "runtime", "config", "report", "generate", "recompile_limit", "errors"},
    "passes": {"ops", "config", "index_layout", "policies"},
    "lowering": {"ops", "templates", "config", "index_layout"},
    "ops": {"reference", "kernels", "index_layout", "policies", "config"},
    "kernels": {"lowering", "rendered", "runtime"},
    "reference": {"index_layout"},
    "templates": set(),
    "runtime": {
        "ops",
        "kernels",
        "community",
        "config",
        "errors",
        "index_layout",
        "reference",
        "lowering",
        "rendered",
        "policies",
    },
    "policies": {"community", "reference"},
    "community": {"config", "errors"},
    "config": set(),
    "errors": set(),
    "index_layout": {"config", "policies"},
    "generate": {"report"},
    "recompile_limit": {"report"},
    "report": {"config", "runtime"},
}


def packages_in_tree():
    names = {"ckv_compile"} | set(FOLDERS)
    names |= {f"ckv_compile.{path.parent.name}" for path in (ROOT / "ckv_compile").glob("*/__init__.py")}
    return names


def test_pyproject_lists_every_package_of_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["packages"]) == packages_in_tree()


def test_the_entry_point_is_listed_by_dynamo():
    import torch._dynamo

    assert "communitykv" in torch._dynamo.list_backends()


def test_importing_the_package_is_light():
    code = (
        "import sys, time; begin = time.perf_counter(); import ckv_compile; took = time.perf_counter() - begin; "
        "assert not {'torch', 'numba', 'transformers'} & set(sys.modules), 'heavy'; print(took)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.3


@pytest.mark.parametrize("folder", ["passes", "templates"])
def test_a_folder_refuses_to_be_imported_under_its_bare_name(folder):
    run = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"ckv_compile.{folder}" in run.stderr


def test_the_wheel_holds_every_source_and_nothing_else(tmp_path):
    pytest.importorskip("setuptools")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ckv_compile").rglob("*.py")}
    for folder in ("passes", "templates"):
        expected |= {f"ckv_compile/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    expected |= {f"ckv_compile/templates/{path.name}" for path in (ROOT / "templates").glob("*.jinja")}
    assert held == expected | {"ckv_compile/py.typed"}


def _part(module: str) -> str | None:
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "ckv_compile" and len(pieces) > 1 else None


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "ckv_compile"
                else {node.module}
            )
    return {part for name in found if (part := _part(name)) is not None}


def test_what_runs_beside_a_graph_knows_no_transformers():
    """Attributes of its caches change from release to release; keys and values are what the graph says they are."""
    folders = [ROOT / "passes", *(ROOT / "ckv_compile" / name for name in ("ops", "reference", "runtime", "lowering"))]
    files = [path for folder in folders for path in folder.rglob("*.py")] + [ROOT / "ckv_compile" / "backend.py"]
    assert len(files) > 30
    assert not [path.name for path in files if re.search(r"\b(import|from) transformers\b", path.read_text())]


def test_parts_import_only_what_they_may():
    wrong = []
    files = [(path, path.relative_to(ROOT / "ckv_compile")) for path in (ROOT / "ckv_compile").rglob("*.py")]
    for folder in ("passes", "templates"):
        files += [(path, Path(folder) / path.name) for path in (ROOT / folder).glob("*.py")]
    for path, place in files:
        own = place.parts[0].removesuffix(".py")
        for part in _imports(path) - {own}:
            if own in MAY_IMPORT and part not in MAY_IMPORT[own]:
                wrong.append(f"{place} imports {part}")
    assert wrong == []
