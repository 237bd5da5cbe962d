"""Generation where groups of communities are scored first (``hierarchy``)."""

import pytest
import torch

import ckv_compile
from ckv_compile.config import CommunityConfig, coarse_from
from ckv_compile.testing import prompt, tiny_model

SMALL = {
    "min_context": 0, "workers": 0, "num_sink_tokens": 2, "recent_window": 4, "mean_size": 4, "block_size": 64,
    "append_block": 16, "refresh_interval": 64, "max_community_size": 8, "budget": 24, "deterministic": True,
}  # fmt: skip
LONG, NEW = 300, 5
KINDS = [("dynamic", {}), ("static", {"append": "assign"}), ("dynamic", {"graph": "attention"})]


def generated(cache, tokens, **options):
    """(logits of the decode steps, report, the last call's index) of a module compiled anew."""
    torch._dynamo.reset()
    module = torch.compile(tiny_model("llama"), backend="communitykv", options={**SMALL, **options})
    found = module.generate(
        **prompt(tokens=tokens, padded=True), max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **({"cache_implementation": "static"} if cache == "static" else {}),
    )  # fmt: skip
    return torch.stack(found.logits[1:]), ckv_compile.explain(module, show=False)


@pytest.fixture
def listed(monkeypatch):
    """How many groups each call of ``route_coarse`` listed."""
    from ckv_compile.reference import route_coarse as module

    original, counts = module.route_coarse, []

    def watched(**arguments):
        visit, count = original(**arguments)
        counts.append(count.tolist())
        return visit, count

    monkeypatch.setattr(module, "route_coarse", watched)
    return counts


@pytest.mark.parametrize(("cache", "options"), KINDS, ids=str)
def test_short_contexts_give_the_bits_that_they_gave(interpreted, listed, cache, options):
    off, _ = generated(cache, LONG, hierarchy="off", **options)
    assert listed == []
    auto, _ = generated(cache, LONG, hierarchy="auto", **options)
    assert bool(listed) == ("graph" not in options), "other graphs have groups on request only"
    assert all(count == -1 for step in listed for row in step for count in row)
    assert torch.equal(off, auto)


@pytest.mark.parametrize(("cache", "options"), KINDS, ids=str)
def test_long_contexts_are_attended_within_the_budget_and_repeatably(interpreted, listed, cache, options):
    config = CommunityConfig(hierarchy="on", **{**SMALL, **options})
    assert 4 * coarse_from(config) < LONG - 70
    once, report = generated(cache, LONG, hierarchy="on", **options)
    assert report.sparse_steps == NEW - 1
    assert any(count > 0 for step in listed for row in step for count in row)
    assert report.tokens_attended < report.tokens_in_context / 4
    again, _ = generated(cache, LONG, hierarchy="on", **options)
    assert torch.equal(once, again)
