"""The ablations: experiments are what they say, both uses of texts are measured, and figures are those of the rows."""

import json

import numpy as np
import pytest
import torch
from rich.progress import Progress

from bench import ablation_arms, ablations, quality
from ckv_compile import backend
from ckv_compile.community.components import strongest_components
from ckv_compile.community.graph import attention_graph
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig
from ckv_compile.testing import TINY_VOCAB, tiny_model

ARMS = ablation_arms.arms_of(4096, 256)
CONFIG = CommunityConfig(graph="attention", workers=0, deterministic=True)
COMMON = {"config": CONFIG, "memory": ResolutionMemory(), "layer": 0, "graph": 0}


def lists(heads=3, n=240, kappa=6, seed=0, first=0):
    """Causal lists of distinct positions from ``first`` on, each with itself in it, and falling probabilities."""
    rng = np.random.default_rng(seed)
    ids = np.full((heads, n, kappa), -1, np.int32)
    for head, token in np.ndindex(heads, n):
        earlier = np.arange(first, token)
        near = np.minimum(rng.geometric(0.05, 3 * kappa), max(1, len(earlier)))
        own = [token, *dict.fromkeys((token - near)[near <= len(earlier)])][:kappa]
        if token >= first:
            ids[head, token, : len(own)] = own
    alphas = np.sort(rng.dirichlet(np.ones(kappa + 1), (heads, n))[..., :kappa])[..., ::-1]
    return ids, np.where(ids >= 0, alphas, 0.0).astype(np.float32)


def small_prompts(roles=("choosing", "held_out")):
    model = tiny_model("llama", max_position_embeddings=2 * ablations.SMALL.total)
    ids = torch.randint(1, TINY_VOCAB, (len(roles), ablations.SMALL.total), generator=torch.Generator().manual_seed(3))
    origins = [(role, "python", 0) for role in roles]
    return model, ablations.read_prompts(model, ids.tolist(), origins, ablations.SMALL, lambda: None)


def measured(arms, layers=(0, 1), predicts=True):
    model, prompts = small_prompts()
    with Progress(disable=True) as progress:
        return ablations.measure(model, prompts, arms, list(layers), predicts, {"recent_window": 16}, progress)


def arms(*names):
    every = ablation_arms.arms_of(ablations.SMALL.context, ablations.SMALL.budget)
    return [arm for arm in every if (arm.family, arm.factor) in names]


# ---------------------------------------------------------------------- arms


def test_each_factor_has_one_default_and_it_is_that_of_the_backend():
    for family, factor in {(arm.family, arm.factor) for arm in ARMS}:
        own = [arm for arm in ARMS if (arm.family, arm.factor) == (family, factor)]
        (default,) = (arm for arm in own if arm.default)
        assert default.options == {}
        assert len({arm.value for arm in own}) == len(own) > 1
        if factor in CommunityConfig.option_names():
            config = ablations.config_of(default, 0, 256, {})
            value = getattr(config, factor)
            assert default.value == ("searched" if value is None else str(value)), f"{family}, {factor}"
    for family, options in ablations.FAMILIES.items():
        assert CommunityConfig(graph=family).mean_size == options["mean_size"]


def test_a_run_has_every_arm_at_the_budget():
    config = [ablations.config_of(arm, layer, 256, {}) for arm in ARMS for layer in (0, 1)]
    assert {one.budget for one in config} == {256}
    assert [arm.name for arm in ARMS if arm.default and arm.options] == []


# ---------------------------------------------------------------------- experiments


def test_self_ties_are_the_diagonal_of_equation_4():
    ids, alphas = lists()
    n, first, lam = ids.shape[1], 10, 0.25
    dense = np.zeros((len(ids), n, n))
    for head, token, slot in np.ndindex(*ids.shape):
        if ids[head, token, slot] >= first:
            dense[head, token, ids[head, token, slot]] = alphas[head, token, slot]
    co_attention = np.einsum("hmi,hmi->i", dense, dense)
    direct = np.einsum("hii->i", dense)
    expected = lam * direct + (1 - lam) * co_attention
    np.testing.assert_allclose(ablation_arms.self_ties(ids, alphas, lam, first), expected[first:], rtol=1e-5)


