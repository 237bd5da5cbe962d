import itertools

import pytest
import torch
import torch.nn.functional as F

import ckv_compile.ops  # noqa: F401
from ckv_compile.reference import attended
from ckv_compile.testing import (
    GARBAGE,
    attended_positions,
    community_means,
    nominal_cache,
    nominal_state,
    random_cache,
    random_index,
    random_summaries,
)

sparse_attention = torch.ops.ckv.sparse_attention
CAPACITY = torch.zeros(4, dtype=torch.int32)  # the operator takes the number of the layer as an argument
SINKS, WINDOW, LAYER = 4, 6, 1


class Case:
    """Random query and cache at ``length``, with NaN around what is in use, and token lists [B, G, T]."""

    def __init__(
        self, heads=(6, 2), graphs=2, first=(0, 5), n_indexed=(60, 47), length=63, dim=80, dtype=torch.float32,
        layout="slab", listed=12, seed=0, queries=1,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        batch = len(first)
        self.first, self.length, self.graphs = list(first), length, graphs
        self.query = torch.randn(batch, heads[0], queries, dim, generator=generator).to(dtype)
        self.key = random_cache(batch, heads[1], length + 9, dim, self.first, length + queries, dtype, layout, seed + 1)
        self.value = random_cache(
            batch, heads[1], length + 9, dim, self.first, length + queries, dtype, layout, seed + 2
        )
        self.n_indexed = torch.tensor([[GARBAGE] * batch, list(n_indexed)], dtype=torch.int32)
        self.tokens = torch.full((batch, graphs, listed + 9), -1, dtype=torch.int32)
        self.count = torch.zeros(batch, graphs, dtype=torch.int32)
        for row in range(batch):
            low = self.first[row] + SINKS
            high = max(low, min(n_indexed[row], length + 1 - WINDOW))
            for graph in range(graphs):
                size = min(listed - graph % 3, high - low)
                own = torch.randperm(high - low, generator=generator)[:size] + low
                self.tokens[row, graph, :size] = own.to(torch.int32)
                self.count[row, graph] = size

    index = summaries = None

    def summarize(self, reserved, communities=12, seed=0):
        """Some of the communities of an index are attended by their means."""
        batch, kv_heads, dim = self.key.shape[0], self.key.shape[1], self.key.shape[3]
        self.index = random_index(
            batch, self.graphs, dim * kv_heads if self.graphs == 1 else dim, self.first,
            self.n_indexed[LAYER].tolist(), communities, num_sink_tokens=SINKS, dtype=self.key.dtype, seed=seed,
        )  # fmt: skip
        self.summaries = random_summaries(self.index, reserved, LAYER, seed)
        return self

    def described(self):
        if self.summaries is None:
            return ()
        names = ("centroid", "centroid_scale", "channel_scale", "size", "mean_value")
        return (self.summaries, *(self.index.nominal(name) for name in names))

    def run(self, sink_logits=None, scale=0.3):
        return sparse_attention(
            self.query, nominal_cache(self.key), nominal_cache(self.value, 2), self.tokens, self.count,
            nominal_state(self.n_indexed), CAPACITY if self.index is None else self.index.capacity_of(LAYER),
            torch.tensor([self.length], dtype=torch.int32), torch.tensor(self.first, dtype=torch.int32), sink_logits,
            LAYER, scale, SINKS, WINDOW, *self.described(),
        )  # fmt: skip

    def positions(self, row, graph):
        listed = self.tokens[row, graph, : self.count[row, graph]].tolist()
        covered = int(self.n_indexed[LAYER, row])
        span = (covered, self.length, self.first[row], SINKS, WINDOW, self.query.shape[2])
        sinks, retrieved, tail = attended_positions(listed, *span)
        return sinks + retrieved + tail

    def oracle(self, sink_logits=None, scale=0.3):
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        out = torch.zeros(*self.query.shape[:3], self.value.shape[3], dtype=torch.float64)
        for row in range(self.query.shape[0]):
            for head, query in itertools.product(range(heads), range(self.query.shape[2])):
                positions = self.positions(row, head // (heads // self.graphs))
                positions = [p for p in positions if p <= self.length + query]
                if not positions:
                    continue
                keys = self.key[row, head // (heads // kv_heads), positions].double()
                values = self.value[row, head // (heads // kv_heads), positions].double()
                scores = keys @ self.query[row, head, query].double() * scale
                if self.summaries is not None:
                    part = head // (heads // kv_heads) if self.graphs == 1 else 0
                    graph = head // (heads // self.graphs)
                    means = community_means(
                        self.index, self.summaries, LAYER, row, graph, part, self.key.shape[3]
                    )  # fmt: skip
                    own = means[0] @ self.query[row, head, query].double() * scale + means[2].log()
                    scores, values = torch.cat([scores, own]), torch.cat([values, means[1]])
                norm = torch.logsumexp(scores, 0)
                if sink_logits is not None:
                    norm = torch.logaddexp(norm, sink_logits[head].double())
                out[row, head, query] = torch.exp(scores - norm) @ values
        return out

    def check(self, sink_logits=None):
        got = self.run(sink_logits)
        assert got.shape == (*self.query.shape[:3], self.value.shape[3])
        torch.testing.assert_close(got.double(), self.oracle(sink_logits), atol=5e-6, rtol=1e-5)


GROUPINGS = [((3, 3), 3), ((6, 3), 3), ((12, 4), 4), ((8, 2), 2), ((7, 1), 1), ((8, 1), 8), ((6, 2), 1), ((6, 2), 6)]


@pytest.mark.parametrize("layout", ["slab", "static"])
@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
@pytest.mark.parametrize("dim", [64, 80])
def test_output_is_softmax_attention_over_the_attended_set(heads, graphs, dim, layout):
    Case(heads, graphs, dim=dim, layout=layout).check()


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [
        ((0,), (60,), 63),
        ((0, 0), (60, 60), 60),
        ((0, 5), (0, 47), 63),
        ((0, 2), (4, 6), 4),
        ((0, 3), (0, 0), 4),
        ((61, 0), (0, 60), 60),
    ],
)
def test_rows_of_different_padding_and_coverage_attend_to_their_own_sets(first, n_indexed, length):
    Case(first=first, n_indexed=n_indexed, length=length).check()


@pytest.mark.parametrize("queries", [2, 3, 5, 8])
@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
def test_several_queries_share_a_list_and_see_no_later_token(heads, graphs, queries):
    Case(heads, graphs, queries=queries).check()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf, 0.0, 5.0, torch.inf, -1.0])])
