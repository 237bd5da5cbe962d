"""What workers bring back is written to an index: by kernels as on the host, in few launches, tokens in between too."""

import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ckv_compile.ops  # noqa: F401
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import IndexShape
from ckv_compile.rendered import RenderedKernel
from ckv_compile.runtime import publication
from ckv_compile.runtime.index import CommunityIndex
from ckv_compile.testing import bare_sequence

USED, STOP, DIM = 3, 12, 4  # communities and tokens of the partition


@pytest.mark.parametrize(("heads", "graphs"), [(2, 2), (2, 1), (2, 4)])
def test_tokens_join_the_mean_keys_and_values_of_their_communities(heads, graphs):
    config = CommunityConfig(graph="attention", centroid_budget=4)
    width = heads * DIM if graphs == 1 else DIM
    shape = IndexShape(
        layers=2, batch=2, graphs=graphs, lists=graphs, centroid_dim=width, communities=9, tokens=20, log=8, kappa=4,
        kv_heads=heads, head_dim=DIM, places=graphs, slots=8, rests=8,
    )  # fmt: skip
    index = CommunityIndex(shape, config, torch.float32, torch.device("cpu"))
    for buffer in (index.log_mean, index.mean_value):
        buffer.fill_(torch.nan)
    key, value = torch.randn(2, heads, 20, DIM), torch.randn(2, heads, 20, DIM)

    def mean_of(cache, row, graph, tokens):
        kept = cache[row] if graphs == 1 else cache[row, graph * heads // graphs][None]
        return kept[:, tokens].mean(1).flatten()

    members = {c: list(range(c, STOP, USED)) for c in range(USED)}
    index.used[1] = USED
    index.size[1, :, :, :USED] = index.stored[1, :, :, :USED] = STOP // USED
    index.channel_scale.fill_(1.0)
    index.centroid_scale[1].fill_(torch.nan)
    for row in range(2):
        for graph in range(graphs):
            for c, tokens in members.items():
                place = (row, graph, slice(c, c + 1))
                index.write_centroids(1, place, mean_of(key, row, graph, tokens)[None])
                index.mean_value[1, row, graph, c] = mean_of(value, row, graph, tokens)
    sequence = types.SimpleNamespace(
        index=index, shape=shape, config=config, keys=[None, key].__getitem__, values=[None, value].__getitem__
    )
    codes = index.centroid[1, :, :, :USED].float() * index.centroid_scale[1, :, :, :USED, None]
    joined = np.broadcast_to(np.array([0, USED, 0, 2], np.int32), (2, graphs, 4))  # one opens a community
    publication._join_centroids(sequence, 1, STOP, joined, USED + 1)
    for position, c in enumerate(joined[0, 0].tolist()):
        members.setdefault(c, []).append(STOP + position)
    for row in range(2):
        for graph in range(graphs):
            for c, tokens in members.items():
                assert index.size[1, row, graph, c] == len(tokens)
                if c in joined:
                    new = [token for token in tokens if token >= STOP]
                    total = mean_of(key, row, graph, new) * len(new)
                    if c < USED:
                        total = total + codes[row, graph, c] * (STOP // USED)
                    mean = index.log_mean[1, row, graph, new[-1] - STOP]
                    assert index.mean_at[1, row, graph, c] == new[-1] - STOP
                    torch.testing.assert_close(mean, total / len(tokens))
                    code, scale = torch.ops.ckv.encode_centroids(mean[None], index.channel_scale[1, row, graph])
                    assert torch.equal(index.centroid[1, row, graph, c], code[0])
                    assert index.centroid_scale[1, row, graph, c] == scale[0]
                torch.testing.assert_close(index.mean_value[1, row, graph, c], mean_of(value, row, graph, tokens))
    assert index.mean_value[0].isnan().all()
    assert index.log_mean[0].isnan().all()
    assert index.log_mean[1, :, :, 0].isnan().all()  # its community was joined again


def published(config, together, *, batch=1, first=(0,), steps=(150,), layers=3):
    """A sequence that was given so many tokens at a time, each time published at once."""
    sequence = bare_sequence(config, 400, batch=batch, layers=layers)
    sequence.index.together = together
    sequence.set_first(list(first))
    for buffer in sequence.index.buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(0.25)  # what stays is the same in both
    if not sequence.in_blocks:
        rng = np.random.default_rng(0)
        shape = layers, batch, 4, steps[0], config.kappa
        ids = torch.from_numpy(rng.integers(-1, np.arange(steps[0])[:, None] + 1, shape).astype(np.int32))
        alphas = torch.from_numpy(rng.random(shape, np.float32) / config.kappa)
        for layer in range(layers):
            sequence.offer(layer, sequence.keys(layer), 0, steps[0], ids[layer], alphas[layer])
        sequence.prefilled(steps[0])
        sequence.publish()
        return sequence
    length = 0
    for count in steps:
        for layer in range(layers):
            sequence.offer(layer, sequence.keys(layer), length, count, None, None)
        length += count
        sequence.prefilled(length)
        sequence.publish()
    sequence.publish()  # of small blocks that were joined meanwhile
    return sequence


CONFIGS = {
    "keys": {},
    "keys assigned": {"append": "assign"},
    "keys with values": {"centroid_budget": 8},
    "one graph": {"graph_aggregation": "layer", "centroid_budget": 8},
    "attention": {"graph": "attention"},
    "attention by head": {"graph": "attention", "graph_aggregation": "head", "centroid_budget": 4},
    "mixed": {"graph": "mixed"},
    "keys in groups": {"hierarchy": "on", "budget": 24, "recent_window": 8},
    "attention in groups": {"hierarchy": "on", "budget": 24, "recent_window": 8, "graph": "attention"},
}


def config_of(options, **more):
    base = {"min_context": 0, "workers": 0, "num_sink_tokens": 4, "kappa": 4, "block_size": 64, "append_block": 16}
    return CommunityConfig(**base, **options, **more)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs them one by one."""
    monkeypatch.setattr("ckv_compile.runtime.block_writes.PARTS", 2)
    monkeypatch.setattr("ckv_compile.runtime.block_writes.COMMUNITIES", 7)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_kernels_publish_what_the_host_publishes(options):
    config, batch, first, steps = config_of(options), 2, [0, 70], (64, 16, 60)  # the second row has no node at first
    ours, theirs = (
        published(config, together, batch=batch, first=first, steps=steps, layers=2) for together in (True, False)
    )
    assert ours.index.used == theirs.index.used
    assert ours.index.marks == theirs.index.marks
    assert not ours.in_blocks or [stop for stop, _ in ours.index.marks[0]] == [64, 128]
    assert (ours.shape.groups > 0) == ("hierarchy" in options)
    assert ours.index.log_starts == theirs.index.log_starts
    codes, ours_scale, their_scale = {}, ours.index.centroid_scale, theirs.index.centroid_scale
    for name, buffer in ours.index.buffers.items():
        other = theirs.index.buffers[name]
        if name == "centroid":
            codes[name] = (buffer.int() - other.int()).abs()
        elif name == "coarse":  # the mean of a group of all communities is rounding, as they are centred
            steps = ours.index.coarse_scale[..., None], theirs.index.coarse_scale[..., None]
            apart = (buffer.float() * steps[0] - other.float() * steps[1]).abs()
            assert (apart <= 1.001 * steps[0].abs() + 1e-6).all()
        elif buffer.is_floating_point():
            torch.testing.assert_close(buffer, other, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert torch.equal(buffer, other), name
    for name, code in codes.items():
        assert code.max() <= 1, name
        assert code.double().mean() < 1e-3, name
    torch.testing.assert_close(ours_scale, their_scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("graphs", ["group", "layer"])
def test_centroids_do_not_hold_what_all_keys_have_in_common(graphs):
    """A head whose queries lie along it would have the best scores of its group everywhere."""
    config = config_of({"policy": "random", "graph_aggregation": graphs})  # pages: keys have no part in them
    keys = torch.randn(2, 1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    common = 8 * torch.randn(2, 1, 2, 1, 16, generator=torch.Generator().manual_seed(1))
    indexes = []
    for given in (keys, keys + common):
        sequence = bare_sequence(config, 200, keys=given)
        for layer in range(2):
            sequence.offer(layer, given[layer], 0, 150, None, None)
        sequence.prefilled(150)
        sequence.publish()
        indexes.append(sequence.index)
    plain, moved = indexes
    torch.testing.assert_close(moved.key_mean, plain.key_mean + common.reshape(plain.key_mean.shape), atol=1e-4, rtol=0)
    torch.testing.assert_close(moved.channel_scale, plain.channel_scale, atol=1e-4, rtol=0)
    torch.testing.assert_close(moved.centroid_scale, plain.centroid_scale, atol=1e-4, rtol=0)
    assert (moved.centroid.int() - plain.centroid.int()).abs().max() <= 1
    assert plain.centroid.any()


class Launches(TorchDispatchMode):
    """Counts what would launch on a device: operators that compute or copy, and kernels of our own."""

    VIEWS = (
        "view",
        "split",
        "select",
        "slice",
        "expand",
        "empty",
        "detach",
        "unbind",
        "alias",
        "unsqueeze",
        "as_strided",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        original = RenderedKernel.__call__

        def launch(kernel, *args):
            self.names.append("kernel")
            with _disable_current_modes():
                return original(kernel, *args)

        monkeypatch.setattr(RenderedKernel, "__call__", launch)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if not name.startswith(self.VIEWS) and "lift" not in name:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [CONFIGS[name] for name in ("keys", "attention", "keys in groups")], ids=str)
def test_a_publication_of_all_layers_is_some_twenty_launches(monkeypatch, options):
    original, counts = CommunityIndex.flush, []

    def flush(index):
        with monkeypatch.context() as patches, Launches(patches) as launches:
            original(index)
        counts.append(launches.names)

    monkeypatch.setattr(CommunityIndex, "flush", flush)
    for layers in (2, 5):
        published(config_of(options), True, layers=layers, steps=(100,))
    assert counts[0] == counts[1]
    assert len(counts[0]) <= 25
