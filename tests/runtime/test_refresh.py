"""Partitions by attention follow the tokens that are generated: repairs, warm passes, and what happens meanwhile."""

import threading
import time

import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.community.graph import attention_graph
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import waiting_entry
from ckv_compile.runtime import jobs, turns, work
from ckv_compile.runtime.index import Packed
from ckv_compile.testing import (
    assert_consistent_index,
    assert_whole_communities,
    assign_step,
    bare_sequence,
    members_of,
    retrieve_step,
)

TOKENS, PROMPT, HEADS, KAPPA = 420, 120, 4, 6


def attention_config(**options):
    base = {
        "graph": "attention", "min_context": 0, "workers": 0, "num_sink_tokens": 4, "kappa": KAPPA, "prune": 0.0,
        "refresh_interval": 64, "repair_interval": 16, "mean_size": 8,
    }  # fmt: skip
    return CommunityConfig(**{**base, **options})


class Story:
    """A cache of TOKENS positions, their lists for two layers, and steps that assign tokens as compiled ones do."""

    def __init__(self, config, batch=1, prompt=PROMPT):
        rng = np.random.default_rng(0)
        shape = (2, batch, HEADS, TOKENS, KAPPA)
        own = np.arange(TOKENS)[:, None] // 24 * 24
        near = own + rng.integers(0, 24, shape)
        ids = np.where(rng.random(shape) < 0.8, near, rng.integers(0, TOKENS, shape))
        ids[..., 0] = np.arange(TOKENS)  # a token attends to itself
        self.ids = np.where(ids <= np.arange(TOKENS)[:, None], ids, -1).astype(np.int32)
        self.alphas = rng.random(shape, np.float32) / KAPPA
        self.sequence = bare_sequence(config, TOKENS, batch=batch)
        for layer in range(2):
            lists = (torch.from_numpy(one[layer, :, :, :prompt].copy()) for one in (self.ids, self.alphas))
            self.sequence.offer(layer, self.sequence.keys(layer), 0, prompt, *lists)
        self.sequence.prefilled(prompt)

    def steps(self, count):
        sequence = self.sequence
        for _ in range(count):
            sequence.publish()
            self.assign()
            sequence.length += 1
            sequence.length_device.fill_(sequence.length)
            sequence.offer_appended()

    def catch_up(self):
        """Steps until every token has a community, those too that came while a partition was made."""
        sequence = self.sequence
        sequence.wait()
        sequence.publish()
        behind = sequence.length - int(sequence.index.n_indexed.min())
        self.steps(behind)
        assert behind == 0 or sequence.index.n_indexed.min() > sequence.length - behind

    def assign(self):
        at = self.sequence.length
        assign_step(self.sequence, *(torch.from_numpy(lists[:, :, :, at].copy()) for lists in (self.ids, self.alphas)))

    def assert_weights_of_eq_7(self):
        """w_C and 2m are the strengths of the communities in the graph of all lists so far (eq. 2-5 and 7)."""
        sequence, index = self.sequence, self.sequence.index
        lists = HEADS // sequence.shape.graphs
        for layer, row, graph in np.ndindex(2, sequence.shape.batch, sequence.shape.graphs):
            end = int(index.n_indexed[layer, row])
            heads = slice(graph * lists, (graph + 1) * lists)
            first = sequence.config.num_sink_tokens + sequence.first[row]
            whole = attention_graph(
                self.ids[layer, row, heads, :end], self.alphas[layer, row, heads, :end], lam=sequence.config.lam,
                prune=0.0, first=first,
            )  # fmt: skip
            number = int(index.num_communities[layer, row, graph])
            labels = index.label[layer, row, graph, first:end].numpy()
            expected = np.bincount(labels, whole.strength, number)
            np.testing.assert_allclose(
                index.community_weight[layer, row, graph, :number].numpy(), expected, rtol=1e-4, atol=1e-5
            )
            assert float(index.total_weight[layer, row, graph]) == pytest.approx(whole.strength.sum(), rel=1e-4)


def labels_of(sequence):
    return sequence.index.label[..., : sequence.length].clone()


@pytest.mark.parametrize(
    "options",
    [{}, {"workers": 2}, {"workers": 2, "repair_interval": 0}, {"graph_aggregation": "layer"},
     {"graph_aggregation": "head", "workers": 1}],
    ids=str,
)  # fmt: skip
def test_weights_stay_those_of_labels_and_edges(options):
    story = Story(attention_config(**options), batch=2)
    story.sequence.wait()
    for _ in range(33):
        story.steps(7)
        assert_consistent_index(story.sequence)
        story.assert_weights_of_eq_7()
    story.catch_up()
    assert not story.sequence.statistics.failures