@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [((0, 5), (60, 47), 63), ((0, 61), (0, 0), 60), ((0, 3), (60, 0), 60), ((0, 64), (58, 0), 60), ((0, 2), (0, 1), 0)],
)
def test_several_queries_in_rows_of_any_coverage(first, n_indexed, length, sinks):
    Case(first=first, n_indexed=n_indexed, length=length, queries=4).check(sinks)


def test_several_queries_over_everything_equal_causal_attention():
    case = Case(first=(0, 0), n_indexed=(60, 60), listed=60, queries=3)
    for row in range(2):
        case.tokens[row], case.count[row] = case.tokens[row, :1], case.count[row, 0]
    mask = torch.ones(3, 66, dtype=torch.bool).tril_(63)
    key, value = case.key[:, :, :66], case.value[:, :, :66]
    want = F.scaled_dot_product_attention(case.query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.equal(case.run(), want)


def test_one_query_of_several_equals_its_own_step_where_the_windows_agree():
    """The first query's window is that of a step alone; the later tokens are hidden from it."""
    case, alone = Case(queries=4), Case()
    for name in ("key", "value", "tokens", "count"):
        setattr(alone, name, getattr(case, name))
    alone.query = case.query[:, :, :1]
    torch.testing.assert_close(case.run()[:, :, :1], alone.run())


def test_row_equals_its_single_run():
    both = Case(first=(0, 5), n_indexed=(60, 47))
    alone = Case(first=(0, 5), n_indexed=(60, 47))
    for name in ("query", "key", "value", "tokens", "count"):
        setattr(alone, name, getattr(alone, name)[1:])
    alone.n_indexed, alone.first = alone.n_indexed[:, 1:].contiguous(), [5]
    assert torch.equal(both.run()[1:], alone.run())


def test_list_entries_that_are_not_retrievable_are_ignored():
    case = Case()
    want = case.run()
    case.tokens[0, 0, case.count[0, 0] :] = GARBAGE
    case.tokens[0, 1, case.count[0, 1] :] = case.tokens[0, 1, 0]
    assert torch.equal(case.run(), want)
    for stray in (-1, -GARBAGE, 0, SINKS - 1, 58, 63, 64, GARBAGE):  # sinks, tail, and outside
        case.tokens[0, 0, case.count[0, 0]] = stray
        case.count[0, 0] += 1
        torch.testing.assert_close(case.run(), want)


def test_count_beyond_the_list_is_cut():
    case = Case()
    case.count[0, 0] = GARBAGE
    case.check()


def test_order_of_the_list_does_not_matter():
    case = Case()
    want = case.run()
    case.tokens[0, 0, : case.count[0, 0]] = case.tokens[0, 0, : case.count[0, 0]].flip(0)
    torch.testing.assert_close(case.run(), want)


def test_without_an_index_the_result_is_bit_equal_to_dense_attention():
    case = Case(first=(0, 0), n_indexed=(0, 0))
    key, value = case.key[:, :, :64], case.value[:, :, :64]
    want = F.scaled_dot_product_attention(case.query, key, value, scale=0.3, enable_gqa=True)
    assert torch.equal(case.run(), want)


def test_retrieving_everything_is_bit_equal_to_dense_attention():
    case = Case(first=(0, 5), n_indexed=(60, 60), listed=60)
    case.count[:, 1] = case.count[:, 0]
    for row in range(2):
        case.tokens[row] = case.tokens[row, :1]
        key, value = (t[row : row + 1, :, case.first[row] : 64] for t in (case.key, case.value))
        want = F.scaled_dot_product_attention(case.query[row : row + 1], key, value, scale=0.3, enable_gqa=True)
        assert torch.equal(case.run()[row : row + 1], want)


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 5.0, torch.inf])
@pytest.mark.parametrize("n_indexed", [(60, 47), (0, 0)])
def test_sink_logit_is_a_key_without_a_value(sink, n_indexed):
    sinks = torch.full((6,), sink)
    sinks[1] = 0.25
    Case(n_indexed=n_indexed).check(sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_indexed", [(60, 47), (0, 0)])
def test_low_precision_error_stays_below_eager_attention_over_the_same_set(dtype, n_indexed):
    case = Case(dtype=dtype, n_indexed=n_indexed, graphs=1)
    want, eager = case.oracle(), torch.empty_like(case.query)
    for row in range(2):
        positions = case.positions(row, 0)
        key, value = (t[row : row + 1, :, positions].repeat_interleave(3, 1) for t in (case.key, case.value))
        weights = torch.softmax(case.query[row : row + 1] @ key.transpose(2, 3) * 0.3, -1)
        eager[row : row + 1] = weights @ value
    rounding = torch.finfo(dtype).eps * want.abs().max()
    assert (case.run().double() - want).abs().max() <= (eager.double() - want).abs().max() + rounding


def test_long_low_precision_parts_are_widened_piecewise(monkeypatch):
    case = Case(dtype=torch.bfloat16, n_indexed=(30, 30), first=(0, 0))
    want = case.run()
    monkeypatch.setattr(attended, "ROWS_PER_UPCAST", 5)
    torch.testing.assert_close(case.run(), want)


def test_cache_whose_rows_do_not_tile_memory():
    """head_dim is a slice of a wider buffer, and strides share no large factor."""
    case = Case()
    for name in ("key", "value"):
        wide = torch.full((2, 2, 72, 83), torch.nan)
        wide[..., 1:81] = getattr(case, name)
        setattr(case, name, wide[..., 1:81])
    case.check()
    case.key = case.key.transpose(2, 3).contiguous().transpose(2, 3)  # head_dim is not innermost
    case.check()


def test_copy_of_the_cache_raises():
    case = Case()
    case.value = case.value[:, :, :2].clone()
    with pytest.raises(ValueError, match="value must be a view of a buffer"):
        case.run()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda t: t.float(), "tokens must be int32 or int64"),
        ("tokens", lambda t: torch.cat([t, t[:, :1]], 1), "num_graphs must be 1"),
        ("count", lambda t: t[:, :1], r"count must be \(2, 2\)"),
        ("query", lambda t: t[..., :8], r"key must be \[2, num_kv_heads, any, 8\]"),
        ("value", lambda t: t.double(), "value must have key's dtype"),
    ],
)
def test_invalid_argument_is_named(name, change, message):
    case = Case()
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        case.run()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)], ids=str)
@pytest.mark.parametrize("sink", [-torch.inf, -3.0, 0.0, 5.0, torch.inf])
def test_sink_logits_keep_the_relative_error_of_a_step(sink, dtype, bound):
    case, sinks = Case(dtype=dtype), torch.full((6,), sink, dtype=dtype)
    got, want = case.run(sinks).double(), case.oracle(sinks)
    assert (got - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("sinks", [None, torch.zeros(6)])
def test_opcheck(sinks, queries):
    case = Case(dim=8, queries=queries)
    torch.library.opcheck(
        sparse_attention.default,
        (
            case.query, case.key.nan_to_num(), case.value.nan_to_num(), case.tokens, case.count, case.n_indexed,
            CAPACITY, torch.tensor([case.length]), torch.tensor(case.first, dtype=torch.int32), sinks, LAYER, 0.3, SINKS,
            WINDOW,
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------- communities by their means


@pytest.mark.parametrize("reserved", [1, 5, 20])
@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
def test_a_community_is_one_key_that_stands_for_its_tokens(heads, graphs, reserved):
    case = Case(heads, graphs)
    without = case.run()
    case.summarize(reserved).check()
    assert torch.equal(case.run(), without) == (reserved == 1)  # of one, -1 is all there is


def test_equal_members_are_attended_as_if_each_were():
    """Where all members of a community are alike, it and they give the same."""
    case = Case(first=(0, 0), n_indexed=(60, 60), heads=(4, 2)).summarize(3)
    members = torch.arange(20, 27)
    case.index.centroid.fill_(127)
    case.index.centroid_scale.fill_(0.01)
    case.index.size.fill_(len(members))
    case.summaries.fill_(-1)
    for row in range(2):
        for graph in range(2):
            case.key[row, graph, members] = 1.27 * case.index.channel_scale[LAYER, row, graph]
            case.value[row, graph, members] = case.index.mean_value[LAYER, row, graph, 1]
    case.count[:] = len(members)
    case.tokens[:, :, : len(members)] = members.int()
    one_by_one = case.run()
    case.count[:] = 0
    case.summaries[..., 1] = 1
    torch.testing.assert_close(case.run(), one_by_one)
    case.summaries[..., 1] = -1
    assert not torch.allclose(case.run(), one_by_one)


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, torch.inf])
def test_communities_and_sink_logits_share_the_softmax(sink):
    sinks = torch.full((6,), sink)
    sinks[1] = 0.25
    Case().summarize(5).check(sinks)


def test_rows_of_any_coverage_attend_to_communities():
    Case(first=(61, 0), n_indexed=(0, 60), length=60).summarize(4).check()  # a row of padding gives zeros
    Case(first=(0, 2), n_indexed=(4, 6), length=4).summarize(4).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_communities_in_low_precision_are_summed_in_float32(dtype):
    case = Case(dtype=dtype).summarize(5)
    got, want = case.run(), case.oracle()
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()


def test_without_communities_everything_is_still_exact():
    case = Case(first=(0, 0), n_indexed=(0, 0))
    want = case.run()
    case.summarize(4).summaries.fill_(-1)
    assert torch.equal(case.run(), want)


def test_communities_are_described_completely_and_for_one_query():
    case = Case().summarize(4)
    names = ("summaries", "centroid", "centroid_scale", "channel_scale", "size", "mean_value")
    attended = (
        case.query, case.key, case.value, case.tokens, case.count, case.n_indexed, case.index.capacity_of(LAYER),
        torch.tensor([case.length]), torch.tensor(case.first), None, LAYER, 0.3, SINKS, WINDOW,
    )  # fmt: skip
    described = dict(zip(names, case.described(), strict=True))
    for changes, message in (
        ({"size": None}, "size must be given exactly where summaries are"),
        ({"summaries": None}, "centroid must be given exactly where summaries are"),
        ({"summaries": case.summaries.long()}, "summaries must be int32"),
        ({"summaries": case.summaries[:, :1]}, r"summaries must be \[2, 2, any\] as tokens are"),
        ({"mean_value": described["mean_value"].half()}, "mean_value must have value's dtype torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_attention(*attended, **{**described, **changes})
    with pytest.raises(ValueError, match="query must hold one token per row"):
        sparse_attention(case.query.repeat(1, 1, 2, 1), *attended[1:], **described)


def test_operator_contract_with_communities():
    case = Case(dim=8).summarize(4)
    case.index.centroid_scale.nan_to_num_()
    case.index.mean_value.nan_to_num_()
    index = case.index
    torch.library.opcheck(
        sparse_attention.default,
        (
            case.query, case.key.nan_to_num(), case.value.nan_to_num(), case.tokens, case.count, case.n_indexed,
            index.capacity_of(LAYER), torch.tensor([case.length]), torch.tensor(case.first), None, LAYER, 0.3, SINKS,
            WINDOW, case.summaries, index.centroid, index.centroid_scale, index.channel_scale, index.size, index.mean_value,
        ),
    )  # fmt: skip