def test_self_ties_add_to_strengths_alone():
    ids, alphas = lists(first=10)
    found = ablation_arms.with_self_ties(ids, alphas, 10, **COMMON)
    plain = attention_graph(ids, alphas, lam=CONFIG.lam, prune=CONFIG.prune, first=10)
    np.testing.assert_array_equal(found.graph.weights, plain.weights)
    assert (found.graph.strength > plain.strength).all()
    assert found.weight.sum() == pytest.approx(found.graph.strength.sum())


def test_leading_positions_shape_the_partition_and_are_in_no_community():
    ids, alphas = lists()
    first = CONFIG.num_sink_tokens
    ids[:, first:, -1], alphas[:, first:, -1] = 0, 0.5  # a hub
    found = ablation_arms.with_sinks(ids, alphas, first, **COMMON)
    without = ablation_arms.relabelled(found.labels, found.graph, found.gamma, CONFIG)
    assert (found.labels[:first] == -1).all()
    assert (found.labels[first:] >= 0).all()
    assert found.graph.num_nodes == ids.shape[1] - first
    assert found.size.sum() == ids.shape[1] - first
    np.testing.assert_array_equal(without.labels, found.labels)
    assert found.weight.sum() == pytest.approx(found.graph.strength.sum())


def test_components_are_those_that_the_strongest_edges_leave():
    ids, alphas = lists(first=10)
    found = ablation_arms.components(ids, alphas, 10, **COMMON)
    graph, n = found.graph, ids.shape[1]
    most = int(np.diff(graph.indptr).max())
    near, weight = np.full((n, most), -1, np.int32), np.zeros((n, most), np.float32)
    for node in range(graph.num_nodes):
        entries = slice(graph.indptr[node], graph.indptr[node + 1])
        count = graph.indptr[node + 1] - graph.indptr[node]
        near[10 + node, :count], weight[10 + node, :count] = 10 + graph.indices[entries], graph.weights[entries]
    groups = round((n - 10) / CONFIG.mean_size)
    expected = strongest_components(near, weight, 10, groups)[10:]
    assert len(set(expected.tolist())) == len(found.size) == groups
    pairs = set(zip(expected.tolist(), found.labels[10:].tolist(), strict=True))
    assert len(pairs) == groups, "the same groups by other names"


