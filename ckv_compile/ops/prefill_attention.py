"""``ckv::prefill_attention``: exact causal attention of new tokens over the cache."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.ops.library import register_op, require_cache, require_first, require_length, require_sink_logits


def _check(
    query: Tensor, key: Tensor, value: Tensor, length: Tensor, first: Tensor, sink_logits: Tensor | None
) -> None:
    require_cache(query, key, value)
    require_length(length)
    require_first(first, query.shape[0])
    require_sink_logits(query, sink_logits)


def _prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, length: Tensor, first: Tensor, scale: float, sink_logits: Tensor | None
) -> Tensor:
    if query.is_cuda:
        from ckv_compile.kernels import prefill_attention as kernel
        from ckv_compile.reference.nominal import cache_prefix

        if kernel.applies(query, value, length, first, sink_logits):
            if length.device.type == "cpu":  # else nobody knows on the host what the kernel will read
                total = int(length) + query.shape[2]
                key, value = cache_prefix(key, total, "key"), cache_prefix(value, total, "value")
            return kernel.prefill_attention(query, key, value, length, first, scale, sink_logits)
    from ckv_compile.reference.prefill_attention import prefill_attention

    return prefill_attention(query, key, value, length, first, scale, sink_logits)


def _attended(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, _ = query.shape
    # Token-major in memory, as torch's own kernels return it: models transpose back at no cost.
    return query.new_empty((batch, tokens, heads, value.shape[3])).transpose(1, 2)


register_op(
    "prefill_attention(Tensor query, Tensor key, Tensor value, Tensor length, Tensor first, Tensor ticket, "
    "float scale, Tensor? sink_logits) -> Tensor",
    _check,
    _attended,
    _prefill_attention,
)
