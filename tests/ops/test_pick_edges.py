import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.index_layout import candidate_slots, rest_slots
from ckv_compile.reference.pick_edges import NO_ENTRY, edge_entries
from ckv_compile.testing import nominal_state

ckv = torch.ops.ckv
LAYERS, BATCH, PLACES, LISTS, BUDGET, SINKS, KAPPA = 2, 2, 2, 4, 24, 3, 5


def candidates(seed=0):
    """State of all layers: some places empty, some scores equal, some candidates among the rest."""
    generator = torch.Generator().manual_seed(seed)
    slots, rests = candidate_slots(BUDGET, SINKS), rest_slots(KAPPA)
    place = torch.full((LAYERS, BATCH, PLACES, slots), -1, dtype=torch.int32)
    place[..., :40] = torch.randperm(1000, generator=generator)[:40].int()
    place[..., 3:7] = -1
    score = torch.randn(LAYERS, BATCH, LISTS, slots, generator=generator).round(decimals=1)
    rest = torch.full((LAYERS, BATCH, LISTS, rests), NO_ENTRY)
    rest[..., 9] = edge_entries(torch.tensor([0.7]), torch.tensor([2000]))
    norm = torch.randn(LAYERS, BATCH, LISTS, generator=generator) + 6
    return place, score, rest, norm


def pick(state, source="attention", **changes):
    sizes = {
        "num_layers": LAYERS, "num_places": PLACES, "num_lists": LISTS, "budget": BUDGET, "num_sink_tokens": SINKS,
        "kappa": KAPPA,
    }  # fmt: skip
    first = torch.zeros(BATCH, dtype=torch.int32)
    return ckv.pick_edges(*state, first, *{**sizes, **changes}.values(), source)


@pytest.mark.parametrize("source", ["keys", "attention"])
def test_the_best_candidates_of_every_list(source):
    place, score, rest, norm = candidates()
    neighbor, weight = pick([nominal_state(tensor) for tensor in (place, score, rest, norm)], source)
    for at in torch.cartesian_prod(*map(torch.arange, (LAYERS, BATCH, LISTS))).tolist():
        layer, row, edge_list = at
        found = place[layer, row, edge_list * PLACES // LISTS].tolist()
        pairs = [(s, p) for s, p in zip(score[*at].tolist(), found, strict=True) if p >= 0]
        pairs.append((torch.tensor(0.7).item(), 2000))
        best = sorted(pairs, reverse=True)[:KAPPA]
        assert neighbor[*at].tolist() == [position for _, position in best]
        expected = [1.0] * KAPPA if source == "keys" else [2.0 ** (s - float(norm[*at])) for s, _ in best]
        assert weight[*at].tolist() == pytest.approx(expected, rel=1e-5)


def test_fewer_candidates_than_kappa():
    place, score, rest, norm = candidates()
    place.fill_(-1)
    place[..., 1] = 17
    score[..., 1] = -torch.inf  # no score at all
    neighbor, weight = pick([nominal_state(tensor) for tensor in (place, score, rest, norm)])
    assert neighbor[0, 0, 0].tolist() == [2000, -1, -1, -1, -1]
    assert weight[..., 1:].eq(0).all()


def test_entries_order_by_score_and_then_by_position():
    score = torch.tensor([-3.5, -0.0, 0.0, 0.0, 2.0, -1e30])
    position = torch.tensor([4, 9, 8, 10, 1, 3])
    order = edge_entries(score, position).argsort(descending=True).tolist()
    assert order == [4, 3, 1, 2, 0, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kappa": 0}, "kappa must be at least 1, got 0"),
        ({"num_places": 3}, "num_places must divide the 4 lists, got 3"),
        ({"source": "values"}, "source must be one of .* got values"),
    ],
)
def test_invalid_argument_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        pick(candidates(), **changes)


def test_a_score_of_another_dtype_is_named():
    place, score, rest, norm = candidates()
    with pytest.raises(ValueError, match=r"candidate_score must be float32, got torch\.float64"):
        pick((place, score.double(), rest, norm))


def test_opcheck():
    first = torch.zeros(BATCH, dtype=torch.int32)
    sizes = (LAYERS, PLACES, LISTS, BUDGET, SINKS, KAPPA, "attention")
    torch.library.opcheck(ckv.pick_edges.default, (*candidates(), first, *sizes))
