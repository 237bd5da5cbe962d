"""Long-context decoding through communities of tokens, as a ``torch.compile`` backend.

``torch.compile(model, backend="communitykv")`` is all a script needs; ``ckv_compile.explain(model)`` says what happened.
Importing this package loads nothing heavy: torch imports it by name while it is itself half loaded.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "free_memory"]


def explain(model: Any, *, show: bool = True) -> Any:
    """What the backend matched, refused and ran for ``model``: prints it and returns a ``report.Explanation``."""
    from ckv_compile import report

    return report.explain(model, show=show)


def free_memory() -> None:
    """Give back the storage that is kept for the next cache. Caches in use are untouched."""
    from ckv_compile.runtime.registry import REGISTRY

    REGISTRY.free_memory()
