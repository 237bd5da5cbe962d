"""The CUDA code that Inductor writes for rewritten decode graphs of Llama: our kernels, in place, and nothing around them.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

import ast
import functools
import operator
import re
import textwrap

import pytest
import torch
from expecttest import assert_expected_inline
from torch.utils._pytree import tree_map

import ckv_compile.lowering  # noqa: F401
from ckv_compile.config import CommunityConfig
from ckv_compile.fake_cuda import generated_code
from ckv_compile.index_layout import ASSIGNED_AT_ONCE
from ckv_compile.passes.group_projections import group_projections
from ckv_compile.testing import captured_turns, rewritten

DECODE, LAYERS = 1, 2
ONE, SEVERAL = (40, 1, 5), (5, 5)  # tokens per call; the second is a decode step
TEMPLATES = {  # an argument that this template has and none after it
    "NEIGHBOR": "plan_tokens", "PLAN": "assign_tokens", "MEAN_VALUE": "attend_summaries",
    "COARSE": "route_coarse", "CENTROID": "route", "MEMBER": "retrieve", "SHORTLIST": "route", "IDS": "select_summaries",
    "KEY_NEW": "append_kv", "VALUE": "sparse_attention",
    "TOTAL": "merge_splits", "TOKENS": "edges",
}  # fmt: skip


def take(value, key):
    """``value[key]``; Python's own indexing of a tensor asks for a CUDA build."""
    if not isinstance(value, torch.Tensor):
        return value[key]
    key = key if isinstance(key, tuple) else (key,)
    named, dim = sum(part is not None and part is not Ellipsis for part in key), 0
    for part in key:
        if part is Ellipsis:
            dim += value.dim() - named
            continue
        if part is None:
            value = value.unsqueeze(dim)
        else:
            begin, end, _ = part.indices(value.shape[dim])
            value = value.narrow(dim, begin, end - begin)
        dim += 1
    return value


def contiguous(value):
    """``value.contiguous()``, which asks for a CUDA build too."""
    return value if value.is_contiguous() else torch.ops.aten.clone(value, memory_format=torch.contiguous_format)


def to_cuda(argument):
    return torch.device("cuda", 0) if isinstance(argument, torch.device) else argument


@functools.cache
def decode_step(cache: str, lengths: tuple[int, ...] = ONE, **options) -> tuple[list[str], str]:
    """(names of the graph's inputs, code) of a decode step of two layers of Llama on a GPU."""
    options = {"hierarchy": "off", **options}
    config = CommunityConfig(min_context=0, workers=0, num_sink_tokens=1, recent_window=2, budget=64, **options)
    gm = rewritten(
        captured_turns("llama", cache, False, lengths, num_hidden_layers=LAYERS)[DECODE], config, several=True
    ).gm
    group_projections(gm, config.group_projections)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            node.args, node.kwargs = tree_map(to_cuda, node.args), tree_map(to_cuda, node.kwargs)
        if node.target == "to":
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
        elif node.target is operator.getitem:
            node.target = take
        elif node.target == "contiguous":
            node.op, node.target = "call_function", contiguous
    gm.recompile()

    def arguments():
        values = [node.meta["example_value"] for node in inputs]
        layouts = [(list(map(int, v.shape)), list(map(int, v.stride())), v.dtype) for v in values]
        return [torch.empty_strided(size, stride, dtype=dtype, device="cuda") for size, stride, dtype in layouts]

    return [node.name for node in inputs], generated_code(lambda *values: gm(*values), arguments)


def launches(names: list[str], code: str) -> str:
    """Our kernels with their grid, and what else writes our state or the cache, with "!"; then which of these they take."""
    definitions, call = code[: code.index("def call(")], code[code.index("def call(") :]
    signatures, written = {}, {}
    for text in definitions.split("async_compile.triton('")[1:]:
        kernel = text.split("'")[0]
        signatures[kernel] = list(ast.literal_eval(re.search(r"'signature': ({.*?})", text)[1]))
        mutated = re.search(r"'mutated_arg_names': (\[.*?\])", text)
        written[kernel] = set(ast.literal_eval(mutated[1])) if mutated else set()
    lines = []
    for kernel, text in re.findall(r"(\w+)\.run\((.*), stream=", call):
        arguments = text.split(", ")
        parameters = [name.removeprefix("arg_") for name in signatures[kernel]]
        kind = next((kind for mark, kind in TEMPLATES.items() if mark in parameters), "fused")
        taken = []
        for argument, parameter in zip(arguments, signatures[kernel], strict=False):
            number = re.fullmatch(r"(?:reinterpret_tensor\()?arg(\d+)_1", argument)
            name = names[int(number[1])] if number else ""
            if re.search("ckv_|_keys|_values", name):
                name = re.sub(r".*layers_(\d)_(key|value|cumulative_length)s?.*", r"\2_\1", name.removeprefix("ckv_"))
                taken.append(name + "!" * (parameter in written[kernel]))
        if kind != "fused":
            lines.append(" ".join([kind, "x".join(arguments[-3:]), *dict.fromkeys(taken)]))
        elif any(name.endswith("!") for name in taken):
            lines.append(" ".join([kind, *dict.fromkeys(taken)]))
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="    ") for line in lines)