def test_a_mixed_index_stays_consistent():
    story = Story(attention_config(graph="mixed", workers=1, block_size=64, append_block=64))
    story.sequence.wait()
    for _ in range(20):
        story.steps(10)
        assert_consistent_index(story.sequence)
    assert not story.sequence.statistics.failures


@pytest.mark.usefixtures("layers_at_once")
def test_repairs_and_warm_passes_take_turns(monkeypatch):
    ran = []
    for name in ("partition_edges", "refresh_edges", "repair_edges"):
        original = getattr(jobs, name)

        def record(*args, name=name, original=original, **kwargs):
            ran.append((name, sum(piece.tokens for piece in args[0])))
            return original(*args, **kwargs)

        monkeypatch.setattr(jobs, name, record)
    story = Story(attention_config())
    story.steps(130)
    graphs = story.sequence.shape.graphs
    layers = 2
    whole, part = layers * graphs, layers  # jobs: graphs are repaired together and partitioned one by one
    assert ran == [
        *[("partition_edges", 120)] * whole, *[("repair_edges", 16)] * 3 * part, *[("refresh_edges", 16)] * whole,
        *[("repair_edges", 16)] * 3 * part, *[("refresh_edges", 16)] * whole,
    ]  # fmt: skip


def test_layers_are_refreshed_one_after_another(monkeypatch):
    monkeypatch.setattr(turns, "LAYERS", 1)
    story, ran = Story(attention_config()), []
    sequence, submit = story.sequence, story.sequence._submit
    assert sequence.turns.offered == sequence.turns.published == 1
    monkeypatch.setattr(
        sequence,
        "_submit",
        lambda layer, *args, **kwargs: ran.append((sequence.length, layer)) or submit(layer, *args, **kwargs),
    )
    story.steps(100)
    assert sequence.turns.every == 4
    assert ran == [(at + 4 * layer, layer) for at in range(136, 220, 16) for layer in range(2)]
    sequence.publish()
    assert [marks[-1][0] for marks in sequence.index.marks] == [216, 220]
    assert sequence.index.n_indexed.min() == sequence.length
    assert_consistent_index(sequence)
    story.assert_weights_of_eq_7()
    sequence.truncate(217)
    story.steps(40)
    assert_consistent_index(sequence)
    assert not sequence.statistics.failures


@pytest.mark.usefixtures("layers_at_once")
def test_few_repairs_run_at_a_time(monkeypatch):
    """Each wants the GIL again and again, so many of them slow the thread that launches steps."""
    goes_on, began, original = threading.Event(), [], jobs.repair_edges

    def repair(*args, **kwargs):
        began.append(args[0])
        assert goes_on.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(jobs, "repair_edges", repair)
    monkeypatch.setattr(turns, "REPAIRS", 1)
    story = Story(attention_config(workers=2))
    story.sequence.wait()
    story.steps(30)
    assert story.sequence.work.jobs_under_way() == len(began) == 1
    goes_on.set()
    story.sequence.wait()
    story.steps(1)
    story.sequence.wait()
    story.sequence.publish()
    assert len(began) == 2
    assert all(marks[-1][0] > PROMPT for marks in story.sequence.index.marks)


@pytest.mark.usefixtures("layers_at_once")
def test_without_repairs_only_warm_passes_run(monkeypatch):
    monkeypatch.setattr(jobs, "repair_edges", None)
    story = Story(attention_config(repair_interval=0))
    story.steps(130)
    assert [marks[-1][0] for marks in story.sequence.index.marks] == [248, 248]
    assert not story.sequence.statistics.failures


@pytest.mark.parametrize("graph", ["attention", "mixed"])
def test_deterministic_labels_do_not_depend_on_the_workers(graph):
    found = []
    for workers in (0, 1, 3):
        story = Story(attention_config(graph=graph, workers=workers, deterministic=True))
        story.steps(100)
        story.sequence.publish()
        found.append(labels_of(story.sequence))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_workers_pack_what_the_callers_thread_publishes(monkeypatch):
    packing = []
    original = Packed.of
    monkeypatch.setattr(
        work.Packed, "of", lambda *args: packing.append(threading.current_thread().name) or original(*args)
    )
    story = Story(attention_config(workers=1))
    story.sequence.wait()
    story.steps(20)
    story.sequence.wait()
    assert set(packing) == {"ckv-partition"}


