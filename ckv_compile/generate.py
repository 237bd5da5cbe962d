"""Lets ``torch.compile(model, backend="communitykv").generate(...)`` reach the compiled call.

``OptimizedModule`` forwards ``generate`` to the original module, which then calls itself eagerly: without help the
backend would never be reached, silently. While such a method of a model that was compiled with our backend runs, the
module's own ``_compiled_call_impl`` slot (the one ``Module.compile`` uses) holds the compiled call. Models of other
backends, and this one outside the method, are untouched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

# Methods of a model that call the model itself.
CALLING_METHODS = frozenset({"generate", "generate_batch"})

_lock = threading.RLock()
_backend: Callable | None = None


def install(backend: Callable) -> None:
    """Wrap ``OptimizedModule.__getattr__`` once, for models compiled with ``backend`` only."""
    global _backend
    _backend = backend
    if getattr(OptimizedModule.__getattr__, "_ckv_wraps", None) is None:
        original = OptimizedModule.__getattr__
        OptimizedModule.__getattr__ = _wrapped_getattr(original)


def _wrapped_getattr(original: Callable) -> Callable:
    @functools.wraps(original)
    def getattr_(self: OptimizedModule, name: str) -> Any:
        value = original(self, name)
        if name in CALLING_METHODS and compiled_by_us(self):
            return _reaching_compiled_call(self, value)
        return value

    getattr_._ckv_wraps = original
    return getattr_


def compiled_by_us(module: OptimizedModule) -> bool:
    callback = module.dynamo_ctx.callback
    if not callable(callback):
        return False
    wrapper = innermost_backend(callback)
    return getattr(wrapper, "compiler_fn", wrapper) is _backend


def _reaching_compiled_call(module: OptimizedModule, method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        from ckv_compile import report

        with compiled_calls(module):
            result = method(*args, **kwargs)
        if not report.reached(module._orig_mod):
            report.warn_once(
                f"{type(module._orig_mod).__name__}.{method.__name__} ran without any attention rewritten by "
                "communitykv; ckv_compile.explain(model) says why"
            )
        return result

    return call


@contextlib.contextmanager
def compiled_calls(module: OptimizedModule) -> Iterator[None]:
    """While active, calling the original module runs the compiled call. Nests, also across threads."""
    original = module._orig_mod
    slots = original.__dict__
    with _lock:
        depth = slots.get("_ckv_depth", 0)
        if depth == 0:
            if "_ckv_call" not in module.__dict__:
                # The same context as calling the compiled module: the same backend, options and code cache.
                module.__dict__["_ckv_call"] = module.dynamo_ctx(original._call_impl)
            slots["_ckv_saved"] = {
                name: slots[name] for name in ("_compiled_call_impl", "get_compiled_call") if name in slots
            }
            slots["_compiled_call_impl"] = module.__dict__["_ckv_call"]
            # With a static cache on CUDA generate would compile the call again, with Inductor.
            slots["get_compiled_call"] = lambda compile_config=None: original.__call__
        slots["_ckv_depth"] = depth + 1
    try:
        yield
    finally:
        with _lock:
            slots["_ckv_depth"] -= 1
            if slots["_ckv_depth"] == 0:
                for name in ("_ckv_depth", "_compiled_call_impl", "get_compiled_call"):
                    slots.pop(name, None)
                slots.update(slots.pop("_ckv_saved"))