def test_decode_on_a_dynamic_cache():
    assert_expected_inline(
        launches(*decode_step("dynamic")),
        """\
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_0 length first tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first
merge_splits 8x1x1
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_1 length first tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first
merge_splits 8x1x1
fused length!""",
    )


def test_decode_on_a_static_cache():
    assert_expected_inline(
        launches(*decode_step("static")),
        """\
fused cumulative_length_0 key_0!
fused cumulative_length_0!
fused value_0!
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_0 first tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 first
merge_splits 8x1x1
fused cumulative_length_1!
fused key_1!
fused value_1!
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_1 first tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 first
merge_splits 8x1x1""",
    )


def test_groups_of_communities_have_a_kernel_more():
    assert_expected_inline(
        launches(*decode_step("dynamic", hierarchy="auto")),
        """\
route_coarse 8x4x1 coarse coarse_scale channel_scale num_grouped num_communities capacity_0 coarse_scores scores
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_0 length first tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first
merge_splits 8x1x1
route_coarse 8x4x1 coarse coarse_scale channel_scale num_grouped num_communities capacity_1 coarse_scores scores
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_1 length first tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first
merge_splits 8x1x1
fused length!""",
    )


def test_softmax_score_has_a_pass_more():
    assert_expected_inline(
        launches(*decode_step("dynamic", score="softmax")),
        """\
route 64x4x1 centroid centroid_scale channel_scale size num_communities capacity_0
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_0 length first tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first
merge_splits 8x1x1
route 64x4x1 centroid centroid_scale channel_scale size num_communities capacity_1
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_1 length first tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first
merge_splits 8x1x1
fused length!""",
    )


def test_new_tokens_are_assigned_in_all_layers_at_once():
    assert_expected_inline(
        launches(*decode_step("dynamic", append="assign")),
        """\
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 17x4x1 scores start stored size member log_community log_first num_communities n_indexed capacity_0 length
    first tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first candidate candidate_score candidate_rest
    new_key
merge_splits 8x1x1
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 17x4x1 scores start stored size member log_community log_first num_communities n_indexed capacity_1 length
    first tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first candidate candidate_score candidate_rest
    new_key
merge_splits 8x1x1
plan_tokens 4x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 length first edge_neighbor edge_weight
assign_tokens 4x2x1 new_key channel_scale log_first capacity_0 length centroid centroid_scale log_mean mean_at start
    stored size num_communities n_indexed log_community label community_weight total_weight
plan_tokens 4x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 length first edge_neighbor edge_weight
assign_tokens 4x2x1 new_key channel_scale log_first capacity_0 length centroid centroid_scale log_mean mean_at start
    stored size num_communities n_indexed log_community label community_weight total_weight
fused length!""",
    )


def test_edges_of_scores_come_with_the_attention():
    assert_expected_inline(
        launches(*decode_step("static", graph="mixed")),
        """\
fused cumulative_length_0 key_0!
fused cumulative_length_0!
fused value_0!
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores
retrieve 17x4x1 scores start stored size member log_community log_first num_communities n_indexed capacity_0 first
    tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 first candidate candidate_score candidate_rest new_key
merge_splits 8x1x1 capacity_0 candidate_norm
fused cumulative_length_1!
fused key_1!
fused value_1!
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores
retrieve 17x4x1 scores start stored size member log_community log_first num_communities n_indexed capacity_1 first
    tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 first candidate candidate_score candidate_rest new_key
merge_splits 8x1x1 capacity_1 candidate_norm
plan_tokens 4x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 first edge_neighbor edge_weight
assign_tokens 4x2x1 new_key channel_scale log_first capacity_0 centroid centroid_scale log_mean mean_at start stored
    size num_communities n_indexed log_community label community_weight total_weight
plan_tokens 4x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 first edge_neighbor edge_weight
assign_tokens 4x2x1 new_key channel_scale log_first capacity_0 centroid centroid_scale log_mean mean_at start stored
    size num_communities n_indexed log_community label community_weight total_weight""",
    )


