"""Which graphs with several new tokens are decode steps."""

import dataclasses

import pytest

from ckv_compile.config import CommunityConfig
from ckv_compile.passes.match_attention import find_sites
from ckv_compile.passes.several_queries import step_queries
from ckv_compile.testing import captured_turns


def sites(turn, lengths=(5, 5), cache="dynamic"):
    return find_sites(captured_turns("llama", cache, False, lengths)[turn].gm)[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_few_tokens_on_a_cache_that_holds_some_are_a_step(cache):
    assert step_queries(sites(1, cache=cache), CommunityConfig()) == (5, None)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_first_call_and_one_of_more_tokens_are_prefills(cache):
    assert step_queries(sites(0, cache=cache), CommunityConfig()) == (None, None)
    assert step_queries(sites(1, (9, 9), cache), CommunityConfig()) == (None, None)


@pytest.mark.parametrize("options", [{"graph": "attention"}, {"graph": "mixed"}, {"append": "assign"}], ids=str)
def test_tokens_that_are_assigned_are_exact(options):
    queries, reason = step_queries(sites(1), CommunityConfig(**options))
    assert queries is None
    assert reason == "several new tokens at a time are not assigned to communities"


def test_tokens_that_attend_to_means_of_communities_are_exact():
    queries, reason = step_queries(sites(1), CommunityConfig(centroid_budget=4))
    assert queries is None
    assert reason == "several new tokens at a time do not attend to means of communities (centroid_budget)"


@pytest.mark.parametrize(("heads", "queries"), [(12, 5), (13, None)])
def test_more_rows_than_the_kernels_hold_are_exact(heads, queries):
    wide = [dataclasses.replace(site, num_query_heads=heads, num_kv_heads=1) for site in sites(1)]
    found, reason = step_queries(wide, CommunityConfig())
    assert found == queries
    assert (reason is None) == (queries is not None)
