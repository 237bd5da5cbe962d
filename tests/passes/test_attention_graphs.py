"""What transformers' attention looks like to the matcher, so that a release that changes it shows as a difference here.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

from __future__ import annotations

import collections
import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
import transformers
from expecttest import assert_expected_inline
from torch import fx

from ckv_compile.passes.index_expressions import is_tensor, target_name
from ckv_compile.passes.match_attention import find_sites
from ckv_compile.testing import Captured, capture_generate, prompt, tiny_model

OLDEST = transformers.__version__.startswith("5.17")
RECORDED = (OLDEST or transformers.__version__.startswith("5.24")) and torch.__version__.startswith("2.13")
pytestmark = pytest.mark.skipif(
    not RECORDED,
    reason=f"texts are recorded for transformers 5.17 and 5.24 on torch 2.13, these are {transformers.__version__} and "
    f"{torch.__version__}; other versions are covered by what is matched in them",
)

_STRUCTURE = frozenset({"cat", "getitem", "expand", "reshape", "index_copy_", "zeros", "tensor", "add_", "to"})


def _is_followed(node: fx.Node) -> bool:
    """True for caches, masks, positions and views, false for what the layer computes."""
    value = node.meta.get("example_value")
    return not is_tensor(node) or not value.dtype.is_floating_point or target_name(node) in _STRUCTURE


def _text(argument: object, names: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return names.get(argument, str(argument))
    if isinstance(argument, slice):
        return f"{'' if argument.start is None else argument.start}:{'' if argument.stop is None else argument.stop}"
    if isinstance(argument, tuple | list):
        return f"[{', '.join(_text(one, names) for one in argument)}]"
    return str(argument)


def _names(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """Names that count what is shown only, and that are the same whatever transformers calls its cache."""
    counts: collections.Counter[str] = collections.Counter()
    names = {}
    for node in nodes:
        stem = re.sub(r"_\d+$", "", node.name).replace("past_key_values", "cache")
        names[node] = f"{stem}_{counts[stem]}" if counts[stem] else stem
        counts[stem] += 1
    return names


def attention_text(captured: Captured) -> str:
    """The attention of the last layer: caches, masks and positions. Where the new Q, K and V come from is left out."""
    graph = captured.gm.graph
    sites, refusals = find_sites(captured.gm)
    header = f"{len(sites)} of {len(sites) + len(refusals)} attention layers matched"
    last = [node for node in graph.nodes if node.target is F.scaled_dot_product_attention][-1]
    shown: set[fx.Node] = {last}
    pending = list(last.all_input_nodes)
    while pending:
        node = pending.pop()
        value = node.meta.get("example_value")
        if node in shown or isinstance(value, int | torch.SymInt):
            continue
        shown.add(node)
        if _is_followed(node):
            pending.extend(node.all_input_nodes)
        pending.extend(user for user in node.users if target_name(user) == "index_copy_")
    lines, names, symbols = [], _names([node for node in graph.nodes if node in shown]), {}
    for node, name in names.items():
        line = f"{name} {list(node.meta['example_value'].shape)}"
        if node.op != "placeholder" and node is not last and not _is_followed(node):
            line += " = ..."
        elif node.op != "placeholder":
            arguments = [_text(argument, names) for argument in node.args] + [
                f"{key}={_text(value, names)}" for key, value in node.kwargs.items() if key not in ("device", "dtype")
            ]
            line += f" = {target_name(node)}({', '.join(arguments)})"
        line = re.sub(r"\bs\d+\b", lambda found: symbols.setdefault(found.group(), f"s{len(symbols)}"), line)
        lines.extend(textwrap.wrap(line, 110, subsequent_indent="    ", break_long_words=False))
    return "\n".join([header, *lines])


@pytest.fixture(scope="module")
def graphs():
    """Graphs of a one-layer model by (family, cache): prefill first, decode last."""
    done = {}

    def of(family: str, cache: str) -> list[Captured]:
        if (family, cache) not in done:
            model = tiny_model(family, num_hidden_layers=1)
            done[family, cache] = capture_generate(model, prompt(padded=cache == "dynamic"), cache=cache)
        return done[family, cache]

    return of


def test_llama_dynamic_prefill(graphs):
    assert_expected_inline(
        attention_text(graphs("llama", "dynamic")[0]),
        """\
