import numpy as np
import pytest

from ckv_compile.community.assign import assign_greedily, community_weights
from ckv_compile.community.graph import attention_graph


class Oracle:
    """Eq. 6 and 7 on a dense adjacency matrix that grows by one token at a time."""

    def __init__(self, matrix, labels, gamma, lam):
        self.w, self.labels, self.gamma, self.lam = matrix.astype(np.float64), list(labels), gamma, lam

    def add(self, lists):
        """lists: per head, a dict of key position -> score (the new token's own position allowed)."""
        i = len(self.labels)
        self.w = np.pad(self.w, ((0, 1), (0, 1)))
        for scores in lists:
            for j, score in scores.items():
                if j != i:  # eq. 2 and 4
                    self.w[i, j] += self.lam / 2 * score
                    self.w[j, i] += self.lam / 2 * score
                for k, other in scores.items():  # eq. 3
                    if j != k:
                        self.w[j, k] += (1 - self.lam) * score * other
        strength, total = self.w.sum(1), self.w.sum()
        labels = np.array(self.labels)
        gains = {max(self.labels, default=-1) + 1: 0.0}
        for c in sorted({self.labels[j] for scores in lists for j in scores if j != i}):
            members = np.flatnonzero(labels == c)
            gains[c] = self.w[i, members].sum() - self.gamma * strength[i] * strength[members].sum() / total
        best = max(gains.values())
        self.labels.append(next(c for c, gain in gains.items() if gain == best))  # the singleton comes first

    def weights(self, capacity):
        return np.bincount(self.labels, weights=self.w.sum(1), minlength=capacity)


def streaming_case(seed, heads, kappa, old, new, lam):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, old, (heads, old, kappa)).astype(np.int32)
    graph = attention_graph(ids, rng.random(ids.shape, np.float32), lam=lam, prune=0.0)
    labels = rng.integers(0, 6, old).astype(np.int32)
    labels[:6] = np.arange(6)
    lists = np.full((heads, new, kappa), -1, np.int32)
    for h in range(heads):
        for t in range(new):
            chosen = rng.permutation(old + t + 1)[: rng.integers(0, kappa + 1)]
            lists[h, t, rng.permutation(kappa)[: len(chosen)]] = chosen  # empty slots anywhere, itself included
    return graph, labels, lists, rng.random(lists.shape, np.float32)


@pytest.mark.parametrize(
    ("heads", "kappa", "lam", "gamma"), [(1, 4, 0.5, 1.0), (3, 5, 0.5, 8.0), (2, 8, 1.0, 3.0), (2, 3, 0.0, 2.0)]
)
@pytest.mark.parametrize("seed", range(4))
def test_labels_and_weights_are_those_of_the_equations(seed, heads, kappa, lam, gamma, dense):
    graph, labels, lists, scores = streaming_case(seed, heads, kappa, old=24, new=30, lam=lam)
    weight = community_weights(graph.strength, labels, 64)
    total = np.array([graph.strength.sum()])
    assigned = assign_greedily(labels, weight, total, lists, scores, 24, gamma=gamma, lam=lam)
    oracle = Oracle(dense(graph), labels.tolist(), gamma, lam)
    for t in range(30):
        pairs = [zip(lists[h, t].tolist(), scores[h, t].tolist(), strict=True) for h in range(heads)]
        oracle.add([{j: score for j, score in head if j >= 0} for head in pairs])
    assert assigned.tolist() == oracle.labels[24:]
    np.testing.assert_allclose(weight, oracle.weights(64), rtol=1e-12)
    np.testing.assert_allclose(total[0], oracle.w.sum(), rtol=1e-12)


def test_batches_and_single_steps_agree(dense):
    graph, labels, lists, scores = streaming_case(9, 2, 4, old=20, new=12, lam=0.5)
    whole_weight, whole_total = community_weights(graph.strength, labels, 40), np.array([graph.strength.sum()])
    step_weight, step_total = whole_weight.copy(), whole_total.copy()
    whole = assign_greedily(labels, whole_weight, whole_total, lists, scores, 20, gamma=2.0, lam=0.5)
    known = labels
    for t in range(12):
        one = assign_greedily(
            known, step_weight, step_total, lists[:, t : t + 1], scores[:, t : t + 1], 20 + t, gamma=2.0, lam=0.5
        )
        known = np.concatenate([known, one])
    np.testing.assert_array_equal(known[20:], whole)
    np.testing.assert_array_equal(step_weight, whole_weight)
    assert step_total == whole_total


def one_token(ids, scores, labels=(0, 0, 1), weight=(2.0, 1.0), capacity=4, gamma=1.0):
    community = np.zeros(capacity)
    community[: len(weight)] = weight
    total = np.array([float(sum(weight))])
    out = assign_greedily(
        np.array(labels, np.int32), community, total, np.array([[ids]], np.int32), np.array([[scores]], np.float32),
        len(labels), gamma=gamma, lam=1.0,
    )  # fmt: skip
    return out[0], community, total[0]


def test_a_token_without_neighbours_is_a_new_singleton():
    label, weight, total = one_token([-1, -1], [1.0, 1.0])
    assert (label, total) == (2, 3.0)
    np.testing.assert_array_equal(weight, [2, 1, 0, 0])


def test_a_token_joins_where_its_edges_go():
    label, weight, total = one_token([2, -1], [0.5, 0.0])
    assert label == 1
    assert total == 3.5
    np.testing.assert_array_equal(weight, [2, 1 + 0.25 + 0.25, 0, 0])


def test_high_gamma_leaves_a_token_alone():
    label, weight, _ = one_token([2, -1], [0.5, 0.0], gamma=50.0)
    assert label == 2
    np.testing.assert_array_equal(weight, [2, 1.25, 0.25, 0])


def test_a_full_index_takes_no_singleton():
    assert one_token([2, -1], [0.5, 0.0], gamma=50.0, capacity=2)[0] == 1
    assert one_token([-1, -1], [0.5, 0.0], capacity=2)[0] == -1


def test_unusable_entries_are_ignored():
    label, weight, total = one_token([2, 0, 1, 9, 2], [0.5, np.nan, -1.0, 1.0, 0.5])
    assert (label, total) == (1, 3.5)
    np.testing.assert_array_equal(weight, [2, 1.5, 0, 0])
    label, _, total = one_token([2, 0], [0.5, np.inf], labels=(-1, 0, -1), weight=(2.0,))
    assert (label, total) == (1, 2.0)  # its only usable neighbour is not in the graph


def test_weights_that_cannot_be_updated_in_place_raise():
    with pytest.raises(TypeError, match="community_weight must be float64"):
        assign_greedily(
            np.zeros(3, np.int32), np.zeros(4, np.float32), np.zeros(1), np.zeros((1, 1, 1)), np.zeros((1, 1, 1)), 3,
            gamma=1.0, lam=0.5,
        )  # fmt: skip
