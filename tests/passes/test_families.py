"""What is matched in the models of today, one line per layer; the texts are those of ``describe`` below.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from expecttest import assert_expected_inline

from ckv_compile.passes.index_expressions import shape_of
from ckv_compile.passes.match_attention import AttentionSite, Refusal, find_sites
from ckv_compile.testing import captured_turns

RECORDED = transformers.__version__.startswith(("5.17", "5.24")) and torch.__version__.startswith("2.13")
pytestmark = pytest.mark.skipif(
    not RECORDED,
    reason=f"texts are recorded for transformers 5.17 and 5.24 on torch 2.13, these are {transformers.__version__} and "
    f"{torch.__version__}",
)


def describe(found: AttentionSite | Refusal) -> str:
    if isinstance(found, Refusal):
        return f"  {found.name} left alone: {found.reason}"
    heads = f"{found.num_query_heads}/{found.num_kv_heads} heads of {found.head_dim}, scale {found.scale:.4g}"
    read = {"padding": found.padding, "mask": found.mask, "sink_logits": found.sink_logits}
    rest = "".join(f", {name} {list(map(str, shape_of(node)))}" for name, node in read.items() if node is not None)
    return f"  {found.name} {found.node.target.__name__}, {found.cache.value} cache, {heads}{rest}".replace("'", "")


def layers(family: str, cache: str = "dynamic", implementation: str = "sdpa", **changes) -> str:
    """Prefill and decode of a padded batch."""
    lines = []
    for phase, captured in zip(
        ("prefill", "decode"), captured_turns(family, cache, True, (9, 1), implementation, **changes), strict=True
    ):
        sites, refusals = find_sites(captured.gm)
        found = sorted([*sites, *refusals], key=lambda one: one.index)
        lines += [phase, *map(describe, found)]
    return re.sub(r"\bs\d+\b", "s", "\n".join(lines))


@pytest.mark.parametrize("family", ["phi3", "llama3_rope", "qwen3_moe", "olmo2", "cohere"])
def test_families_that_look_alike(family):
    assert_expected_inline(
        layers(family, num_hidden_layers=1),
        """\
prefill
  model.layers.0.self_attn scaled_dot_product_attention, empty cache, 4/2 heads of 16, scale 0.25, padding [2, 9]
decode
  model.layers.0.self_attn scaled_dot_product_attention, dynamic cache, 4/2 heads of 16, scale 0.25, padding [2, s]""",
    )


def test_the_one_head_of_falcon_is_read_by_all():
    assert_expected_inline(
        layers("falcon", num_hidden_layers=1).replace("transformer.h.0.", ""),
        """\
prefill
  self_attention scaled_dot_product_attention, empty cache, 4/1 heads of 16, scale 0.25, padding [2, 9]
decode
  self_attention scaled_dot_product_attention, dynamic cache, 4/1 heads of 16, scale 0.25, padding [2, s]""",
    )


def test_granite_scales_by_its_own_number():
    assert_expected_inline(
        layers("granite", num_hidden_layers=1),
        """\
prefill
  model.layers.0.self_attn scaled_dot_product_attention, empty cache, 4/2 heads of 16, scale 0.125, padding [2, 9]
decode
  model.layers.0.self_attn scaled_dot_product_attention, dynamic cache, 4/2 heads of 16, scale 0.125, padding [2, s]""",
    )


def test_gemma3_has_one_layer_of_each_kind():
    assert_expected_inline(
        layers("gemma3"),
        """\
prefill
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
  model.layers.1.self_attn scaled_dot_product_attention, empty cache, 4/2 heads of 16, scale 0.25, padding [2, 9]
decode
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
  model.layers.1.self_attn scaled_dot_product_attention, dynamic cache, 4/2 heads of 16, scale 0.25, padding [2, s]""",
    )


def test_mistral_with_a_window_is_left_alone():
    assert_expected_inline(
        layers("mistral_window", num_hidden_layers=1),
        """\
prefill
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
decode
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)""",
    )


def test_gpt_oss_dynamic():
    assert_expected_inline(
        layers("gpt_oss", implementation="eager"),
        """\
prefill
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
  model.layers.1.self_attn matmul, empty cache, 4/2 heads of 16, scale 0.25, padding [2, 9], sink_logits [4]
decode
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
  model.layers.1.self_attn matmul, dynamic cache, 4/2 heads of 16, scale 0.25, padding [2, s], sink_logits [4]""",
    )


def test_gpt_oss_static():
    assert_expected_inline(
        layers("gpt_oss", "static", "eager"),
        """\
prefill
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
  model.layers.1.self_attn matmul, static cache, 4/2 heads of 16, scale 0.25, padding [2, 9], sink_logits [4]
decode
  model.layers.0.self_attn left alone: sliding window attention (each query sees only the last 8 tokens)
  model.layers.1.self_attn matmul, static cache, 4/2 heads of 16, scale 0.25, padding [2, s], sink_logits [4]""",
    )


def test_eager_granite():
    assert_expected_inline(
        layers("granite", implementation="eager", num_hidden_layers=1),
        """\
prefill
  model.layers.0.self_attn matmul, empty cache, 4/2 heads of 16, scale 0.125, padding [2, 9]
decode
  model.layers.0.self_attn matmul, dynamic cache, 4/2 heads of 16, scale 0.125, padding [2, s]""",
    )