@pytest.mark.usefixtures("layers_at_once")
def test_workers_that_are_behind_get_no_further_work(busy_worker):
    story = Story(attention_config(workers=1))
    story.steps(200)
    assert len(story.sequence.work.pending) == 2 * story.sequence.shape.graphs  # of the prompt, in two layers
    assert story.sequence.index.marks == [[], []]
    busy_worker.set()
    story.sequence.wait()
    story.steps(1)  # publishes the prompt, assigns two of those that came meanwhile, offers the rest
    assert story.sequence.index.n_indexed.eq(122).all()
    story.sequence.wait()
    story.steps(1)
    assert [marks[-1][0] for marks in story.sequence.index.marks] == [321, 321]
    assert_consistent_index(story.sequence)
    story.assert_weights_of_eq_7()


@pytest.mark.usefixtures("layers_at_once")
def test_edges_that_the_log_had_no_room_for_are_lost_and_nothing_else(busy_worker):
    story = Story(attention_config(workers=1, refresh_interval=32))
    assert story.sequence.shape.log == 128
    story.steps(200)
    busy_worker.set()
    story.sequence.wait()
    story.steps(1)
    story.sequence.wait()
    story.steps(1)
    assert [marks[-1][0] for marks in story.sequence.index.marks] == [321, 321]
    assert_consistent_index(story.sequence)
    members = members_of(story.sequence.index, 0, 0, 0)
    alone = [community for community in members if community and set(community) <= set(range(248, 321))]
    # In runs of their own; the first of them may have begun with an earlier token without an edge.
    assert 321 - 248 - 8 <= sum(len(community) for community in alone) <= 321 - 248


def test_a_crop_keeps_what_it_leaves_of_the_edges():
    story = Story(attention_config())
    story.steps(90)
    story.sequence.truncate(150)
    assert [edges.tokens for edges in story.sequence.edges] == [150, 150]
    for edges in story.sequence.edges:
        kept = jobs.joined_pieces(edges.pieces)
        assert kept.neighbor.shape[2] == kept.tokens == 150
    layer = jobs.joined_pieces(story.sequence.edges[1].pieces)
    np.testing.assert_array_equal(layer.neighbor, story.ids[1, :, :, :150])
    story.steps(90)
    assert story.sequence.index.n_indexed.min() > 150
    assert_consistent_index(story.sequence)


def poison_free_means(index):
    """Spoil every mean in the log that is of no community which gained members since it was published, nor a token's key.

    Returns how many are of such communities.
    """
    joined = (index.size > index.stored) & (torch.arange(index.shape.communities) < index.num_communities[..., None])
    needed = torch.zeros(index.log_mean.shape[:-1], dtype=torch.bool)
    for layer, row, graph, community in joined.nonzero().tolist():
        needed[layer, row, graph, index.mean_at[layer, row, graph, community]] = True
    position = index.log_first[..., None, None] + torch.arange(index.shape.log, dtype=torch.int32)
    index.log_mean[~(needed | (index.log_community == waiting_entry(position)))] = torch.nan
    index.mean_at[~joined] = index.shape.log + 1_000_000
    return int(needed.sum())


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"graph_aggregation": "layer"}], ids=str)
def test_only_means_of_communities_that_gained_members_are_read(options):
    """Whatever happens to the log: publications, tokens that came in between, crops, and more room."""
    story = Story(attention_config(**options))
    sequence = story.sequence
    most = 0
    for count, event in ((90, 150), (90, "grow"), (60, 297), (80, None)):
        for _ in range(count):
            story.steps(1)
            most = max(most, poison_free_means(sequence.index))
        sequence.wait()
        sequence.publish()
        poison_free_means(sequence.index)
        assert_consistent_index(sequence)
        if event == "grow":
            sequence.grow(TOKENS + 100)
        elif event is not None:
            sequence.truncate(event)
            assert poison_free_means(sequence.index) == 0
    assert most > 10
    assert not sequence.index.centroid_scale.isnan().any()


