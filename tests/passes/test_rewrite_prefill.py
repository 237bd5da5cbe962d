"""Prefill graphs after rewriting: a first call, a later turn, a static cache; what they compute is compared with decode.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckv_compile import backend
from ckv_compile.config import CommunityConfig
from ckv_compile.passes import graph_edit
from ckv_compile.passes.match_attention import Cache, find_sites
from ckv_compile.testing import (
    FULL_ATTENTION_FAMILIES,
    Captured,
    RewrittenCache,
    capture_call,
    captured_turns,
    prompt,
    rewritten,
    rewritten_text,
    tiny_model,
)

FIRST, LATER = 0, 2  # numbers of the prefills among the calls of ``captured_turns``
OPTIONS = {"min_context": 0, "workers": 0, "num_sink_tokens": 1, "recent_window": 2, "budget": 64}


def turns(family: str, cache: str) -> tuple[Captured, ...]:
    """Half of the families with left padding: after rewriting it is state and shows no more."""
    sizes = {} if family == "llama" else {"num_hidden_layers": 1}
    return captured_turns(family, cache, family in ("llama", "qwen3"), **sizes)


def prefill_text(cache: str, turn: int, graph: str) -> str:
    """The same text for every layer of every family: they differ outside of attention only."""
    texts = {}
    for family in FULL_ATTENTION_FAMILIES:
        result = rewritten(turns(family, cache)[turn], CommunityConfig(graph=graph, **OPTIONS))
        for layer in range(len(result.sites)):
            texts.setdefault(rewritten_text(result, layer), []).append(f"layer {layer} of {family}")
    assert len(texts) == 1, f"these differ: {'; '.join(', '.join(names) for names in texts.values())}"
    return texts.popitem()[0]


# ---------------------------------------------------------------------- what the graph is


def test_first_prefill_with_keys():
    assert_expected_inline(
        prefill_text("dynamic", FIRST, "keys"),
        """\
prefill, empty cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_ticket int64 [2]
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
submit_partition(ckv_ticket, ckv_key_L, ckv_length, num_new=40, neighbor=None, weight=None, layer=L)
prefill_attention(query, ckv_key_L, ckv_value_L, ckv_length, ckv_first, ckv_ticket, scale=0.25,
    sink_logits=None) -> model""",
    )


def test_first_prefill_with_attention():
    assert_expected_inline(
        prefill_text("dynamic", FIRST, "attention"),
        """\
prefill, empty cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_ticket int64 [2]
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
topk_prefill(query, ckv_key_L, ckv_value_L, ckv_length, ckv_first, ckv_ticket, scale=0.25, num_sink_tokens=1,
    kappa=8, sink_logits=None, topk='fast') -> [0] -> model, [1] -> submit_partition, [2] -> submit_partition
submit_partition(ckv_ticket, ckv_key_L, ckv_length, num_new=40, topk_prefill[1], topk_prefill[2], layer=L)""",
    )


def test_later_prefill_with_keys():
    assert_expected_inline(
        prefill_text("dynamic", LATER, "keys"),
        """\
prefill, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_ticket int64 [2]
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
submit_partition(ckv_ticket, ckv_key_L, ckv_length, query.size(2), neighbor=None, weight=None, layer=L)
prefill_attention(query, ckv_key_L, ckv_value_L, ckv_length, ckv_first, ckv_ticket, scale=0.25,
    sink_logits=None) -> model""",
    )


def test_later_prefill_with_attention():
    assert_expected_inline(
        prefill_text("dynamic", LATER, "attention"),
        """\
prefill, dynamic cache; past K and V are not inputs, K and V are not outputs
ckv_key_L float32 [2, 2, 128, 16]; ckv_value_L float32 [2, 2, 128, 16]; ckv_length int32 [1]; ckv_first int32
    [2]; ckv_ticket int64 [2]
append_kv(ckv_key_L, ckv_value_L, key_new, value_new, ckv_length)
topk_prefill(query, ckv_key_L, ckv_value_L, ckv_length, ckv_first, ckv_ticket, scale=0.25, num_sink_tokens=1,
    kappa=8, sink_logits=None, topk='fast') -> [0] -> model, [1] -> submit_partition, [2] -> submit_partition
submit_partition(ckv_ticket, ckv_key_L, ckv_length, query.size(2), topk_prefill[1], topk_prefill[2], layer=L)""",
    )


def test_static_prefill_with_keys():
    assert_expected_inline(
        prefill_text("static", FIRST, "keys"),
        """\
