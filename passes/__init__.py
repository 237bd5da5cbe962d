"""Graphs in, graphs out: finds attention in a dynamo graph and rewrites it to ``ckv::`` ops. Holds no run-time state."""

if __name__ != "ckv_compile.passes":
    raise ImportError(f"import this package as ckv_compile.passes, not as {__name__}: two copies would differ")
