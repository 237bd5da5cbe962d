"""The kernels of ``ckv::sparse_attention`` against attention in float64, on caches that are NaN outside of what is read."""

import itertools
import math

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.testing import (
    GARBAGE,
    attended_positions,
    community_means,
    random_cache,
    random_index,
    random_summaries,
)

SINKS, WINDOW, LAYER, SCALE = 4, 6, 1, 0.3
SMALL = {"SPLITS": 4, "BLOCK_N": 16, "LIST_N": 16}


class Case:
    def __init__(
        self, device, heads=(4, 2), graphs=2, first=(0, 5), n_indexed=(90, 71), length=93, dim=64, value_dim=None,
        dtype=torch.float32, layout="slab", listed=40, seed=0, queries=1,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        batch, value_dim = len(first), value_dim or dim
        self.first, self.length, self.covered = list(first), length, list(n_indexed)
        cache = (batch, heads[1], length + 9)
        used = (self.first, length + queries, dtype, layout)
        self.query = torch.randn(batch, heads[0], queries, dim, generator=generator).to(device, dtype)
        self.key = random_cache(*cache, dim, *used, seed + 1).to(device)
        self.value = random_cache(*cache, value_dim, *used, seed + 2).to(device)
        self.n_indexed = torch.tensor([[GARBAGE] * batch, self.covered], dtype=torch.int32, device=device)
        self.tokens = torch.full((batch, graphs, listed + 5), GARBAGE, dtype=torch.int32)
        self.count = torch.zeros(batch, graphs, dtype=torch.int32)
        for row in range(batch):
            low = self.first[row] + SINKS
            high = max(low, min(self.covered[row], length + 1 - WINDOW))
            for graph in range(graphs):
                size = min(listed - 7 * graph % listed, high - low)
                own = torch.randperm(high - low, generator=generator)[:size].tolist()
                own = [p + low for p in own]
                if size > 4:  # members of a community that are sinks, or in the tail
                    own[1], own[3] = self.first[row], length
                self.tokens[row, graph, :size] = torch.tensor(own, dtype=torch.int32)
                self.count[row, graph] = size
        self.tokens, self.count = self.tokens.to(device), self.count.to(device)

    index = summaries = None

    def summarize(self, reserved, communities=12, seed=0):
        """Some of the communities of an index are attended by their means."""
        (batch, kv_heads, _, dim), graphs = self.key.shape, self.tokens.shape[1]
        self.index = random_index(
            batch, graphs, dim * kv_heads if graphs == 1 else dim, self.first, self.covered, communities,
            num_sink_tokens=SINKS, dtype=self.key.dtype, seed=seed,
        )  # fmt: skip
        self.summaries = random_summaries(self.index, reserved, LAYER, seed).to(self.query.device)
        return self

    def described(self):
        if self.summaries is None:
            return ()
        names = ("centroid", "centroid_scale", "channel_scale", "size", "mean_value")
        return (self.summaries, *(getattr(self.index, name).to(self.query.device) for name in names))

    def run(self, sink_logits=None, **tuned):
        device, lists = self.query.device, self.n_indexed
        room = GARBAGE if self.index is None else int(self.index.capacity[0])
        capacity = torch.tensor([room, GARBAGE, GARBAGE, LAYER], dtype=torch.int32, device=device)
        return rendered.sparse_attention(
            self.query, self.key[:, :, :1], self.value[:, :, :2], self.tokens, self.count, lists, capacity,
            torch.tensor([self.length], dtype=torch.int32, device=device),
            torch.tensor(self.first, dtype=torch.int32, device=device), sink_logits, LAYER, SCALE, SINKS, WINDOW,
            self.described(), **{**SMALL, **tuned},
        )  # fmt: skip

    def oracle(self, sink_logits=None):
        (batch, heads, queries, _), kv_heads, graphs = self.query.shape, self.key.shape[1], self.tokens.shape[1]
        out = torch.zeros(batch, heads, queries, self.value.shape[3], dtype=torch.float64)
        query, key, value = (t.cpu().double() for t in (self.query, self.key, self.value))
        for row in range(batch):
            for head, new in itertools.product(range(heads), range(queries)):
                graph, kv_head = head * graphs // heads, head * kv_heads // heads
                listed = self.tokens[row, graph, : self.count[row, graph]].tolist()
                span = (self.covered[row], self.length, self.first[row], SINKS, WINDOW, queries)
                positions = [p for part in attended_positions(listed, *span) for p in part if p <= self.length + new]
                if not positions:
                    continue
                scores, values = (
                    key[row, kv_head, positions] @ query[row, head, new] * SCALE,
                    value[row, kv_head, positions],
                )
                if self.summaries is not None:
                    part = kv_head if graphs == 1 else 0
                    means = community_means(self.index, self.summaries.cpu(), LAYER, row, graph, part, key.shape[3])
                    scores = torch.cat([scores, means[0] @ query[row, head, new] * SCALE + means[2].log()])
                    values = torch.cat([values, means[1]])
                norm = torch.logsumexp(scores, 0)
                if sink_logits is not None:
                    norm = torch.logaddexp(norm, sink_logits[head].cpu().double())
                out[row, head, new] = torch.exp(scores - norm) @ values
        return out

    def check(self, sink_logits=None, single=1e-6, **tuned):
        got, want = self.run(sink_logits, **tuned).cpu(), self.oracle(sink_logits)
        assert got.dtype == self.query.dtype
        assert got.isfinite().all()
        allowed = single if got.dtype == torch.float32 else 0.75 * torch.finfo(got.dtype).eps
        assert (got.double() - want).norm() <= allowed * want.norm()
        return got


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
def test_groups_of_any_size(device, group):
    Case(device, (group, 1), 1).check()


@pytest.mark.parametrize("graphs", [2, 6, 1], ids=["group", "head", "layer"])
def test_a_graph_per_group_head_or_layer(device, graphs):
    Case(device, (6, 2), graphs).check()


@pytest.mark.parametrize(
    ("heads", "graphs", "queries"), [((6, 2), 2, 2), ((6, 2), 6, 5), ((6, 2), 1, 3), ((8, 1), 1, 8)]
)
@pytest.mark.parametrize("sink", [None, 0.25])
def test_several_queries_see_no_later_token(device, heads, graphs, queries, sink):
    case = Case(device, heads, graphs, queries=queries)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)  # as models have it
    case.check(None if sink is None else torch.full((heads[0],), sink, device=device))