prefill, static cache; past K and V are not inputs, K and V are outputs
ckv_length int32 [1]; ckv_first int32 [2]; ckv_ticket int64 [2]
submit_partition(ckv_ticket, key_cache, ckv_length, num_new=40, neighbor=None, weight=None, layer=L)
prefill_attention(query, key_cache, value_cache, ckv_length, ckv_first, ckv_ticket, scale=0.25,
    sink_logits=None) -> model""",
    )


def test_static_prefill_with_attention():
    assert_expected_inline(
        prefill_text("static", FIRST, "attention"),
        """\
prefill, static cache; past K and V are not inputs, K and V are outputs
ckv_length int32 [1]; ckv_first int32 [2]; ckv_ticket int64 [2]
topk_prefill(query, key_cache, value_cache, ckv_length, ckv_first, ckv_ticket, scale=0.25, num_sink_tokens=1,
    kappa=8, sink_logits=None, topk='fast') -> [0] -> model, [1] -> submit_partition, [2] -> submit_partition
submit_partition(ckv_ticket, key_cache, ckv_length, num_new=40, topk_prefill[1], topk_prefill[2], layer=L)""",
    )


@pytest.mark.parametrize("topk", ["fast", "exact"])
def test_the_selection_is_that_of_the_options(topk):
    graph = rewritten(
        turns("llama", "dynamic")[FIRST], CommunityConfig(graph="attention", topk=topk, **OPTIONS)
    ).gm.graph
    found = [node.args[-1] for node in graph.nodes if node.target is torch.ops.ckv.topk_prefill.default]
    assert found == [topk] * len(found)
    assert found


def test_a_later_turn_on_a_static_cache_differs_in_the_number_of_tokens_only():
    first, later = (prefill_text("static", turn, "attention") for turn in (FIRST, LATER))
    changed = {
        "past K and V are not inputs": "past K and V are inputs",
        "K and V are outputs": "K and V are not outputs",
    }
    for old, new in {**changed, "num_new=40": "query.size(2)"}.items():
        assert old in first
        first = first.replace(old, new)
    assert later == first


def counts(gm: torch.fx.GraphModule) -> dict[str, int]:
    found = {"sdpa": 0, "joined": 0, "repeats": 0, "masks": 0, "attention": 0, "append_kv": 0, "submit_partition": 0}
    ckv = torch.ops.ckv
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        found["sdpa"] += node.target is F.scaled_dot_product_attention
        found["joined"] += node.target is torch.cat and value.dim() == 4 and node.kwargs.get("dim") == -2
        found["repeats"] += isinstance(value, Tensor) and value.dim() == 5
        found["masks"] += node.op != "placeholder" and isinstance(value, Tensor) and value.dtype == torch.bool
        found["attention"] += node.target in (ckv.prefill_attention.default, ckv.topk_prefill.default)
        found["append_kv"] += node.target is ckv.append_kv.default
        found["submit_partition"] += node.target is ckv.submit_partition.default
    return found


@pytest.mark.parametrize("graph", ["keys", "attention", "mixed"])
@pytest.mark.parametrize("turn", [FIRST, LATER], ids=["first", "later"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_nothing_of_the_old_attention_is_left(cache, turn, graph):
    captured = turns("llama", cache)[turn]
    before = counts(captured.gm)
    assert before["sdpa"] == 2
    assert before["masks"] > 0 or (cache, turn) == ("static", FIRST)
    assert before["joined"] == (4 if cache == "dynamic" else 0)
    after = counts(rewritten(captured, CommunityConfig(graph=graph, **OPTIONS)).gm)
    assert (after.pop("attention"), after.pop("submit_partition")) == (2, 2)
    assert after.pop("append_kv") == (2 if cache == "dynamic" else 0)
    assert not any(after.values()), after


@pytest.mark.parametrize("graph", ["keys", "attention", "mixed"])
def test_control_policies_ask_for_no_edges(graph):
    config = CommunityConfig(graph=graph, policy="streaming", **OPTIONS)
    gm = rewritten(turns("llama", "dynamic")[FIRST], config).gm
    assert not any(node.target is torch.ops.ckv.topk_prefill.default for node in gm.graph.nodes)


def test_the_ticket_orders_the_layers():
    gm = rewritten(turns("llama", "dynamic")[FIRST], CommunityConfig(graph="attention", **OPTIONS)).gm
    (ticket,) = [node for node in gm.graph.nodes if node.name == "ckv_ticket"]
    assert [user.target._opname for user in ticket.users] == ["topk_prefill", "submit_partition"] * 2


# ---------------------------------------------------------------------- what becomes of inputs and outputs


@pytest.mark.parametrize("turn", [FIRST, LATER], ids=["first", "later"])
def test_keys_and_values_leave_the_graph_of_a_dynamic_cache(turn):
    captured = turns("llama", "dynamic")[turn]
    plan = rewritten(captured, CommunityConfig(**OPTIONS)).plan
    outputs, inputs = graph_edit.output_node(captured.gm.graph).args[0], graph_edit.placeholders(captured.gm.graph)
    assert [outputs[i].name for i in plan.kept_outputs] == ["logits"]
    assert sorted([*plan.kept_outputs, *plan.kv_outputs]) == list(range(plan.num_outputs)) == list(range(5))
    assert len(plan.past) == (4 if turn == LATER else 0)
    assert not set(plan.past) & set(plan.keep)
    assert plan.padding is not None
    assert (plan.batch(captured.inputs), plan.num_new(captured.inputs)) == (2, 40 if turn == FIRST else 5)
    assert plan.cache is (Cache.EMPTY if turn == FIRST else Cache.DYNAMIC)
    assert [inputs[i].name.split("layers_")[1] for i in plan.past] == (
        ["0_keys", "0_values", "1_keys", "1_values"] if turn == LATER else []
    )


@pytest.mark.parametrize("turn", [FIRST, LATER], ids=["first", "later"])
def test_a_static_cache_keeps_its_outputs_and_its_writes(turn):
    captured = turns("llama", "static")[turn]
    result = rewritten(captured, CommunityConfig(**OPTIONS))
    plan = result.plan
    assert plan.kept_outputs == list(range(plan.num_outputs))
    assert (plan.past, plan.kv_outputs, plan.static_capacity([])) == ([], [], 48)
    assert plan.static_in_outputs is (turn == FIRST)
    assert sum(node.target == "index_copy_" for node in result.gm.graph.nodes) == 4
    where = (
        graph_edit.output_node(result.gm.graph).args[0] if turn == FIRST else graph_edit.placeholders(captured.gm.graph)
    )
    keys = [where[i] for i in plan.static_keys]
    assert [node.meta["example_value"].shape for node in keys] == [(2, 2, 48, 16)] * 2
    assert int(captured.inputs[plan.static_length]) == (0 if turn == FIRST else 41)


# ---------------------------------------------------------------------- hand-written layers


class Prefill(nn.Module):
    """One layer that returns K and V of a first call like a DynamicCache."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def finish(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(2)

    def split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(2, (4, 16)).transpose(1, 2) for part in hidden.split(64, -1))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.split(hidden)
        keys, values = (torch.cat([torch.tensor([]), new], dim=-2) for new in (key, value))
        return self.finish(self.attend(query, keys, values)), keys, values


