"""Generation with communities that are not retrieved attended by their means (``centroid_budget``)."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

import ckv_compile
from ckv_compile import backend
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.testing import prompt, tiny_model

SMALL = {
    "min_context": 0, "workers": 0, "num_sink_tokens": 2, "recent_window": 4, "mean_size": 4, "block_size": 64,
    "append_block": 64, "refresh_interval": 64, "max_community_size": 8, "budget": 24,
}  # fmt: skip
ASSIGN, HEAD, LAYER = {"append": "assign"}, {"graph_aggregation": "head"}, {"graph_aggregation": "layer"}
KINDS = [
    ("dynamic", {}), ("static", ASSIGN), ("dynamic", {"graph": "attention", **HEAD}), ("static", {"graph": "attention"}),
    ("dynamic", {"graph": "mixed", "score": "softmax"}), ("dynamic", {**ASSIGN, **LAYER}), ("static", {"policy": "random"}),
]  # fmt: skip


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="communitykv", options={**SMALL, **options})


def generate(module, cache="dynamic", new_tokens=4):
    """What ``generate`` returns for two rows, one of them padded."""
    return module.generate(
        **prompt(tokens=70, padded=True), max_new_tokens=new_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **({"cache_implementation": "static"} if cache == "static" else {}),
    )  # fmt: skip


def logits(module, *args):
    """Of the decode steps, of which the first has the same input whatever the module attends to."""
    return torch.stack(generate(module, *args).logits[1:])


@pytest.mark.parametrize(("cache", "options"), KINDS, ids=str)
def test_a_context_within_the_budget_is_attended_exactly(interpreted, cache, options):
    model = tiny_model("llama")
    expected = generate(model).sequences
    module = compiled(model, budget=100, centroid_budget=40, **options)
    assert torch.equal(generate(module, cache).sequences, expected)
    report = ckv_compile.explain(module, show=False)
    assert report.sparse_steps == 3
    assert report.tokens_attended == report.tokens_in_context


@pytest.mark.parametrize(("cache", "options"), KINDS, ids=str)
def test_a_longer_one_is_attended_otherwise_and_repeatably(interpreted, cache, options):
    model = tiny_model("llama")
    module = compiled(model, centroid_budget=4, gamma=3.0, **options)
    found = logits(module, cache)
    assert torch.equal(logits(module, cache), found)
    report = ckv_compile.explain(module, show=False)
    assert report.sparse_steps == 6
    assert report.tokens_attended < report.tokens_in_context
    for budget in (20, 24):
        assert not torch.equal(logits(compiled(model, budget=budget, gamma=3.0, **options), cache)[0], found[0])


@pytest.mark.parametrize(
    ("cache", "options"),
    [("static", {}), ("dynamic", {**ASSIGN, **LAYER}), ("static", {"graph": "attention"})],
    ids=str,
)
def test_communities_of_one_token_stand_for_it(interpreted, cache, options):
    """All that is not retrieved is attended by means: what is lost is what 8 bits of the keys lose."""
    model = tiny_model("llama")

    def first_step(**changes):
        # The window is the new token alone: none of the others is attended both in the tail and as a community.
        single = {"mean_size": 1, "max_community_size": 1, "recent_window": 1, **options, **changes}
        return logits(compiled(model, **single), cache, 2)

    exact, means, without = first_step(budget=200), first_step(budget=69, centroid_budget=63), first_step(budget=6)
    assert not torch.equal(means, exact)
    print((means - exact).norm(), (without - exact).norm())
    assert (means - exact).norm() < 0.05 * (without - exact).norm()


@pytest.mark.parametrize(("cache", "options"), KINDS[:6], ids=str)
def test_mean_values_are_those_of_the_members(interpreted, cache, options):
    module = compiled(tiny_model("llama"), centroid_budget=4, **options)
    layers = generate(module, cache, 30).past_key_values.layers
    if cache == "static":
        sequence = REGISTRY.static_sequence(layers[0].keys)
    else:
        sequence = REGISTRY.sequence_of(REGISTRY.slab_at(layers[0].keys.data_ptr()))
    index, shape = sequence.index, sequence.shape
    indexed, log_first, largest = index.n_indexed.tolist(), index.log_first.tolist(), 0
    if options:
        assert indexed == [[99, 99]] * 2, "new tokens are assigned"
    for layer, row, graph in itertools.product(range(2), range(2), range(shape.graphs)):
        at, first = (layer, row, graph), log_first[layer][row]
        heads = range(shape.kv_heads) if shape.graphs == 1 else [graph * shape.kv_heads // shape.graphs]
        joined = index.log_community[at][: indexed[layer][row] - first].tolist() if options else []
        for community in range(int(index.num_communities[at])):
            begin, stored = int(index.start[at][community]), int(index.stored[at][community])
            members = index.member[at][begin : begin + stored].tolist()
            members += [first + entry for entry, label in enumerate(joined) if label == community]
            assert len(members) == index.size[at][community]
            if members:
                want = torch.cat([layers[layer].values[row, head, members].mean(0) for head in heads])
                torch.testing.assert_close(index.mean_value[at][community], want)
            largest = max(largest, len(members))
    assert largest > 2


def test_several_new_tokens_at_a_time_are_exact_and_the_report_says_why(interpreted):
    model = tiny_model("llama")
    module = compiled(model, centroid_budget=4)
    ids, cache = prompt(tokens=60)["input_ids"], DynamicCache(config=model.config)
    with torch.no_grad():
        module(ids[:, :56], past_key_values=cache, use_cache=True)
        got = module(ids[:, 56:], past_key_values=cache, use_cache=True).logits
        want = model(ids).logits[:, 56:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    report = str(ckv_compile.explain(module, show=False))
    assert "several new tokens at a time do not attend to means of communities (centroid_budget)" in report


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ASSIGN], ids=str)
def test_inductor_computes_the_same_and_copies_no_state(monkeypatch, options):
    model = tiny_model("llama")
    counters.clear()
    found = logits(compiled(model, centroid_budget=4, gamma=3.0, **options))
    missed = {key: count for key, count in counters["inductor"].items() if "missed" in key and "bytes" in key}
    assert not any(missed.values()), missed
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    want = logits(compiled(model, centroid_budget=4, gamma=3.0, **options))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
