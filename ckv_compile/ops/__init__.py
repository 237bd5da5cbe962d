"""The ``torch.ops.ckv`` operators. Importing this package registers all of them."""

from ckv_compile.ops import (
    append_kv,
    approximate_edges,
    assign_token,
    community_centroids,
    encode_centroids,
    grouped_linear,
    key_edges,
    key_neighbors,
    prefill_attention,
    retrieve,
    route,
    sparse_attention,
    submit_partition,
    topk_prefill,
)

__all__ = [
    "append_kv",
    "approximate_edges",
    "assign_token",
    "community_centroids",
    "encode_centroids",
    "grouped_linear",
    "key_edges",
    "key_neighbors",
    "prefill_attention",
    "retrieve",
    "route",
    "sparse_attention",
    "submit_partition",
    "topk_prefill",
]
