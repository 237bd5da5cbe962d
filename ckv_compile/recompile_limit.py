"""How many compilations dynamo allows models of this backend, and a warning at the last.

Dynamo allows one function ``torch._dynamo.config.recompile_limit`` compilations, 8 by default, and runs it eagerly, by
itself, where it would need more: the backend is gone and nothing but a log line tells. Hugging Face models share a
function (the wrapper of one decorator is the ``forward`` of most of them) and need two to four graphs each, so a third
model of a process would be one too many. What is compiled with our backend is allowed more, unless the user said how many:
with ``torch.compile(..., recompile_limit=)`` or by another value of dynamo's configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import OptimizeContext, innermost_backend
from torch._guards import CompileContext

from ckv_compile import report

TORCH_DEFAULT = 8
ALLOWED = 64


class _AllowsMore:
    """Stands for what compiles a frame, and does it under our limit. Dynamo calls it under its own lock."""

    def __init__(self, convert_frame: Callable) -> None:
        self._torchdynamo_orig_backend = convert_frame  # dynamo follows this name to the backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        allowed = ALLOWED if dynamo_config.recompile_limit == TORCH_DEFAULT else dynamo_config.recompile_limit
        with dynamo_config.patch(recompile_limit=allowed):
            return self._torchdynamo_orig_backend(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_torchdynamo_orig_backend":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._torchdynamo_orig_backend, name)


def install(backend: Callable) -> None:
    """From now on, what ``torch.compile`` makes for ``backend`` is allowed more compilations."""
    original = OptimizeContext.__init__
    if getattr(original, "_ckv_wraps", None) is not None:
        return

    @functools.wraps(original)
    def init(self: OptimizeContext, callback: Any, *args: Any, **kwargs: Any) -> None:
        innermost = innermost_backend(callback)
        convert_frame = getattr(callback, "_torchdynamo_orig_backend", None)
        if getattr(innermost, "compiler_fn", innermost) is backend and convert_frame is not None:
            callback._torchdynamo_orig_backend = _AllowsMore(convert_frame)
        original(self, callback, *args, **kwargs)

    init._ckv_wraps = original  # type: ignore[attr-defined]
    OptimizeContext.__init__ = init  # type: ignore[method-assign]


def warn_at_the_last() -> None:
    """Say so while dynamo compiles a function for the last time that it is allowed to."""
    compiling = CompileContext.try_get()
    number = getattr(compiling.compile_id, "frame_compile_id", None) if compiling is not None else None
    if number is not None and number + 1 >= dynamo_config.recompile_limit:
        report.warn_once(
            f"torch._dynamo compiled one function {number + 1} times, as often as recompile_limit "
            f"({dynamo_config.recompile_limit}) allows: inputs of a further kind may run eagerly, without "
            "communitykv; raise torch._dynamo.config.recompile_limit, which all models of a process share"
        )
