"""Options at the ends of what they may be: eager's tokens wherever everything fits the budget."""

import pytest
import torch

import ckv_compile
from ckv_compile.testing import prompt, tiny_model

HUGE = 1 << 40
INFINITE = float("inf")


@pytest.fixture(scope="module")
def expected():
    return tiny_model("llama").generate(**prompt(tokens=150, batch=1), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize(
    "options",
    [
        {"refresh_interval": HUGE, "graph": "attention"},
        {"repair_interval": HUGE, "graph": "attention"},
        {"refresh_interval": 1, "repair_interval": 0, "graph": "mixed"},
        {"partition_timeout": INFINITE, "workers": 1},
        {"partition_timeout": 1e300, "workers": 1},
        {"workers": 10_000},
        {"kappa": 1000},
        {"kappa": 1000, "graph": "attention"},
        {"kappa": 64, "graph": "mixed"},
        {"kappa": 1, "append": "assign"},
        {"mean_size": HUGE},
        {"mean_size": 1},
        {"mean_size": 1000, "max_community_size": 10},
        {"max_community_size": 1},
        {"max_community_size": HUGE},
        {"block_size": HUGE},
        {"block_size": 64, "append_block": 16},
        {"num_sink_tokens": 1000, "budget": 2000},
        {"num_sink_tokens": 0, "recent_window": 1},
        {"recent_window": 1 << 19, "budget": 1 << 20},
        {"budget": 1 << 20, "centroid_budget": 1 << 19},
        {"gamma": 1e-300},
        {"gamma": 1e300},
        {"gamma": INFINITE},
        {"prune": 1.0, "graph": "attention"},
        {"lam": 0.0, "graph": "attention"},
        {"lam": 1.0, "graph": "attention", "graph_aggregation": "layer"},
        {"seed": HUGE},
        {"min_context": HUGE},
    ],
    ids=str,
)
def test_extreme_options_give_eagers_tokens(interpreted, expected, options):
    module = torch.compile(tiny_model("llama"), backend="communitykv", options={"min_context": 0, **options})
    found = module.generate(**prompt(tokens=150, batch=1), max_new_tokens=12, do_sample=False)
    assert torch.equal(found, expected)
    assert not ckv_compile.explain(module, show=False).fallbacks
