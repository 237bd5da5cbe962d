"""What the benches answer, and a way to run them: python -m bench [--help], python -m bench NAME [ARGUMENTS of it].

Every bench is a module with a ``main``; the first line of its description says what it measures. ``--help`` of each says
how, ``--small`` runs a small form on a CPU.
"""

from __future__ import annotations

import argparse
import ast
import pkgutil
import runpy
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent


def benches() -> dict[str, str]:
    """Name -> first line of the description, of every module here that has a ``main``; nothing is imported."""
    found = {}
    for module in sorted(pkgutil.iter_modules([str(FOLDER)]), key=lambda one: one.name):
        path = FOLDER / f"{module.name}.py"
        if module.name.startswith("_") or not path.exists():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[module.name] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    found = benches()
    if argv and argv[0] in found:
        sys.argv = [f"python -m bench.{argv[0]}", *argv[1:]]
        runpy.run_module(f"bench.{argv[0]}", run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=list(found), metavar="NAME", help="the bench to run")
    parser.parse_known_args([one for one in argv if one not in ("-h", "--help")])
    if "-h" in argv or "--help" in argv:
        parser.print_help()
    table = Table("bench", "measures", title="python -m bench NAME --help")
    for name, line in found.items():
        table.add_row(name, line)
    Console(width=None if Console().is_terminal else 140).print(table)


if __name__ == "__main__":
    main()