1 of 1 attention layers matched
l_kwargs_attention_mask_ [2, 9]
attention_mask [2, 9] = to(l_kwargs_attention_mask_)
batch_arange [2] = arange(2)
arange [9] = arange(9)
q_arange [9] = add(arange, 0)
arange_1 [9] = arange(9)
kv_arange [9] = add(arange_1, 0)
batch_indices [2, 1, 1, 1] = getitem(batch_arange, [:, None, None, None])
q_indices [1, 1, 9, 1] = getitem(q_arange, [None, None, :, None])
kv_indices [1, 1, 1, 9] = getitem(kv_arange, [None, None, None, :])
result [] = new_ones(q_indices, [])
le [1, 1, 9, 9] = le(kv_indices, q_indices)
to [1, 1, 9, 9] = to(le, cpu)
result_1 [1, 1, 9, 9] = and_(result, to)
getitem [2, 1, 1, 9] = getitem(attention_mask, [batch_indices, kv_indices])
to_1 [2, 1, 1, 9] = to(getitem, cpu)
result_2 [2, 1, 9, 9] = and_(result_1, to_1)
attention_mask_1 [2, 1, 9, 9] = expand(result_2, 2, -1, 9, 9)
value_states [2, 2, 9, 16] = ...
q_embed [2, 4, 9, 16] = ...
k_embed [2, 2, 9, 16] = ...
tensor [0] = tensor([])
tensor_1 [0] = tensor([])
keys [2, 2, 9, 16] = cat([tensor, k_embed], dim=-2)
values [2, 2, 9, 16] = cat([tensor_1, value_states], dim=-2)
getitem_1 [2, 2, 1, 9, 16] = getitem(keys, [:, :, None, :, :])
hidden_states [2, 2, 2, 9, 16] = expand(getitem_1, 2, 2, 2, 9, 16)
key [2, 4, 9, 16] = reshape(hidden_states, 2, 4, 9, 16)
getitem_2 [2, 2, 1, 9, 16] = getitem(values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, 9, 16] = expand(getitem_2, 2, 2, 2, 9, 16)
value [2, 4, 9, 16] = reshape(hidden_states_1, 2, 4, 9, 16)
attn_output [2, 4, 9, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask_1,
    dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_llama_dynamic_decode(graphs):
    assert_expected_inline(
        attention_text(graphs("llama", "dynamic")[-1]),
        """\
1 of 1 attention layers matched
l_kwargs_attention_mask_ [2, s0]
l_kwargs_cache_layers_0_keys [2, 2, s1, 16]
l_kwargs_cache_layers_0_values [2, 2, s2, 16]
attention_mask [2, s0] = to(l_kwargs_attention_mask_)
batch_arange [2] = arange(2)
arange [1] = arange(1)
q_arange [1] = add(arange, s1)
arange_1 [s1 + 1] = arange(add)
kv_arange [s1 + 1] = add(arange_1, 0)
batch_indices [2, 1, 1, 1] = getitem(batch_arange, [:, None, None, None])
q_indices [1, 1, 1, 1] = getitem(q_arange, [None, None, :, None])
kv_indices [1, 1, 1, s1 + 1] = getitem(kv_arange, [None, None, None, :])
result [] = new_ones(q_indices, [])
le [1, 1, 1, s1 + 1] = le(kv_indices, q_indices)
to [1, 1, 1, s1 + 1] = to(le, cpu)
result_1 [1, 1, 1, s1 + 1] = and_(result, to)
getitem [2, 1, 1, s1 + 1] = getitem(attention_mask, [batch_indices, kv_indices])
to_1 [2, 1, 1, s1 + 1] = to(getitem, cpu)
result_2 [2, 1, 1, s1 + 1] = and_(result_1, to_1)
attention_mask_1 [2, 1, 1, s1 + 1] = expand(result_2, 2, -1, 1, add)
value_states [2, 2, 1, 16] = ...
q_embed [2, 4, 1, 16] = ...
k_embed [2, 2, 1, 16] = ...
keys [2, 2, s1 + 1, 16] = cat([l_kwargs_cache_layers_0_keys, k_embed], dim=-2)
values [2, 2, s2 + 1, 16] = cat([l_kwargs_cache_layers_0_values, value_states], dim=-2)
getitem_1 [2, 2, 1, s1 + 1, 16] = getitem(keys, [:, :, None, :, :])
hidden_states [2, 2, 2, s1 + 1, 16] = expand(getitem_1, 2, 2, 2, add, 16)
key [2, 4, s1 + 1, 16] = reshape(hidden_states, 2, 4, add, 16)
getitem_2 [2, 2, 1, s2 + 1, 16] = getitem(values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, s2 + 1, 16] = expand(getitem_2, 2, 2, 2, sym_sum, 16)
value [2, 4, s2 + 1, 16] = reshape(hidden_states_1, 2, 4, sym_sum, 16)
attn_output [2, 4, 1, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask_1,
    dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_llama_static_prefill(graphs):
    text = attention_text(graphs("llama", "static")[0])
    if OLDEST:  # its mask over the whole buffer is made in the graph
        assert_expected_inline(
            text,
            """\
1 of 1 attention layers matched
l_kwargs_cache_layers_0_cumulative_length []
arange [9] = arange(9)
q_arange [9] = add(arange, 0)
arange_1 [12] = arange(12)
kv_arange [12] = add(arange_1, 0)
q_indices [1, 1, 9, 1] = getitem(q_arange, [None, None, :, None])
kv_indices [1, 1, 1, 12] = getitem(kv_arange, [None, None, None, :])
attention_mask [1, 1, 9, 12] = le(kv_indices, q_indices)
attention_mask_1 [2, 1, 9, 12] = expand(attention_mask, 2, -1, 9, 12)
value_states [2, 2, 9, 16] = ...
q_embed [2, 4, 9, 16] = ...
k_embed [2, 2, 9, 16] = ...
keys [2, 2, 12, 16] = zeros([2, 2, 12, 16])
values [2, 2, 12, 16] = zeros([2, 2, 12, 16])
to [] = to(l_kwargs_cache_layers_0_cumulative_length, cpu)
arange_2 [9] = arange(9)
cache_position [9] = add(arange_2, to)
index_copy_ [2, 2, 12, 16] = index_copy_(keys, 2, cache_position, k_embed)
index_copy__1 [2, 2, 12, 16] = index_copy_(values, 2, cache_position, value_states)
getitem [2, 2, 1, 12, 16] = getitem(keys, [:, :, None, :, :])
hidden_states [2, 2, 2, 12, 16] = expand(getitem, 2, 2, 2, 12, 16)
key [2, 4, 12, 16] = reshape(hidden_states, 2, 4, 12, 16)
getitem_1 [2, 2, 1, 12, 16] = getitem(values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, 12, 16] = expand(getitem_1, 2, 2, 2, 12, 16)
value [2, 4, 12, 16] = reshape(hidden_states_1, 2, 4, 12, 16)
attn_output [2, 4, 9, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask_1,
    dropout_p=0.0, scale=0.25, is_causal=False)""",
        )
        return
    assert_expected_inline(
        text,
        """\
1 of 1 attention layers matched
l_kwargs_cache_layers_0_cumulative_length []
value_states [2, 2, 9, 16] = ...
q_embed [2, 4, 9, 16] = ...
k_embed [2, 2, 9, 16] = ...
keys [2, 2, 12, 16] = zeros([2, 2, 12, 16])
values [2, 2, 12, 16] = zeros([2, 2, 12, 16])
to [] = to(l_kwargs_cache_layers_0_cumulative_length, cpu)
arange [9] = arange(9)
cache_position [9] = add(arange, to)
index_copy_ [2, 2, 12, 16] = index_copy_(keys, 2, cache_position, k_embed)
index_copy__1 [2, 2, 12, 16] = index_copy_(values, 2, cache_position, value_states)
key [2, 2, 9, 16] = getitem(keys, [:, :, :9, :])
value [2, 2, 9, 16] = getitem(values, [:, :, :9, :])
attn_output [2, 4, 9, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=None, dropout_p=0.0,
    scale=0.25, is_causal=True, enable_gqa=True)""",
    )


def test_llama_static_decode(graphs):
    assert_expected_inline(
        attention_text(graphs("llama", "static")[-1]),
        """\
1 of 1 attention layers matched
l_kwargs_attention_mask_ [2, 1, 1, 12]
l_kwargs_cache_layers_0_cumulative_length []
l_kwargs_cache_layers_0_keys [2, 2, 12, 16]
l_kwargs_cache_layers_0_values [2, 2, 12, 16]
value_states [2, 2, 1, 16] = ...
q_embed [2, 4, 1, 16] = ...
k_embed [2, 2, 1, 16] = ...
arange [1] = arange(1)
cache_position [1] = add(arange, l_kwargs_cache_layers_0_cumulative_length)
index_copy_ [2, 2, 12, 16] = index_copy_(l_kwargs_cache_layers_0_keys, 2, cache_position, k_embed)
index_copy__1 [2, 2, 12, 16] = index_copy_(l_kwargs_cache_layers_0_values, 2, cache_position, value_states)
getitem [2, 2, 1, 12, 16] = getitem(l_kwargs_cache_layers_0_keys, [:, :, None, :, :])
hidden_states [2, 2, 2, 12, 16] = expand(getitem, 2, 2, 2, 12, 16)
key [2, 4, 12, 16] = reshape(hidden_states, 2, 4, 12, 16)
getitem_1 [2, 2, 1, 12, 16] = getitem(l_kwargs_cache_layers_0_values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, 12, 16] = expand(getitem_1, 2, 2, 2, 12, 16)
value [2, 4, 12, 16] = reshape(hidden_states_1, 2, 4, 12, 16)
attn_output [2, 4, 1, 16] = scaled_dot_product_attention(q_embed, key, value,
    attn_mask=l_kwargs_attention_mask_, dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_qwen3_dynamic_prefill(graphs):
    assert_expected_inline(
        attention_text(graphs("qwen3", "dynamic")[0]),
        """\
1 of 1 attention layers matched
l_kwargs_attention_mask_ [2, 9]
attention_mask [2, 9] = to(l_kwargs_attention_mask_)
batch_arange [2] = arange(2)
arange [9] = arange(9)
q_arange [9] = add(arange, 0)
arange_1 [9] = arange(9)
kv_arange [9] = add(arange_1, 0)
batch_indices [2, 1, 1, 1] = getitem(batch_arange, [:, None, None, None])
q_indices [1, 1, 9, 1] = getitem(q_arange, [None, None, :, None])
kv_indices [1, 1, 1, 9] = getitem(kv_arange, [None, None, None, :])
result [] = new_ones(q_indices, [])
le [1, 1, 9, 9] = le(kv_indices, q_indices)
to [1, 1, 9, 9] = to(le, cpu)
result_1 [1, 1, 9, 9] = and_(result, to)
getitem [2, 1, 1, 9] = getitem(attention_mask, [batch_indices, kv_indices])
to_1 [2, 1, 1, 9] = to(getitem, cpu)
result_2 [2, 1, 9, 9] = and_(result_1, to_1)
attention_mask_1 [2, 1, 9, 9] = expand(result_2, 2, -1, 9, 9)
value_states [2, 2, 9, 16] = ...
q_embed [2, 4, 9, 16] = ...
k_embed [2, 2, 9, 16] = ...
tensor [0] = tensor([])
tensor_1 [0] = tensor([])
keys [2, 2, 9, 16] = cat([tensor, k_embed], dim=-2)
values [2, 2, 9, 16] = cat([tensor_1, value_states], dim=-2)
getitem_1 [2, 2, 1, 9, 16] = getitem(keys, [:, :, None, :, :])
hidden_states [2, 2, 2, 9, 16] = expand(getitem_1, 2, 2, 2, 9, 16)
key [2, 4, 9, 16] = reshape(hidden_states, 2, 4, 9, 16)
getitem_2 [2, 2, 1, 9, 16] = getitem(values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, 9, 16] = expand(getitem_2, 2, 2, 2, 9, 16)
value [2, 4, 9, 16] = reshape(hidden_states_1, 2, 4, 9, 16)
attn_output [2, 4, 9, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask_1,
    dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_qwen3_dynamic_decode(graphs):
    assert_expected_inline(
        attention_text(graphs("qwen3", "dynamic")[-1]),
        """\
1 of 1 attention layers matched
l_kwargs_attention_mask_ [2, s0]
l_kwargs_cache_layers_0_keys [2, 2, s1, 16]
l_kwargs_cache_layers_0_values [2, 2, s2, 16]
attention_mask [2, s0] = to(l_kwargs_attention_mask_)
batch_arange [2] = arange(2)
arange [1] = arange(1)
q_arange [1] = add(arange, s1)
arange_1 [s1 + 1] = arange(add)
kv_arange [s1 + 1] = add(arange_1, 0)
batch_indices [2, 1, 1, 1] = getitem(batch_arange, [:, None, None, None])
q_indices [1, 1, 1, 1] = getitem(q_arange, [None, None, :, None])
kv_indices [1, 1, 1, s1 + 1] = getitem(kv_arange, [None, None, None, :])
result [] = new_ones(q_indices, [])
le [1, 1, 1, s1 + 1] = le(kv_indices, q_indices)
to [1, 1, 1, s1 + 1] = to(le, cpu)
result_1 [1, 1, 1, s1 + 1] = and_(result, to)
getitem [2, 1, 1, s1 + 1] = getitem(attention_mask, [batch_indices, kv_indices])
to_1 [2, 1, 1, s1 + 1] = to(getitem, cpu)
result_2 [2, 1, 1, s1 + 1] = and_(result_1, to_1)
attention_mask_1 [2, 1, 1, s1 + 1] = expand(result_2, 2, -1, 1, add)
value_states [2, 2, 1, 16] = ...
q_embed [2, 4, 1, 16] = ...
k_embed [2, 2, 1, 16] = ...
keys [2, 2, s1 + 1, 16] = cat([l_kwargs_cache_layers_0_keys, k_embed], dim=-2)
values [2, 2, s2 + 1, 16] = cat([l_kwargs_cache_layers_0_values, value_states], dim=-2)
getitem_1 [2, 2, 1, s1 + 1, 16] = getitem(keys, [:, :, None, :, :])
hidden_states [2, 2, 2, s1 + 1, 16] = expand(getitem_1, 2, 2, 2, add, 16)
key [2, 4, s1 + 1, 16] = reshape(hidden_states, 2, 4, add, 16)
getitem_2 [2, 2, 1, s2 + 1, 16] = getitem(values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, s2 + 1, 16] = expand(getitem_2, 2, 2, 2, sym_sum, 16)
value [2, 4, s2 + 1, 16] = reshape(hidden_states_1, 2, 4, sym_sum, 16)
attn_output [2, 4, 1, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask_1,
    dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_qwen3_static_prefill(graphs):
    assert_expected_inline(
        attention_text(graphs("qwen3", "static")[0]),
        """\
1 of 1 attention layers matched
l_kwargs_cache_layers_0_cumulative_length []
value_states [2, 2, 9, 16] = ...
q_embed [2, 4, 9, 16] = ...
k_embed [2, 2, 9, 16] = ...
keys [2, 2, 12, 16] = zeros([2, 2, 12, 16])
values [2, 2, 12, 16] = zeros([2, 2, 12, 16])
to [] = to(l_kwargs_cache_layers_0_cumulative_length, cpu)
arange [9] = arange(9)
cache_position [9] = add(arange, to)
index_copy_ [2, 2, 12, 16] = index_copy_(keys, 2, cache_position, k_embed)
index_copy__1 [2, 2, 12, 16] = index_copy_(values, 2, cache_position, value_states)
key [2, 2, 9, 16] = getitem(keys, [:, :, :9, :])
value [2, 2, 9, 16] = getitem(values, [:, :, :9, :])
attn_output [2, 4, 9, 16] = scaled_dot_product_attention(q_embed, key, value, attn_mask=None, dropout_p=0.0,
    scale=0.25, is_causal=True, enable_gqa=True)""",
    )


def test_qwen3_static_decode(graphs):
    assert_expected_inline(
        attention_text(graphs("qwen3", "static")[-1]),
        """\
1 of 1 attention layers matched
l_kwargs_cache_layers_0_cumulative_length []
l_kwargs_cache_layers_0_keys [2, 2, 12, 16]
l_kwargs_cache_layers_0_values [2, 2, 12, 16]
l_kwargs_attention_mask_full_attention_ [2, 1, 1, 12]
value_states [2, 2, 1, 16] = ...
q_embed [2, 4, 1, 16] = ...
k_embed [2, 2, 1, 16] = ...
arange [1] = arange(1)
cache_position [1] = add(arange, l_kwargs_cache_layers_0_cumulative_length)
index_copy_ [2, 2, 12, 16] = index_copy_(l_kwargs_cache_layers_0_keys, 2, cache_position, k_embed)
index_copy__1 [2, 2, 12, 16] = index_copy_(l_kwargs_cache_layers_0_values, 2, cache_position, value_states)
getitem [2, 2, 1, 12, 16] = getitem(l_kwargs_cache_layers_0_keys, [:, :, None, :, :])
hidden_states [2, 2, 2, 12, 16] = expand(getitem, 2, 2, 2, 12, 16)
key [2, 4, 12, 16] = reshape(hidden_states, 2, 4, 12, 16)
getitem_1 [2, 2, 1, 12, 16] = getitem(l_kwargs_cache_layers_0_values, [:, :, None, :, :])
hidden_states_1 [2, 2, 2, 12, 16] = expand(getitem_1, 2, 2, 2, 12, 16)
value [2, 4, 12, 16] = reshape(hidden_states_1, 2, 4, 12, 16)
attn_output [2, 4, 1, 16] = scaled_dot_product_attention(q_embed, key, value,
    attn_mask=l_kwargs_attention_mask_full_attention_, dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("family", "like"), [("qwen2", "qwen3"), ("mistral", "llama")])
def test_qwen2_and_mistral_look_like_others(graphs, family, like, cache):
    for mine, others in zip(graphs(family, cache), graphs(like, cache), strict=True):
        assert _anonymous(attention_text(mine)) == _anonymous(attention_text(others))


def _anonymous(text: str) -> list[str]:
    """Without what only names and orders inputs: numbers of nodes, the kind of a mask, which input comes first."""
    text = re.sub(r"_\d+\b", "", text).replace("attention_mask_full_attention_", "attention_mask_")
    inputs, rest = [], []
    for line in text.splitlines():
        (inputs if line.startswith("l_") else rest).append(line)
    return sorted(inputs) + rest
