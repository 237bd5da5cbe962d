"""Lets ``torch.compile(model, backend="communitykv").generate(...)`` reach the compiled call.

``OptimizedModule`` forwards ``generate`` to the original module, which then calls itself eagerly: without help the
backend would never be reached, silently. While such a method of a model that was compiled with our backend runs, the
module's own ``_compiled_call_impl`` slot (the one ``Module.compile`` uses) leads to the compiled call. Models of other
backends, and this one outside the method or in other threads, are untouched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

# Methods of a model that call the model itself.
CALLING_METHODS = frozenset({"generate", "generate_batch"})
THREADED_METHODS = frozenset({"generate_batch"})  # of those, the ones that call it from threads of their own

DEFERRING_DEVICES = frozenset({"cuda"})  # where waiting for a stop check costs; transformers itself defers on "mps"

_lock = threading.RLock()
_backend: Callable | None = None


def install(backend: Callable) -> None:
    """Wrap ``OptimizedModule.__getattr__`` once, for models compiled with ``backend`` only."""
    global _backend
    _backend = backend
    if getattr(OptimizedModule.__getattr__, "_ckv_wraps", None) is None:
        original = OptimizedModule.__getattr__
        OptimizedModule.__getattr__ = _wrapped_getattr(original)  # type: ignore[method-assign]


def _wrapped_getattr(original: Callable) -> Callable:
    @functools.wraps(original)
    def getattr_(self: OptimizedModule, name: str) -> Any:
        value = original(self, name)
        if name in CALLING_METHODS and compiled_by_us(self):
            return _reaching_compiled_call(self, value)
        return value

    getattr_._ckv_wraps = original  # type: ignore[attr-defined]
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

        model = module._orig_mod
        require_resident(model, _by_name(method, args, kwargs))
        calls, broken = report.rewritten_calls(model), len(report.broken_steps(model))
        with (
            compiled_calls(module, every_thread=method.__name__ in THREADED_METHODS),
            deferred_stop_check(enabled=_options(module).get("deferred_stop", True)) as deferred,
        ):
            result = method(*args, **kwargs)
        if report.rewritten_calls(model) == calls:
            report.warn_once(
                f"{type(model).__name__}.{method.__name__} ran without any attention rewritten by "
                "communitykv; ckv_compile.explain(model) says why"
            )
        for entry in report.entries_of(model)[:1]:
            entry.deferred_stops += sum(deferred)
        if new := report.broken_steps(model)[broken:]:
            raise RuntimeError(new[0])
        return result

    return call


def _by_name(method: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names; what the method would not take is left for it to complain of."""
    try:
        bound = inspect.signature(method).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return kwargs
    return bound | kwargs


def _options(module: OptimizedModule) -> dict[str, Any]:
    """The options that torch.compile was given."""
    callback = module.dynamo_ctx.callback
    wrapper = innermost_backend(callback) if callable(callback) else None
    return getattr(wrapper, "kwargs", {}).get("options") or {}


# ---------------------------------------------------------------------- what must stay where it is

UNCOMPILED = "or call generate of the model as it was before torch.compile"