@pytest.mark.parametrize("layout", ["slab", "static"])
@pytest.mark.parametrize(("dim", "value_dim"), [(80, 80), (96, 96), (128, 128), (256, 256), (64, 128), (128, 80)])
def test_every_head_dim(device, dim, value_dim, layout):
    Case(device, (2, 1), 1, dim=dim, value_dim=value_dim, layout=layout).check()


@pytest.mark.parametrize("n_indexed", [(90, 71), (0, 0)])
def test_every_dtype(device, dtype, n_indexed):
    Case(device, n_indexed=n_indexed, dtype=dtype).check()


@pytest.mark.parametrize("sink", [-math.inf, -3.0, 0.0, 5.0, math.inf])
@pytest.mark.parametrize("n_indexed", [(90, 71), (0, 0)])
def test_sink_logit_is_a_key_without_a_value(device, n_indexed, sink):
    sinks = torch.full((4,), sink, device=device)
    sinks[1] = 0.25
    Case(device, n_indexed=n_indexed).check(sinks)


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [
        ((0, 0), (0, 0), 0),  # one token
        ((0, 5), (0, 0), 150),  # everything is tail
        ((0, 3), (5, 6), 5),  # the tail begins among the sinks
        ((0, 61), (0, 0), 60),  # a row of padding
        ((0, 40), (300, 41), 300),
        ((0, 62), (200, 200), 200),
    ],
)
def test_rows_of_any_coverage(device, first, n_indexed, length):
    Case(device, first=first, n_indexed=n_indexed, length=length).check()


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [((0, 0), (0, 0), 0), ((0, 5), (0, 0), 150), ((0, 63), (0, 0), 60), ((0, 3), (5, 6), 5), ((0, 40), (300, 41), 300)],
)
def test_several_queries_in_rows_of_any_coverage(device, first, n_indexed, length):
    Case(device, first=first, n_indexed=n_indexed, length=length, queries=4).check()


