"""Families of decoder models beyond those of ``tiny_model``; ``python -m bench.families`` runs all there are."""

import json

import pytest

from bench import families
from bench.results_file import RESULTS, version_of


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe", "qwen3_next"])
def test_tiny_models_of_other_families_equal_eager(interpreted, family):
    """Joined projections, a mixture of experts, layers without attention beside gated attention."""
    outcome = families.sweep_family(family, paddings=(True,))
    assert outcome.result == "matched", outcome


def test_the_kept_table_has_every_family_and_none_is_wrong():
    table = json.loads(max(RESULTS.glob("families-*.json")).read_text())
    results = {row["family"]: row["result"] for row in table["rows"]}
    assert not [family for family, result in results.items() if result in ("wrong", "crashed")]
    assert all(row["reason"] for row in table["rows"] if row["result"] != "matched")
    if table["versions"]["transformers"] == version_of("transformers"):
        assert set(results) == set(families.families())
