"""Options: defaults, and an error for everything that is unknown or impossible."""

import dataclasses

import pytest
import torch

from ckv_compile.config import CommunityConfig
from ckv_compile.testing import prompt, tiny_model


def test_defaults_follow_from_one_another():
    config = CommunityConfig()
    assert (config.graph, config.mean_size, config.min_context, config.budget) == ("keys", 8, 4096, 4096)
    assert CommunityConfig(graph="attention").mean_size == 16
    assert CommunityConfig(budget=256).min_context == 256
    assert config.workers >= 1


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunityConfig().budget = 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 8}, ValueError, r"budget.*at least num_sink_tokens \+ recent_window \+ 1 \(75\), got 8"),
        ({"budget": 256.0}, TypeError, r"budget.*must be an integer, got 256.0"),
        ({"budget": 1 << 40}, ValueError, r"budget.*at most 1048576, got 1099511627776.*min_context"),
        ({"budget": True}, TypeError, r"budget.*must be an integer, got True"),
        ({"graph": "values"}, ValueError, r"graph.*'keys', 'attention', 'mixed', got 'values'"),
        ({"graph_aggregation": "head"}, ValueError, r"graph_aggregation.*needs graph='attention', got graph='keys'"),
        ({"lam": 1.5}, ValueError, r"lam.*between 0.0 and 1.0, got 1.5"),
        ({"kappa": 0}, ValueError, r"kappa.*at least 1, got 0"),
        ({"append_block": 4096}, ValueError, r"append_block.*at most block_size \(2048\), got 4096"),
        ({"strict": 1}, TypeError, r"strict.*True or False, got 1"),
        ({"workers": -1}, ValueError, r"workers.*at least 0, got -1"),
        ({"centroid_budget": -1}, ValueError, r"centroid_budget.*at least 0, got -1"),
        ({"centroid_budget": 6.5}, TypeError, r"centroid_budget.*must be an integer, got 6.5"),
        (
            {"centroid_budget": 64, "budget": 138},
            ValueError,
            r"budget.*num_sink_tokens \+ recent_window \+ 1 \+ centroid_budget \(139\), got 138; raise options\['budget'\]",
        ),
        (
            {"hierarchy": "on", "score": "softmax"},
            ValueError,
            r"'hierarchy'\] = 'on' needs score='max' and policy='communities', got score='softmax' and policy='communities'",
        ),
        (
            {"score": "relative", "append": "assign"},
            ValueError,
            r"'score'\] = 'relative' needs graph='keys', append='attend' and centroid_budget=0, .* got .*append='assign'",
        ),
        ({"hierarchy": True}, ValueError, r"'hierarchy'\] must be one of 'auto', 'on', 'off', got True"),
        ({"buget": 256}, ValueError, r"unknown option 'buget'.*did you mean 'budget'"),
        ({"partition_timeout": -1}, ValueError, r"partition_timeout.*got -1"),
    ],
)
def test_bad_options_name_the_option_what_it_needs_and_what_it_got(options, error, message):
    with pytest.raises(error, match=message):
        CommunityConfig.from_options(options)


def test_inductors_own_options_pass_through():
    config, inductors = CommunityConfig.from_options({"budget": 512, "max_autotune": True, "triton.cudagraphs": False})
    assert config.budget == 512
    assert inductors == {"max_autotune": True, "triton.cudagraphs": False}


def test_a_bad_option_reaches_the_user_when_the_model_is_compiled():
    module = torch.compile(tiny_model("llama"), backend="communitykv", options={"budget": 8})
    with pytest.raises(Exception, match=r"options\['budget'\] must be at least .* got 8"):
        module.generate(**prompt(), max_new_tokens=2)


def test_every_option_is_part_of_the_cache_key():
    changed = {
        "graph": "mixed", "mean_size": 4, "block_size": 1024, "append_block": 128, "kappa": 4, "lam": 0.25, "gamma": 1.0,
        "max_community_size": 32, "score": "softmax", "prune": 0.0, "policy": "random", "num_sink_tokens": 4,
        "recent_window": 32, "budget": 512, "min_context": 0, "refresh_interval": 64,
            "repair_interval": 32, "graph_aggregation": "layer",
        "topk": "exact", "append": "assign", "leiden_engine": "igraph", "workers": 7, "partition_timeout": 1.0, "seed": 3,
        "cuda_graphs": False, "deferred_stop": False, "group_projections": "inputs", "deterministic": True,
        "strict": True, "centroid_budget": 64, "hierarchy": "auto",
    }  # fmt: skip
    assert set(changed) == set(CommunityConfig.option_names())
    digests = {CommunityConfig(**{name: value}).digest() for name, value in changed.items()}
    assert len(digests | {CommunityConfig().digest()}) == len(changed) + 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 512),
        ({"budget": 512}, 256),
        ({"budget": 80}, 40),
        ({"block_size": 256}, 256),
        ({"budget": 512, "append_block": 512}, 512),
    ],
)
def test_blocks_of_generated_tokens_leave_room_in_the_budget(options, expected):
    assert CommunityConfig(**options).append_block == expected