def test_cosines_over_all_heads_have_a_kernel_of_their_own():
    assert_expected_inline(
        launches(*decode_step("dynamic", append="assign", graph_aggregation="layer")),
        """\
route 64x2x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 17x2x1 scores start stored size member log_community log_first num_communities n_indexed capacity_0 length
    first tally
edges 64x2x1 key_0 n_indexed capacity_0 length first candidate candidate_score candidate_rest new_key
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first
merge_splits 8x1x1
route 64x2x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 17x2x1 scores start stored size member log_community log_first num_communities n_indexed capacity_1 length
    first tally
edges 64x2x1 key_1 n_indexed capacity_1 length first candidate candidate_score candidate_rest new_key
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first
merge_splits 8x1x1
plan_tokens 2x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 length first edge_neighbor edge_weight
assign_tokens 2x2x1 new_key channel_scale log_first capacity_0 length centroid centroid_scale log_mean mean_at start
    stored size num_communities n_indexed log_community label community_weight total_weight
plan_tokens 2x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 length first edge_neighbor edge_weight
assign_tokens 2x2x1 new_key channel_scale log_first capacity_0 length centroid centroid_scale log_mean mean_at start
    stored size num_communities n_indexed log_community label community_weight total_weight
fused length!""",
    )


def test_communities_that_are_not_retrieved_are_selected_and_attended():
    assert_expected_inline(
        launches(*decode_step("dynamic", centroid_budget=4)),
        """\
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_0 length first tally
select_summaries 4x1x1 scores size num_communities n_indexed capacity_0 length first tally
attend_summaries 4x1x1 centroid centroid_scale channel_scale size mean_value capacity_0
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first
merge_splits 8x1x1
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_1 length first tally
select_summaries 4x1x1 scores size num_communities n_indexed capacity_1 length first tally
attend_summaries 4x1x1 centroid centroid_scale channel_scale size mean_value capacity_1
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first
merge_splits 8x1x1
fused length!""",
    )


def test_mean_values_are_kept_where_tokens_are_assigned():
    assert_expected_inline(
        launches(*decode_step("dynamic", append="assign", centroid_budget=4)),
        """\
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 17x4x1 scores start stored size member log_community log_first num_communities n_indexed capacity_0 length
    first tally
select_summaries 4x1x1 scores size num_communities n_indexed capacity_0 length first tally
attend_summaries 4x1x1 centroid centroid_scale channel_scale size mean_value capacity_0 value_0 length new_value
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first candidate candidate_score candidate_rest
    new_key
merge_splits 8x1x1
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 17x4x1 scores start stored size member log_community log_first num_communities n_indexed capacity_1 length
    first tally
select_summaries 4x1x1 scores size num_communities n_indexed capacity_1 length first tally
attend_summaries 4x1x1 centroid centroid_scale channel_scale size mean_value capacity_1 value_1 length new_value
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first candidate candidate_score candidate_rest
    new_key
merge_splits 8x1x1
plan_tokens 4x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 length first edge_neighbor edge_weight
assign_tokens 4x2x1 new_key channel_scale log_first capacity_0 length centroid centroid_scale log_mean mean_at start
    stored size num_communities n_indexed log_community label community_weight total_weight new_value log_value
    mean_value
plan_tokens 4x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 length first edge_neighbor edge_weight
assign_tokens 4x2x1 new_key channel_scale log_first capacity_0 length centroid centroid_scale log_mean mean_at start
    stored size num_communities n_indexed log_community label community_weight total_weight new_value log_value
    mean_value
fused length!""",
    )


def test_means_of_all_heads_are_attended_by_their_own():
    assert_expected_inline(
        launches(*decode_step("static", append="assign", graph_aggregation="layer", centroid_budget=4)),
        """\
fused cumulative_length_0 key_0!
fused cumulative_length_0!
fused value_0!
route 64x2x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores
retrieve 17x2x1 scores start stored size member log_community log_first num_communities n_indexed capacity_0 first
    tally
select_summaries 2x1x1 scores size num_communities n_indexed capacity_0 first tally
edges 64x2x1 key_0 n_indexed capacity_0 first candidate candidate_score candidate_rest new_key
attend_summaries 4x1x1 centroid centroid_scale channel_scale size mean_value capacity_0 value_0 new_value
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 first
merge_splits 8x1x1
fused cumulative_length_1!
fused key_1!
fused value_1!
route 64x2x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores
retrieve 17x2x1 scores start stored size member log_community log_first num_communities n_indexed capacity_1 first
    tally
select_summaries 2x1x1 scores size num_communities n_indexed capacity_1 first tally
edges 64x2x1 key_1 n_indexed capacity_1 first candidate candidate_score candidate_rest new_key
attend_summaries 4x1x1 centroid centroid_scale channel_scale size mean_value capacity_1 value_1 new_value
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 first
merge_splits 8x1x1
plan_tokens 2x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 first edge_neighbor edge_weight
assign_tokens 2x2x1 new_key channel_scale log_first capacity_0 centroid centroid_scale log_mean mean_at start stored
    size num_communities n_indexed log_community label community_weight total_weight new_value log_value mean_value
plan_tokens 2x2x1 label community_weight total_weight gamma num_communities n_indexed log_first log_community
    capacity_0 first edge_neighbor edge_weight
assign_tokens 2x2x1 new_key channel_scale log_first capacity_0 centroid centroid_scale log_mean mean_at start stored
    size num_communities n_indexed log_community label community_weight total_weight new_value log_value mean_value""",
    )


