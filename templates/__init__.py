"""Triton sources of the operators' CUDA kernels, as Inductor templates (``*.py.jinja``), one stem per operator."""

from __future__ import annotations

from pathlib import Path

if __name__ != "ckv_compile.templates":
    raise ImportError(f"import this package as ckv_compile.templates, not as {__name__}: two copies would differ")


def load_template(name: str, *helpers: str) -> str:
    """Text of a template: the kernel of ``name``, then the device functions of ``helpers``."""
    folder = Path(__file__).parent
    return "\n\n".join((folder / f"{stem}.py.jinja").read_text().rstrip() for stem in (name, *helpers)) + "\n"