@pytest.mark.parametrize("listed", [1, 15, 16, 17, 63, 64, 65, 130])
def test_lists_around_the_size_of_blocks_and_splits(device, listed):
    Case(device, (2, 1), 1, first=(3,), n_indexed=(200,), length=203, listed=listed).check()


@pytest.mark.parametrize("splits", [1, 8])
def test_any_number_of_splits_and_blocks(device, splits):
    case = Case(device, first=(0,), n_indexed=(90,))
    case.check(SPLITS=splits)
    case.check(SPLITS=splits, BLOCK_N=32, LIST_N=32)


def test_entries_beyond_count_and_outside_of_the_context_are_ignored(device):
    case = Case(device)
    for stray in (-1, -GARBAGE, 0, SINKS - 1, case.length, case.length + 1, GARBAGE):
        case.tokens[0, 0, case.count[0, 0]] = stray
        case.count[0, 0] += 1 if case.count[0, 0] < case.tokens.shape[2] - 1 else 0
    case.check()


def test_count_beyond_the_list_is_cut(device):
    case = Case(device)
    case.tokens[0, 0, case.count[0, 0] :] = -1
    case.count[0, 0] = case.tokens.shape[2] + 100
    case.check()


def test_large_and_equal_scores(device):
    case = Case(device)
    case.key[:, :, 8] *= 200
    case.check()
    case.query.zero_()
    case.check()


def test_default_configuration(device):
    case = Case(device, (4, 1), 1, first=(3,), n_indexed=(200,), length=260, dim=128, listed=120)
    case.check(SPLITS=64, BLOCK_N=32, LIST_N=32)


def test_equal_inputs_give_equal_bits(device):
    case = Case(device)
    assert torch.equal(case.run(), case.run())


def test_tokens_beyond_2_to_the_31_elements_are_read(device):
    """They lie far apart in a buffer that is mostly untouched."""
    case = Case(device, (2, 1), 1, first=(0,), n_indexed=(40,), length=43, dtype=torch.float16)
    stride = (1 << 31) // 30 + 64
    size = stride * 52 + 64
    buffers = []
    for tensor in (case.key, case.value):
        buffer = torch.empty(size, dtype=tensor.dtype, device=device)  # not written: no memory is used on a CPU
        view = buffer.as_strided((1, 1, 53, 64), (size, size, stride, 1))
        view[:, :, : tensor.shape[2]] = tensor
        buffers.append(view)
    case.key, case.value = buffers
    case.check()


# ---------------------------------------------------------------------- communities by their means


@pytest.mark.parametrize("reserved", [1, 4, 16, 17, 40])
def test_communities_join_the_softmax(device, reserved):
    case = Case(device)
    without = case.check()
    changed = (case.summarize(reserved, communities=50).check() - without).norm() / without.norm()
    assert (changed <= 1e-6) == (reserved == 1)


@pytest.mark.parametrize(("heads", "graphs"), [((6, 2), 2), ((6, 2), 6), ((6, 2), 1), ((16, 1), 1), ((3, 3), 3)])
def test_communities_of_any_grouping(device, heads, graphs):
    Case(device, heads, graphs).summarize(9).check()


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_communities_in_every_precision(device, dtype, dim):
    Case(device, (2, 1), 1, dim=dim, dtype=dtype).summarize(9).check()


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.inf])
def test_communities_and_sink_logits(device, sink):
    sinks = torch.full((4,), sink, device=device)
    sinks[1] = 0.25
    Case(device).summarize(5).check(sinks)


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"), [((0, 5), (0, 0), 50), ((0, 61), (0, 0), 60), ((0, 3), (5, 6), 5)]
)
def test_rows_without_communities_are_as_before(device, first, n_indexed, length):
    case = Case(device, first=first, n_indexed=n_indexed, length=length)
    without = case.check()
    case.summarize(5)
    case.summaries.fill_(-1)
    assert torch.equal(case.check(), without)


def test_a_community_of_far_larger_or_smaller_score_than_the_tokens(device):
    for factor in (200, -200):
        case = Case(device).summarize(5)
        case.index.centroid_scale.mul_(factor)
        case.check(single=3e-6)  # of scores some hundred large, single precision keeps no more on any processor