def prefill(**methods) -> nn.Module:
    return type("Variant", (Prefill,), methods)()


def assert_runs_right(captured: Captured) -> torch.fx.GraphModule:
    config = CommunityConfig(graph="attention", **OPTIONS)
    result = rewritten(captured, config)
    cache = RewrittenCache(config, result.plan, [0] * result.plan.batch(captured.inputs))
    expected = list(captured.gm.forward(*copy.deepcopy(captured.inputs)))
    outputs = dict(zip(result.plan.kept_outputs, cache.run(result, captured.inputs), strict=True))
    outputs.update(zip(result.plan.kv_outputs, cache.slab.views(cache.sequence.length), strict=True))
    torch.testing.assert_close([outputs[i] for i in range(result.plan.num_outputs)], expected, rtol=1e-4, atol=1e-4)
    return result.gm


@pytest.mark.parametrize("dynamic", [False, True], ids=["static sizes", "dynamic sizes"])
def test_an_output_that_was_contiguous_stays_so(dynamic):
    """The math kernel returns [batch, heads, tokens, dim] in this order in memory; the operators do not."""

    def attend(self, query, key, value):
        with sdpa_kernel(SDPBackend.MATH):
            return Prefill.attend(self, query, key, value)

    def finish(self, out):
        return out.view(out.shape[0], 4 * out.shape[2], 16)

    hidden = torch.randn(2, 9, 192)
    if dynamic:
        torch._dynamo.mark_dynamic(hidden, 1)
    captured = capture_call(prefill(attend=attend, finish=finish), hidden)
    (site,), _ = find_sites(captured.gm)
    if not site.node.meta["example_value"].is_contiguous():
        pytest.skip("fake tensors do not know the kernel that was asked for")
    assert "contiguous" in {node.target for node in assert_runs_right(captured).graph.nodes}


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_symbolic_sizes_are_read_from_the_inputs(dims):
    hidden = torch.randn(2, 9, 192)
    for dim in dims:
        torch._dynamo.mark_dynamic(hidden, dim)
    captured = capture_call(Prefill(), hidden)
    assert_runs_right(captured)
    plan = rewritten(captured, CommunityConfig(**OPTIONS)).plan
    sizes = {"s_rows": 5 if 0 in dims else 2, "s_tokens": 7 if 1 in dims else 9}
    other = [torch.randn(*sizes.values(), 192) if isinstance(x, Tensor) else x for x in captured.inputs]
    symbols = [node.meta["example_value"] for node in graph_edit.placeholders(captured.gm.graph)]
    shape = next(value.shape for value in symbols if isinstance(value, Tensor))
    size_of = dict(zip(map(str, shape), (*sizes.values(), 192), strict=True))
    other = [x if isinstance(x, Tensor) else size_of[str(s)] for x, s in zip(other, symbols, strict=True)]
    assert (plan.batch(other), plan.num_new(other)) == tuple(sizes.values())