def test_where_the_first_partition_failed_repairs_wait_for_one_that_does_not(monkeypatch):
    original = jobs.partition_edges
    monkeypatch.setattr(jobs, "partition_edges", None)
    story = Story(attention_config())
    story.steps(50)
    assert len(story.sequence.statistics.failures) == 2
    assert all(edges.kept is None for edges in story.sequence.edges)
    assert_consistent_index_of_pages(story.sequence)
    monkeypatch.setattr(jobs, "partition_edges", original)
    story.steps(80)
    assert len(story.sequence.statistics.failures) == 2
    assert_consistent_index(story.sequence)
    story.assert_weights_of_eq_7()


def raises(*args, stop):
    raise BaseException("bare")


def sleeps(*args, stop):
    time.sleep(0.8)


@pytest.mark.parametrize("name", ["refresh_edges", "repair_edges"])
@pytest.mark.parametrize("fails", [raises, sleeps])
def test_a_refresh_that_fails_leaves_the_partition_and_a_line(monkeypatch, name, fails):
    story = Story(attention_config(workers=1, partition_timeout=0.5))
    story.sequence.wait()
    story.steps(1)
    original = getattr(jobs, name)
    monkeypatch.setattr(jobs, name, lambda *args, backlog=None, stop: fails(*args, stop=stop))
    for _ in range(70):
        story.steps(1)
        story.sequence.wait()
    monkeypatch.setattr(jobs, name, original)
    story.steps(1)
    failures = story.sequence.statistics.failures
    assert failures
    assert all(("bare" if fails is raises else "longer than 0.5 s") in failure for failure in failures)
    assert_consistent_index(story.sequence)
    story.assert_weights_of_eq_7()
    assert story.sequence.index.n_indexed.min() == story.sequence.length
    for _ in range(70):
        story.steps(1)
        story.sequence.wait()
    assert story.sequence.index.marks[0][-1][0] > 240
    story.assert_weights_of_eq_7()


def test_an_engine_process_that_dies_costs_pages_and_a_line(monkeypatch):
    from ckv_compile.community import engines

    call = engines.EngineProcess.call

    def die(self, *args):
        self._process.kill()
        return call(self, *args)

    monkeypatch.setattr(engines.EngineProcess, "call", die)
    story = Story(attention_config(workers=1, leiden_engine="igraph", gamma=2.0))
    story.sequence.wait()
    story.steps(1)
    assert all("the igraph process ended" in failure for failure in story.sequence.statistics.failures)
    assert len(story.sequence.statistics.failures) == 2
    assert_consistent_index_of_pages(story.sequence)


def assert_consistent_index_of_pages(sequence):
    """Pages have no weights, and tokens behind them join no page: everything is listed once nevertheless."""
    for layer, graph in np.ndindex(2, sequence.shape.graphs):
        members = members_of(sequence.index, layer, 0, graph)
        end = int(sequence.index.n_indexed[layer, 0])
        assert sorted(position for community in members for position in community) == list(range(4, end))


@pytest.mark.parametrize("graph", ["attention", "mixed"])
def test_steps_find_whole_communities_of_one_partition_while_it_is_replaced_all_the_time(monkeypatch, graph):
    """Workers finish at random moments, and what they made is published before almost every step."""
    delays, delivered, published = np.random.default_rng(0), {}, set()
    original = work.Finished

    def record(epoch, layer, start, stop, result, *rest):
        delivered[layer, stop] = delivered.get((layer, stop), [])
        delivered[layer, stop].append([[part.labels.copy() for part in row] for row in result])
        time.sleep(delays.random() * 0.004)
        return original(epoch, layer, start, stop, result, *rest)

    monkeypatch.setattr(work, "Finished", record)
    options = {"workers": 3, "repair_interval": 1, "refresh_interval": 3, "recent_window": 4, "budget": 60}
    story = Story(attention_config(graph=graph, block_size=64, append_block=64, **options))
    sequence = story.sequence
    sequence.wait()
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        sequence.publish()
        for layer in range(2):
            (stop, _), indexed = sequence.index.marks[layer][-1], int(sequence.index.n_indexed[layer, 0])
            published.add((layer, stop))
            shown = sequence.index.label[layer, 0, :, :stop].numpy()
            assert any(np.array_equal(shown, np.stack(one[0])) for one in delivered[layer, stop])
            query = torch.randn(1, 4, 1, 16, generator=generator)
            tokens, count = retrieve_step(sequence, layer, query, 120)
            assert int(tokens.max()) < indexed
            assert_whole_communities(sequence, layer, tokens, count)
        story.steps(1)
    assert len(published) > 50
    assert not sequence.statistics.failures
