"""CUDA code of the ``ckv::`` operators: importing this package registers their Inductor lowerings.

On other devices, and where a template does not apply, a lowering calls the operator itself.
"""

import ckv_compile.ops  # noqa: F401  (registers the operators)
from ckv_compile.lowering import (
    append_kv,
    assign_tokens,
    grouped_linear,
    pick_edges,
    retrieve,
    route,
    route_coarse,
    select_summaries,
    sparse_attention,
    sparse_attention_edges,
    topk_prefill,
)

__all__ = [
    "append_kv", "assign_tokens", "grouped_linear", "pick_edges", "retrieve", "route", "route_coarse",
    "select_summaries", "sparse_attention", "sparse_attention_edges", "topk_prefill",
]  # fmt: skip