def require_resident(model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError where keys, values or weights would leave the device between the steps of a generation.

    kwargs: of ``generate``.
    """
    if any(_offloads(getattr(module, "_hf_hook", None)) for module in model.modules()):
        raise ValueError(
            "communitykv needs all weights on the device that computes; accelerate keeps some of this model's on the "
            f"CPU or on disk (device_map, cpu_offload). Load it with a device_map of GPUs only, {UNCOMPILED}"
        )
    configs = kwargs.get("generation_config"), getattr(model, "generation_config", None)
    defaults = (getattr(config, "cache_implementation", None) for config in configs)
    asked = kwargs.get("cache_implementation") or next(filter(None, defaults), None)
    if isinstance(asked, str) and asked.startswith(("offloaded", "quantized")):
        raise ValueError(
            "communitykv needs keys and values on the device and in the model's dtype; cache_implementation must be "
            f"'dynamic' or 'static', got {asked!r}. Leave it out, {UNCOMPILED}"
        )
    cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
    offloaded = getattr(cache, "offloading", False)
    if offloaded or any(hasattr(layer, "_quantize") for layer in getattr(cache, "layers", ())):
        raise ValueError(
            "communitykv needs keys and values on the device and in the model's dtype; past_key_values is "
            f"{'an offloaded' if offloaded else 'a quantized'} {type(cache).__name__}. Pass a DynamicCache or a "
            f"StaticCache, {UNCOMPILED}"
        )


def _offloads(hook: Any) -> bool:
    """Whether a hook of accelerate's loads the weights of its module for each call."""
    hooks = getattr(hook, "hooks", None) or (hook,)
    return any(getattr(one, "offload", False) for one in hooks)


# ---------------------------------------------------------------------- the stop check

_deferring: dict[int, list[bool]] = {}  # thread -> one entry per generation that defers
_original_is_supported: Any = None


@contextlib.contextmanager
def deferred_stop_check(*, enabled: bool = True) -> Iterator[list[bool]]:
    """While active, generate of this thread reads on CUDA whether to stop one step late, so the host never waits.

    transformers has this (``DeferredStopCheck``) and undoes the extra step, but switches it on for "mps" only; its other
    conditions hold here too. Yields a list with an entry for each generation that deferred. Where transformers does not
    have it, nothing happens.
    """
    global _original_is_supported
    check = getattr(sys.modules.get("transformers.generation.utils"), "DeferredStopCheck", None)
    if check is None or not enabled:
        yield []
        return
    thread = threading.get_ident()
    deferred: list[bool] = []
    with _lock:
        if not _deferring:
            _original_is_supported = check.__dict__["is_supported"]
            check.is_supported = staticmethod(_supported_also_on_cuda)
        outer = _deferring.get(thread)
        _deferring[thread] = deferred
    try:
        yield deferred
    finally:
        with _lock:
            if outer is None:
                del _deferring[thread]
            else:
                _deferring[thread] = outer
            if not _deferring:
                check.is_supported = _original_is_supported


def _supported_also_on_cuda(
    device: torch.device, cache: Any, cache_is_returned: bool, *args: Any, **kwargs: Any
) -> bool:
    original = _original_is_supported.__func__
    deferred = _deferring.get(threading.get_ident())
    if deferred is None or device.type not in DEFERRING_DEVICES:
        return original(device, cache, cache_is_returned, *args, **kwargs)
    if cache_is_returned and getattr(cache, "is_compileable", False):
        return False  # a static cache that outlives generate: undoing may write to every layer's counter at every step
    supported = original(torch.device("mps"), cache, cache_is_returned, *args, **kwargs)
    if supported:
        deferred.append(True)
    return supported


# ---------------------------------------------------------------------- the call


@contextlib.contextmanager
def compiled_calls(module: OptimizedModule, *, every_thread: bool = False) -> Iterator[None]:
    """While active, calling the original module (see ``generating_modules``) runs the compiled call: in this thread, or in
    every one.

    Nests, also across threads and for several compiled forms of one module.
    """
    with contextlib.ExitStack() as active:
        for called in generating_modules(module._orig_mod):
            active.enter_context(_compiled_call(module, called, every_thread=every_thread))
        yield


def generating_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What ``generate`` of a model calls: itself, or, where it hands over to models inside (as PEFT's does), these."""
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module not in inside and any(base.__name__ == "GenerationMixin" for base in type(module).__mro__):
            found.append(module)
            inside |= set(module.modules())
    return found or [model]


@contextlib.contextmanager
def _compiled_call(module: OptimizedModule, original: torch.nn.Module, *, every_thread: bool) -> Iterator[None]:
    slots = original.__dict__
    with _lock:
        compiled = module.__dict__.setdefault("_ckv_calls", weakref.WeakKeyDictionary())
        if original not in compiled:
            # The same context as calling the compiled module: the same backend, options and code cache.
            compiled[original] = module.dynamo_ctx(original._call_impl)
        entry = (None if every_thread else threading.get_ident(), compiled[original])
        if "_ckv_active" not in slots:
            saved = {name: slots[name] for name in ("_compiled_call_impl", "get_compiled_call") if name in slots}
            slots["_ckv_active"], slots["_ckv_saved"] = [], saved
            slots["_compiled_call_impl"] = _call_of_thread(
                slots["_ckv_active"], saved.get("_compiled_call_impl") or original._call_impl
            )
            # With a static cache on CUDA generate would compile the call again, with Inductor.
            slots["get_compiled_call"] = lambda compile_config=None: original.__call__
        slots["_ckv_active"].append(entry)
    try:
        yield
    finally:
        with _lock:
            slots["_ckv_active"].remove(entry)
            if not slots["_ckv_active"]:
                for name in ("_ckv_active", "_compiled_call_impl", "get_compiled_call"):
                    slots.pop(name, None)
                slots.update(slots.pop("_ckv_saved"))


def _call_of_thread(active: list[tuple[int | None, Callable]], otherwise: Callable) -> Callable:
    """A call that runs what the calling thread made active last, else what is active in every thread."""

    def call(*args: Any, **kwargs: Any) -> Any:
        entries = active[::-1]
        for wanted in (threading.get_ident(), None):
            for thread, compiled in entries:
                if thread == wanted:
                    return compiled(*args, **kwargs)
        return otherwise(*args, **kwargs)

    return call
