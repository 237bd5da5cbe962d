import itertools

import pytest
import torch
import torch.nn.functional as F

import ckv_compile.ops  # noqa: F401
from ckv_compile.reference import attended
from ckv_compile.testing import GARBAGE, attended_positions, nominal_cache, nominal_state, random_cache

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

    def run(self, sink_logits=None, scale=0.3):
        return sparse_attention(
            self.query, nominal_cache(self.key), nominal_cache(self.value, 2), self.tokens, self.count,
            nominal_state(self.n_indexed), CAPACITY, torch.tensor([self.length], dtype=torch.int32),
            torch.tensor(self.first, dtype=torch.int32), sink_logits, LAYER, scale, SINKS, WINDOW,
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
