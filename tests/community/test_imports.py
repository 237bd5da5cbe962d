import ast
import subprocess
import sys
from pathlib import Path

import ckv_compile.community

FOLDER = Path(ckv_compile.community.__file__).parent


def test_importing_the_package_loads_neither_numba_nor_torch():
    program = "import sys, ckv_compile.community; print(sorted({'numba', 'torch', 'igraph'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves():
    for name in ckv_compile.community._MODULE_OF:
        assert getattr(ckv_compile.community, name) is not None


def test_community_imports_only_arrays_config_and_errors():
    allowed = {"numpy", "numba", "igraph", "leidenalg", *sys.stdlib_module_names}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            else:
                continue
            for name in names:
                ours = name.startswith(("ckv_compile.community", "ckv_compile.config", "ckv_compile.errors"))
                assert ours or name.split(".")[0] in allowed, f"{path.name} imports {name}"