def test_a_step_of_several_tokens_launches_the_same():
    assert_expected_inline(
        launches(*decode_step("dynamic", SEVERAL)),
        """\
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_0 scores length key_0
    value_0
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_0 length first tally
sparse_attention 64x4x1 key_0 value_0 n_indexed capacity_0 length first
merge_splits 40x1x1
route 64x4x1 centroid centroid_scale channel_scale size start stored num_communities capacity_1 scores length key_1
    value_1
retrieve 16x4x1 scores start size member num_communities n_indexed capacity_1 length first tally
sparse_attention 64x4x1 key_1 value_1 n_indexed capacity_1 length first
merge_splits 40x1x1
fused length!""",
    )


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (ONE, {}),
        (SEVERAL, {}),
        (ONE, {"append": "assign"}),
        (ONE, {"graph": "attention"}),
        (ONE, {"hierarchy": "auto"}),
        (SEVERAL, {"hierarchy": "on"}),
    ],
    ids=["one", "several", "assign", "attention", "groups", "groups several"],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_nothing_is_copied_and_no_size_is_symbolic(cache, lengths, options):
    _, code = decode_step(cache, lengths, **options)
    call = code[code.index("def call(") :]
    assert "ops.ckv" not in call, "an operator has no kernel"
    assert not re.search(r"\.copy_\(|\.clone\(|\bclone\b", call)
    assert not re.search(r"\bs\d+\b", call), "a symbolic size"
    made = re.findall(r"empty_strided_cuda\((\([^)]*\)), \([^)]*\), torch\.(\w+)\)", call)
    assert made
    for size, dtype in made:
        assert size != "(1, )" or dtype == "int64", "a copy of state"  # the model keeps positions in int64
        assert size not in ("(2, 2, 128, 16)", "(2, 2, 48, 16)"), "a copy of K or V"


@pytest.mark.parametrize("options", [{}, {"append": "assign"}], ids=["attend", "assign"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_layers_share_their_kernels(cache, options):
    _, code = decode_step(cache, group_projections="off", **options)
    call = code[code.index("def call(") :]
    templates = re.findall(r"(triton_tem_\w+)\.run\(", call)
    once = (1 + 2 * ASSIGNED_AT_ONCE) * len(options)  # of all layers
    assert len(templates) == 4 * LAYERS + once
    assert len(set(templates)) == 4 + once


def test_an_append_without_a_route_behind_it_has_a_kernel():
    def call(key, value, new, value_new, length):
        torch.ops.ckv.append_kv(key, value, new, value_new, length)
        return new + 1

    def arguments():
        empty = functools.partial(torch.empty, device="cuda")
        return [*(empty(1, 2, n, 16) for n in (128, 128, 1, 1)), empty(1, dtype=torch.int32)]

    code = generated_code(call, arguments)
    assert "'arg_KEY_NEW'" in code
    assert len(re.findall(r"triton_tem_\w+\.run\(", code)) == 1


@pytest.mark.parametrize(("grouping", "kernels", "left"), [("off", 0, 15), ("inputs", 4, 5), ("all", 9, 0)])
def test_grouped_projections_read_the_weights_where_they_are(grouping, kernels, left):
    names, code = decode_step("dynamic", group_projections=grouping)
    call = code[code.index("def call(") :]
    weights = {f"arg{i}_1" for i, name in enumerate(names) if re.search("proj.*weight|lm_head", name)}
    launched = [set(re.findall(r"arg\d+_1", text)) & weights for text in re.findall(r"\.run\((.*), stream=", call)]
    launched = [taken for taken in launched if taken]
    assert len(launched) == kernels
    assert len(re.findall(r"extern_kernels\.\w+\(", call)) == left
    assert sum(map(len, launched)) == len(set().union(*launched)) == len(weights) - left
    assert max(int(size) for size in re.findall(r"empty_strided_cuda\(\(2, (\d+)\)", call)) <= 192 or not kernels
