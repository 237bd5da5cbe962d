import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.index_layout import waiting_entry
from ckv_compile.testing import nominal_state, random_index

assign_tokens = torch.ops.ckv.assign_tokens
SINKS, LAYER, KAPPA = 4, 1, 5
MUTATED = (
    "centroid", "centroid_scale", "log_mean", "mean_at", "start", "stored", "size", "num_communities",
    "n_indexed", "log_community", "label", "community_weight", "total_weight",
)  # fmt: skip
STATE = (
    "centroid", "centroid_scale", "channel_scale", "log_mean", "mean_at", "start", "stored", "size", "num_communities",
    "n_indexed", "log_community", "log_first", "label", "community_weight", "total_weight", "edge_neighbor",
    "edge_weight", "gamma",
)  # fmt: skip


def case(heads=2, graphs=2, lists=6, first=(0, 3), n_indexed=(40, 40), communities=8, seed=0, dim=5, **options):
    torch.manual_seed(seed)
    width = dim * heads if graphs == 1 else dim
    options = {"log_entries": 4, **options}
    index = random_index(
        len(first), graphs, width, list(first), list(n_indexed), communities, num_sink_tokens=SINKS, lists=lists,
        kappa=KAPPA, seed=seed, **options,
    )  # fmt: skip
    neighbor = torch.randint(-1, 41, (len(first), lists, KAPPA), dtype=torch.int32)
    weight = torch.rand(len(first), lists, KAPPA)
    key_new = torch.randn(len(first), heads, 1, dim)
    return neighbor, weight, key_new, index, list(first)


def run(neighbor, weight, key_new, index, first, length=40, lam=0.5, **changes):
    """The lists belong to ``LAYER``; the other layer is not ready and has none."""
    new = [
        torch.stack([torch.full_like(tensor, fill), tensor])
        for tensor, fill in ((neighbor, -1), (weight, 0), (key_new[:, :, 0], torch.nan))
    ]
    kept = index.n_indexed[0].clone(), index.log_first[0].clone()
    index.n_indexed[0], index.log_first[0] = 0, length + 1  # no slot of the log
    before = index.clone()
    sizes = {
        "num_layers": 2, "num_kv_heads": key_new.shape[1], "head_dim": key_new.shape[3], "num_lists": neighbor.shape[1],
        "kappa": neighbor.shape[2], "num_graphs": index.num_communities.shape[2], "num_sink_tokens": SINKS,
    }  # fmt: skip
    assign_tokens(
        *map(nominal_state, new), *(index.nominal(name) for name in STATE), index.capacity, torch.tensor([length]),
        torch.tensor(first, dtype=torch.int32), **{**sizes, "lam": lam, **changes},
    )  # fmt: skip
    for name in STATE:
        a, b = getattr(index, name), getattr(before, name)
        assert torch.equal(a[0].nan_to_num(), b[0].nan_to_num()), f"{name} of the other layer changed"
    index.n_indexed[0], index.log_first[0] = kept


def oracle_graph(neighbor, weight, index, first, row, graph, lam, length=40):
    """Eq. 2-4 as matrices over positions, then eq. 7. Returns (community or None for a new one, w, gains)."""
    lists = neighbor.shape[1] // index.num_communities.shape[2]
    label = index.label[LAYER, row, graph]
    w = torch.zeros(length + 1, length + 1, dtype=torch.float64)
    for h in range(graph * lists, (graph + 1) * lists):
        alpha = torch.zeros(length + 1, dtype=torch.float64)  # row i of w1, and K_i where it is positive
        for j, a in zip(neighbor[row, h].tolist(), weight[row, h].tolist(), strict=True):
            usable = j == length or (first[row] + SINKS <= j < length and label[j] >= 0)
            if usable and alpha[j] == 0 and 0 < a < float("inf"):
                alpha[j] = a
        w1 = torch.zeros_like(w)
        w1[length] = alpha
        w += lam / 2 * (w1 + w1.T) + (1 - lam) * torch.outer(alpha, alpha)
    w.fill_diagonal_(0)
    degree = w.sum(1)
    community_weight = index.community_weight[LAYER, row, graph].double().clone()
    for j in range(length):
        if label[j] >= 0:
            community_weight[label[j]] += degree[j]
    two_m = float(index.total_weight[LAYER, row, graph]) + float(w.sum())
    gains = {}
    for c in {int(label[j]) for j in range(length) if w[length, j] > 0}:
        ties = sum(float(w[length, j]) for j in range(length) if label[j] == c)
        gamma = float(index.gamma[LAYER, row, graph])
        gains[c] = ties - gamma * float(degree[length] * community_weight[c]) / two_m
    best = max(gains, key=lambda c: (gains[c], -c), default=None)
    return (best if best is not None and gains[best] > 0 else None), w, gains