def test_the_strongest_neighbors_of_a_token_come_first():
    ids, alphas = lists(first=4)
    graph = attention_graph(ids, alphas, lam=0.5, prune=0.0, first=4)
    found = ablation_arms.strongest_neighbors(graph, 5, 4)
    assert (found[:4] == -1).all()
    for node in (0, 17, 200):
        entries = slice(graph.indptr[node], graph.indptr[node + 1])
        weights = dict(zip((graph.indices[entries] + 4).tolist(), graph.weights[entries].tolist(), strict=True))
        chosen = [token for token in found[node + 4].tolist() if token >= 0]
        assert [weights[token] for token in chosen] == sorted(weights.values(), reverse=True)[:5]


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    ("family", "factor", "value"),
    [
        pytest.param("attention", "kappa", "8", marks=pytest.mark.slow),
        pytest.param("attention", "centroid_budget", "16", marks=pytest.mark.slow),
        ("keys", "append", "assign"),
        pytest.param("attention", "graph_aggregation", "head", marks=pytest.mark.slow),
        pytest.param("keys", "centroid_budget", "16", marks=pytest.mark.slow),
        pytest.param("keys", "graph", "mixed", marks=pytest.mark.slow),
    ],
)
def test_predictions_are_those_of_the_compiled_model_step_by_step(monkeypatch, family, factor, value):
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    torch._dynamo.reset()
    (arm,) = (arm for arm in arms((family, factor)) if arm.value == value)
    model, prompts = small_prompts()
    context, budget, more = prompts.sizes.context, prompts.sizes.budget, {"recent_window": 16}
    with torch.inference_mode():
        sequences = [ablations.indexed(arm, prompts, layer, context, budget, more)[0] for layer in range(2)]
        ours = ablations.predictions(model, prompts, sequences, budget)
    step = quality.compiled(model, ablations.config_of(arm, 0, budget, more))
    tokens = prompts.tokens
    with torch.no_grad():
        cache = step(tokens[:, :context], use_cache=True).past_key_values
        logits = [
            step(tokens[:, t : t + 1].contiguous(), past_key_values=cache, use_cache=True).logits
            for t in range(context, tokens.shape[1])
        ]
    torch.testing.assert_close(ours, torch.cat(logits, 1).log_softmax(-1), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(ours, prompts.log_probs, rtol=1e-3, atol=1e-3)


def test_predictions_do_not_depend_on_recall_being_measured_before():
    chosen = [arm for arm in arms(("attention", "lam"), ("keys", "score")) if arm.default]
    both, alone = measured(chosen), measured(chosen, layers=())
    for one, other in zip(both, alone, strict=True):
        assert one["agree"] == other["agree"]
        assert one["kl"] == other["kl"]
        assert "recall" in one
        assert "recall" not in other
        assert max(one["kl"]) > 0, "nothing was left out"


def test_steps_keep_the_budget_and_experiments_change_what_is_attended():
    names = [("attention", "groups"), ("attention", "lists of"), ("attention", "leading positions in the graph"),
             ("attention", "self-ties (eq. 3)"), ("keys", "graph of layer 0"), ("keys", "centroid_budget")]  # fmt: skip
    rows = measured(arms(*names), predicts=False)
    assert {row["role"] for row in rows} == {"choosing", "held_out"}
    assert all(0 < row["attended"] <= row["budget"] for row in rows)
    for family, factor in names:
        own = [row for row in rows if (row["family"], row["factor"], row["role"]) == (family, factor, "held_out")]
        found = {row["value"]: (tuple(row["recall"]), tuple(row["error"])) for row in own}
        assert len(set(found.values())) == len(found) > 1, f"{family}, {factor}"
        assert all(len(row["recall"]) == len(own[0]["recall"]) for row in own)
    assert {tuple(row["layers"]) for row in rows if row["factor"] == "graph of layer 0"} == {(0,)}


def test_cells_are_paired_with_their_default_and_a_file_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sys.argv", ["bench.ablations"])
    common = ["--small", "--families", "keys", "--factors", "score", "append_block", "--out", str(tmp_path)]
    ablations.main([*common, "--predictions", "off"])
    ablations.main([*common, "--predictions", "only"])
    parts = sorted(tmp_path.glob("*.json"))
    assert len(parts) == 2
    claims = ablations.main(["--merge", *map(str, parts), "--out", str(tmp_path / "joined")])
    (path,) = (tmp_path / "joined").glob("*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    file = json.loads(path.read_text())
    assert len(file["runs"]) == 2
    assert set(file["texts_sha256"]) == {"choosing python 0", "held_out python 0"}
    rows = {(row["factor"], row["value"], row["role"]): row for row in file["rows"]}
    assert len(rows) == len(file["rows"]) == 2 * (2 + 5)
    cells = {(c["factor"], c["value"], c["role"]): c for c in file["cells"] if c["test"] == "both"}
    cell, row, base = cells["score", "softmax", "held_out"], *(rows["score", v, "held_out"] for v in ("softmax", "max"))
    difference = np.array(row["recall"]) - np.array(base["recall"])
    assert cell["recall_difference"] == pytest.approx(difference.mean())
    low, high = cell["recall_difference_interval"]
    assert low <= difference.mean() <= high
    assert cell["kl_difference"] == pytest.approx(np.mean(row["kl"]) - np.mean(base["kl"]))
    low, high = cell["kl_difference_interval"]
    assert low <= cell["kl_difference"] <= high
    assert cell["tokens"] == ablations.SMALL.window
    assert "recall_difference" not in cells["score", "max", "held_out"]
    assert claims["ablation_recall_keys_score_softmax_held_out"] == round(cell["recall"], 4)
    assert cells["append_block", "16", "choosing"]["setting"] == "stream"
    assert "kl" not in cells["append_block", "16", "choosing"]
