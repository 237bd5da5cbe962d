"""The ``torch.ops.ckv`` operators. Importing this package registers all of them."""

from ckv_compile.ops import (
    append_kv,
    assign_tokens,
    community_centroids,
    encode_centroids,
    grouped_linear,
    key_neighbors,
    pick_edges,
    prefill_attention,
    retrieve,
    route,
    select_summaries,
    sparse_attention,
    sparse_attention_edges,
    submit_partition,
    topk_prefill,
)

__all__ = [
    "append_kv",
    "assign_tokens",
    "community_centroids",
    "encode_centroids",
    "grouped_linear",
    "key_neighbors",
    "pick_edges",
    "prefill_attention",
    "retrieve",
    "route",
    "select_summaries",
    "sparse_attention",
    "sparse_attention_edges",
    "submit_partition",
    "topk_prefill",
]