def mean_of(index, at, community):
    """The mean key that a graph's next token of this community moves: its keys', as far as they are known."""
    if index.size[at][community] > index.stored[at][community]:
        return index.log_mean[at][index.mean_at[at][community]]
    return index.centroid[at][community] * index.centroid_scale[at][community] * index.channel_scale[at]


def check(neighbor, weight, key_new, index, first, lam=0.5, length=40):
    before = index.clone()
    run(neighbor, weight, key_new, index, first, length, lam)
    after = index
    chosen = []
    for row in range(len(first)):
        for graph in range(index.num_communities.shape[2]):
            at = (LAYER, row, graph)
            best, w, _ = oracle_graph(neighbor, weight, before, first, row, graph, lam, length)
            number = int(before.num_communities[at])
            community = number if best is None else best
            chosen.append(best)
            assert after.num_communities[at] == number + (best is None)
            assert after.label[at][length] == community
            slot = length - int(before.log_first[LAYER, row])
            assert after.log_community[at][slot] == community
            old_size = 0 if best is None else int(before.size[at][community])
            assert after.size[at][community] == old_size + 1
            if best is None:
                assert (int(after.start[at][community]), int(after.stored[at][community])) == (0, 0)
            keys = (
                key_new[row].flatten()
                if index.num_communities.shape[2] == 1
                else (key_new[row, graph * key_new.shape[1] // index.num_communities.shape[2], 0])
            )
            old = 0 if best is None else mean_of(before, at, community)
            assert after.mean_at[at][community] == slot
            mean = after.log_mean[at][slot]
            torch.testing.assert_close(mean, (old * old_size + keys) / (old_size + 1))
            code, scale = torch.ops.ckv.encode_centroids(mean[None], after.channel_scale[at])
            assert torch.equal(after.centroid[at][community], code[0])
            assert after.centroid_scale[at][community] == scale[0]
            weights = before.community_weight[at].double().clone()
            weights[number:] = 0
            for j in range(length):
                if before.label[at][j] >= 0:
                    weights[before.label[at][j]] += w[j].sum()
            weights[community] += w[length].sum()
            used = int(after.num_communities[at])
            torch.testing.assert_close(after.community_weight[at][:used].double(), weights[:used])
            assert float(after.total_weight[at]) == pytest.approx(float(before.total_weight[at]) + float(w.sum()))
            mine = slice(graph * neighbor.shape[1] // index.num_communities.shape[2], None)
            assert torch.equal(after.edge_neighbor[LAYER, row, mine, slot], neighbor[row, mine])
            assert torch.equal(after.edge_weight[LAYER, row, mine, slot].nan_to_num(), weight[row, mine].nan_to_num())
        assert after.n_indexed[LAYER, row] == length + 1
    return chosen


def test_layers_differ_in_readiness():
    neighbor, weight, key_new, index, first = case()
    index.n_indexed[0] = torch.tensor([40, 30])
    before = index.clone()
    new = [torch.stack([tensor, tensor]) for tensor in (neighbor, weight, key_new[:, :, 0])]
    assign_tokens(
        *map(nominal_state, new), *(index.nominal(name) for name in STATE), index.capacity, torch.tensor([40]),
        torch.tensor(first, dtype=torch.int32), 2, 2, 5, 6, KAPPA, 2, SINKS, 0.5,
    )  # fmt: skip
    assert index.n_indexed.tolist() == [[41, 30], [41, 41]]
    assert torch.equal(index.size[0, 1], before.size[0, 1])
    assert index.edge_neighbor[0, 1].ne(before.edge_neighbor[0, 1]).any()


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("heads", "graphs", "lists"), [(2, 2, 6), (2, 2, 2), (3, 9, 9), (2, 1, 6), (1, 1, 7)])
def test_token_joins_the_community_of_largest_gain(heads, graphs, lists, lam):
    for seed in range(4):
        check(*case(heads, graphs, lists, seed=seed), lam=lam)


def test_both_options_of_equation_7_occur():
    chosen = []
    for gamma in (0.5, 20.0):
        arguments = case()
        arguments[3].gamma.fill_(gamma)
        chosen += check(*arguments)
    assert None in chosen
    assert any(c is not None for c in chosen)


def test_token_without_usable_edges_forms_its_own_community():
    neighbor, weight, key_new, index, first = case()
    neighbor[0] = -1
    neighbor[1, 0] = 2  # a sink
    neighbor[1, 1:] = 40  # only itself
    weight[1, 2] = torch.nan
    assert check(neighbor, weight, key_new, index, first) == [None] * 4


def test_repeated_and_unusable_entries_are_skipped():
    neighbor, weight, key_new, index, first = case()
    neighbor[:, :, 1] = neighbor[:, :, 0]
    weight[:, :, 2] = torch.inf
    weight[:, :, 3] = -1.0
    before = index.clone()
    run(neighbor, weight, key_new, index, first)
    clean_neighbor, clean_weight = neighbor.clone(), weight.clone()
    clean_neighbor[:, :, 1:4] = -1
    run(clean_neighbor, clean_weight, key_new, before, first)
    for name in MUTATED:
        assert torch.equal(getattr(index, name).nan_to_num(), getattr(before, name).nan_to_num())


def log_as_waiting(index, neighbor, weight, key_new, length):
    """What a step leaves in the log of a token without a community."""
    graphs = index.num_communities.shape[2]
    key = key_new[:, :, 0]
    own = key.flatten(1)[:, None] if graphs == 1 else key.repeat_interleave(graphs // key.shape[1], 1)
    for row in range(neighbor.shape[0]):
        slot = length - int(index.log_first[LAYER, row])
        if 0 <= slot < index.edge_weight.shape[3]:
            index.edge_neighbor[LAYER, row, :, slot] = neighbor[row]
            index.edge_weight[LAYER, row, :, slot] = weight[row]
            index.log_community[LAYER, row, :, slot] = waiting_entry(length)
            index.log_mean[LAYER, row, :, slot] = own[row]


@pytest.mark.parametrize(
    ("options", "length", "reason"),
    [
        ({"n_indexed": (30, 30)}, 40, "earlier tokens are not indexed"),
        ({"n_indexed": (3, 6)}, 3, "a sink token"),
        ({"log_room": 4}, 40, "a full log"),
        ({"tokens_room": 40}, 40, "no label left"),
    ],
)
def test_row_that_cannot_take_the_token_only_logs_it(options, length, reason):
    neighbor, weight, key_new, index, first = case(**options)
    before = index.clone()
    run(neighbor, weight, key_new, index, first, length)
    log_as_waiting(before, neighbor, weight, key_new, length)
    for name in STATE:
        a, b = getattr(index, name), getattr(before, name)
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{name} changed in spite of {reason}"


def test_full_graph_keeps_the_row_as_it_is_and_other_rows_go_on():
    neighbor, weight, key_new, index, first = case(communities_room=8, first=(0, 0))
    neighbor[0, :3] = -1  # graph 0 of row 0 needs a new community
    neighbor[:, 3:] = 20
    neighbor[1] = 20
    index.gamma.fill_(1e-3)
    before = index.clone()
    run(neighbor, weight, key_new, index, first)
    assert index.n_indexed[LAYER].tolist() == [40, 41]
    log_as_waiting(before, neighbor, weight, key_new, 40)
    for name in MUTATED:
        a, b = getattr(index, name), getattr(before, name)
        assert torch.equal(a[LAYER, 0].nan_to_num(), b[LAYER, 0].nan_to_num())


def test_a_run_of_tokens_keeps_sizes_and_weights_consistent():
    neighbor, weight, key_new, index, first = case(
        first=(0,), n_indexed=(40,), log_room=32, communities_room=40, tokens_room=64
    )
    index.community_weight[LAYER, 0] = index.community_weight[LAYER, 0].nan_to_num()
    for length in range(40, 60):
        neighbor = torch.randint(4, length + 1, neighbor.shape, dtype=torch.int32)
        run(neighbor, torch.rand_like(weight), torch.randn_like(key_new), index, first, length)
    at = (LAYER, 0)
    for graph in range(2):
        number = int(index.num_communities[LAYER, 0, graph])
        labels = index.label[at][graph][4:60]
        assert torch.equal(labels.bincount(minlength=number).int(), index.size[at][graph][:number])
        assert index.n_indexed[at] - index.log_first[at] == 24
        assert torch.equal(index.log_community[at][graph][:24], index.label[at][graph][36:60])
        total = index.community_weight[at][graph][:number].sum()
        torch.testing.assert_close(total, index.total_weight[at][graph])


@pytest.mark.parametrize(("heads", "graphs"), [(2, 2), (2, 1)])
def test_tokens_that_wait_are_caught_up_as_if_they_had_not(heads, graphs):
    """Six arrive while nothing may be assigned; then two are at every step, until the newest one is."""
    neighbor, weight, key_new, index, first = case(heads, graphs, log_room=32, communities_room=40, tokens_room=64)
    index.community_weight[LAYER] = index.community_weight[LAYER].nan_to_num()
    behind = index.clone()
    behind.n_indexed[:] = 3  # no node yet: nothing is assigned
    for length in range(40, 53):
        neighbor = torch.randint(4, length + 1, neighbor.shape, dtype=torch.int32)
        weight, key_new = torch.rand_like(weight), torch.randn_like(key_new)
        if length == 46:
            behind.n_indexed[:] = 40
        run(neighbor, weight, key_new, index, first, length)
        run(neighbor, weight, key_new, behind, first, length)
        assert index.n_indexed[LAYER].eq(length + 1).all()
        assert behind.n_indexed[LAYER].eq(3 if length < 46 else min(40 + 2 * (length - 45), length + 1)).all()
    behind.n_indexed[0] = index.n_indexed[0]
    for name in STATE:
        assert torch.equal(getattr(behind, name).nan_to_num(), getattr(index, name).nan_to_num()), name


def test_a_token_that_was_not_logged_ends_the_catching_up():
    neighbor, weight, key_new, index, first = case(log_room=32, communities_room=40, tokens_room=64)
    before = index.clone()
    for length in (41, 42, 43):  # nobody logged 40
        run(neighbor, weight, key_new, index, first, length)
    assert index.n_indexed[LAYER].tolist() == [40, 40]
    assert torch.equal(index.size[LAYER], before.size[LAYER])
    assert torch.equal(index.label[LAYER], before.label[LAYER])


@pytest.mark.parametrize("seed", range(3))
def test_means_stay_within_part_of_half_a_step_of_those_of_all_keys(seed):
    """What is lost when a published mean is decoded counts less with every member that joins."""
    tokens, stored = 40, 60
    neighbor, weight, key_new, index, first = case(
        first=(0,), n_indexed=(tokens,), log_room=stored, communities_room=70, tokens_room=110, log_entries=0, seed=seed
    )
    keys = {  # of the stored members, in float64; the codes are of their means
        (graph, c): torch.randn(int(index.size[LAYER, 0, graph, c]), 5, dtype=torch.float64) + 1
        for graph in range(2)
        for c in range(8)
    }
    for (graph, c), own in keys.items():
        at, mean = (LAYER, 0, graph), own.mean(0).nan_to_num()[None].float()
        code, scale = torch.ops.ckv.encode_centroids(mean, index.channel_scale[at])
        index.centroid[at][c], index.centroid_scale[at][c] = code[0], scale[0]
    half = index.centroid_scale[LAYER, 0, :, :, None] * index.channel_scale[LAYER, 0, :, None] / 2
    joined = torch.zeros(2, 70, dtype=torch.long)
    index.gamma.fill_(1e-3)  # so that communities grow
    for length in range(tokens, tokens + stored):
        neighbor = torch.randint(4, length + 1, neighbor.shape, dtype=torch.int32)
        key_new = torch.randn_like(key_new)
        run(neighbor, torch.rand_like(weight), key_new, index, first, length)
        for graph in range(2):
            at = (LAYER, 0, graph)
            c = int(index.label[at][length])
            joined[graph, c] += 1
            own = keys.get((graph, c), torch.empty(0, 5, dtype=torch.float64))
            own = keys[graph, c] = torch.cat([own, key_new[0, graph].double()])
            error = (mean_of(index, at, c).double() - own.mean(0)).abs()
            part = 1 - int(joined[graph, c]) / len(own)
            assert (error <= (half[graph, c].double() * part if part else 0) + 1e-5).all()
    assert joined.max() > 10
    assert index.n_indexed[LAYER, 0] == tokens + stored


def test_low_precision_centroid_moves_by_one_rounding():
    neighbor, weight, key_new, index, first = case(dtype=torch.bfloat16)
    before = index.clone()
    run(neighbor, weight, key_new.bfloat16(), index, first)
    for row in range(2):
        for graph in range(2):
            at = (LAYER, row, graph)
            c = int(index.label[at][40])
            size = int(index.size[at][c])
            old = 0.0 if size == 1 else mean_of(before, at, c).double()
            want = (old * (size - 1) + key_new[row, graph, 0].bfloat16().double()) / size
            error = (mean_of(index, at, c).double() - want).abs()
            assert (error <= torch.finfo(torch.bfloat16).eps * want.abs() + 1e-6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": 1.5}, "lam must be between 0 and 1, got 1.5"),
        ({"weight": torch.rand(2, 6, KAPPA).half()}, "new_weight must be float32"),
        ({"num_lists": 5}, "num_graphs must divide the 5 lists, got 2"),
        ({"num_kv_heads": 4}, "num_graphs must be 1 or a multiple of the 4 KV heads, got 2"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_invalid_argument_is_named(change, message):
    neighbor, weight, key_new, index, first = case()
    arguments = {"neighbor": neighbor, "weight": weight, "key_new": key_new, "index": index, "first": first}
    with pytest.raises(ValueError, match=message):
        run(**{**arguments, **change})


def test_opcheck():
    neighbor, weight, key_new, index, first = case()
    state = [getattr(index, name) for name in STATE]
    for tensor in state:
        tensor.nan_to_num_()
    new = [torch.stack([tensor, tensor]) for tensor in (neighbor, weight, key_new[:, :, 0])]
    torch.library.opcheck(
        assign_tokens.default,
        (
            *new, *state, index.capacity, torch.tensor([40]), torch.tensor(first, dtype=torch.int32), 2, 2, 5, 6, KAPPA, 2,
            SINKS, 0.5,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "graphs"), [(2, 2), (2, 1), (3, 9)])
def test_mean_values_move_like_mean_keys(heads, graphs):
    """With the keys' means and keys in their place, they end the same, and nothing else ends otherwise."""
    neighbor, weight, key_new, index, first = case(heads, graphs, 18)
    for row, graph, community in np.ndindex(2, graphs, 8):
        at = (LAYER, row, graph)
        index.mean_value[at][community] = mean_of(index, at, community)
    other = index.clone()
    run(neighbor, weight, key_new, other, first)
    new_value = torch.stack([torch.full_like(key_new[:, :, 0], torch.nan), key_new[:, :, 0]])
    run(
        neighbor,
        weight,
        key_new,
        index,
        first,
        new_value=nominal_state(new_value),
        mean_value=index.nominal("mean_value"),
        log_value=index.nominal("log_value"),
    )
    for row, graph in np.ndindex(2, graphs):
        at = (LAYER, row, graph)
        community = int(index.label[at][40])
        torch.testing.assert_close(index.mean_value[at][community], mean_of(index, at, community))
    assert not torch.equal(index.mean_value.nan_to_num(), other.mean_value.nan_to_num())
    for name in STATE:
        assert torch.equal(getattr(index, name).nan_to_num(), getattr(other, name).nan_to_num()), name


def test_a_new_community_begins_with_the_new_value():
    neighbor, weight, key_new, index, first = case()
    neighbor.fill_(-1)
    value = torch.randn_like(key_new[:, :, 0])
    new_value = torch.stack([torch.full_like(value, torch.nan), value])
    run(
        neighbor,
        weight,
        key_new,
        index,
        first,
        new_value=nominal_state(new_value),
        mean_value=index.nominal("mean_value"),
        log_value=index.nominal("log_value"),
    )
    assert torch.equal(index.mean_value[LAYER, :, :, 8], value)
    assert index.size[LAYER, :, :, 8].eq(1).all()


@pytest.mark.parametrize("missing", ["mean_value", "log_value"])
def test_a_new_value_needs_a_mean_to_move_and_a_place_in_the_log(missing):
    given = {name: torch.zeros(1) for name in ("new_value", "mean_value", "log_value") if name != missing}
    with pytest.raises(ValueError, match=f"{missing} must be given exactly where new_value is"):
        run(*case(), **given)


def test_opcheck_with_values():
    neighbor, weight, key_new, index, first = case()
    new = [torch.stack([tensor, tensor]) for tensor in (neighbor, weight, key_new[:, :, 0])]
    state = [getattr(index, name).nan_to_num() for name in STATE]
    torch.library.opcheck(
        assign_tokens.default,
        (*new, *state, index.capacity, torch.tensor([40]), torch.tensor(first, dtype=torch.int32), 2, 2, 5, 6, KAPPA, 2,
         SINKS, 0.5, new[2], index.mean_value.nan_to_num(), index.log_value.nan_to_num()),
    )  # fmt: skip