def test_a_batch_size_that_no_input_shows_stays_dense():
    def split(self, hidden):
        return Prefill.split(self, hidden.view(-1, 9, 192))

    hidden = torch.randn(2 * 9, 192)
    torch._dynamo.mark_dynamic(hidden, 0)
    with pytest.raises(ValueError, match="no input of the graph shows the batch size"):
        rewritten(capture_call(prefill(split=split), hidden), CommunityConfig(**OPTIONS))


def test_a_call_without_a_cache_stays_dense():
    gm = capture_call(tiny_model("llama", num_hidden_layers=1), **prompt(), use_cache=False).gm
    with torch.no_grad():
        reason = backend._why_not(gm, *find_sites(gm))
    assert reason == "no cache: the keys and values of this call are not kept"


def test_layers_with_differing_numbers_of_new_tokens_stay_dense():
    class Pruned(Prefill):
        def forward(self, hidden):
            out, *kept = Prefill.forward(self, hidden)
            return Prefill.forward(self, out.repeat(1, 1, 3)[:, -4:]), kept

    with pytest.raises(ValueError, match="the layers differ in the number of new tokens: 4, 9"):
        rewritten(capture_call(Pruned(), torch.randn(2, 9, 192)), CommunityConfig(**OPTIONS))


def test_layers_with_differing_heads_stay_dense():
    class Narrow(Prefill):
        def split(self, hidden):
            return tuple(part.unflatten(2, (2, 32)).transpose(1, 2) for part in hidden.split(64, -1))

    class Both(Prefill):
        def forward(self, hidden):
            out, *kept = Prefill.forward(self, hidden)
            return Narrow().forward(out.repeat(1, 1, 3)), kept

    with pytest.raises(ValueError, match="the layers differ in num_query_heads: 2, 4"):
        rewritten(capture_call(Both(), torch.randn(2, 9, 192)), CommunityConfig(**OPTIONS))


def test_a_cache_of_one_layer_only_stays_dense():
    class Both(Prefill):
        def forward(self, hidden):
            out, *kept = Prefill.forward(self, hidden)
            query, key, value = self.split(out.repeat(1, 1, 3))
            return self.finish(self.attend(query, key, value)), kept

    with pytest.raises(ValueError, match="the layers differ in cache"):
        rewritten(capture_call(Both(), torch.randn(2, 9, 192)), CommunityConfig(**OPTIONS))


def test_rewriting_again_gives_the_same_plan():
    captured = turns("llama", "dynamic")[LATER]
    plans = [dataclasses.asdict(rewritten(captured, CommunityConfig(**OPTIONS)).plan) for _ in range(2)]
    for plan in plans:
        del plan["batch"], plan["num_new"]
    assert plans[0] == plans[1]
