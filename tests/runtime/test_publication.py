"""What workers bring back is written to an index: by kernels as on the host, in few launches, tokens in between too."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ckv_compile.ops  # noqa: F401
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import IndexShape, waiting_entry
from ckv_compile.rendered import RenderedKernel
from ckv_compile.runtime.index import CommunityIndex
from ckv_compile.runtime.token_log import Behind, begin_behind
from ckv_compile.testing import assert_consistent_index, assign_step, bare_sequence


@pytest.mark.parametrize(("base", "stop"), [(10, 10), (10, 13), (10, 8), (10, 17), (10, 30)])
@pytest.mark.parametrize(("heads", "graphs"), [(2, 2), (2, 1), (2, 4)])
def test_the_log_begins_anew_with_the_tokens_that_have_come_since(heads, graphs, base, stop):
    config, room, length, dim = CommunityConfig(graph="attention", centroid_budget=4), 12, 17, 4
    width = heads * dim if graphs == 1 else dim
    shape = IndexShape(
        layers=4, batch=2, graphs=graphs, lists=graphs, centroid_dim=width, communities=9, tokens=40, log=room, kappa=3,
        kv_heads=heads, head_dim=dim, places=graphs, slots=8, rests=8,
    )  # fmt: skip
    index = CommunityIndex(shape, config, torch.float32, torch.device("cpu"))
    index.begin_log(base)
    logged = [position for position in range(base, length) if position != 15]  # that one by no step
    for position in logged:
        slot, community = position - base, position % 3
        entry = waiting_entry(position) if community == 2 else community  # the others have been assigned
        index.log_community[:, :, :, slot] = entry
        index.edge_neighbor[:, :, :, slot] = position
        index.edge_weight[:, :, :, slot] = position / 64
    caches = [torch.randn(2, 4, heads, 40, dim) for _ in range(2)]  # [B, L, ...]: layers are no neighbours in memory
    behind = {layer: Behind(base, stop, length, *(cache[:, layer] for cache in caches)) for layer in (3, 0, 2)}
    before = {name: buffer.clone() for name, buffer in index.buffers.items()}
    begin_behind(index, behind)
    assert index.log_starts == [stop, base, stop, stop]
    for name, buffer in index.buffers.items():
        assert torch.equal(buffer[1], before[name][1]) or name in ("scores",), name
    for layer in behind:
        assert index.log_first[layer].eq(stop).all()
        for slot in range(room):
            position = stop + slot
            waits = position in logged
            assert index.log_community[layer, :, :, slot].eq(waiting_entry(position) if waits else -1).all()
            if not waits:
                continue
            assert index.edge_neighbor[layer, :, :, slot].eq(position).all()
            assert index.edge_weight[layer, :, :, slot].eq(position / 64).all()
            for cache, kept in zip(caches, (index.log_mean, index.log_value), strict=True):
                row = cache[:, layer, :, position]
                own = row.flatten(1)[:, None] if graphs == 1 else row.repeat_interleave(graphs // heads, 1)
                assert torch.equal(kept[layer, :, :, slot], own)


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
    # Pages: keys have no part in them.
    config = config_of({"policy": "random", "graph_aggregation": graphs, "score": "relative"})
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


@pytest.mark.parametrize("layers", [2, 5])
def test_joined_blocks_of_all_layers_are_written_at_once(monkeypatch, layers):
    written = []
    monkeypatch.setattr(
        "ckv_compile.runtime.block_writes.write_blocks", lambda index, writes: written.append(len(writes))
    )
    sequence = published(config_of({}), True, layers=layers, steps=(64, 16, 60))
    assert [stop for stop, _ in sequence.index.marks[0]] == [64, 128]
    assert written == [layers] * 4  # three blocks, two of which become one
    assert sequence.index.num_communities[:, 0, 0].tolist() == sequence.index.used


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("options", [{}, {"centroid_budget": 8}, {"graph_aggregation": "layer"}], ids=str)
def test_blocks_leave_no_trace_of_tokens_that_steps_assigned(options, together):
    """A token counts in the mean of a community while it is in it, and not once a block of its own has it."""
    config = config_of({"append": "assign", "deterministic": True, **options})
    sequence = published(config, together, steps=(64,), layers=2)
    index, shape, rng = sequence.index, sequence.shape, np.random.default_rng(0)
    before, joined, ends = index.centroid.clone(), 0, [[64]]
    for _ in range(70):
        near = rng.integers(4, sequence.length, (shape.layers, 1, shape.lists, shape.kappa)).astype(np.int32)
        weight = torch.full(near.shape, 1 / shape.kappa)
        assign_step(sequence, torch.from_numpy(np.sort(near)), weight)
        joined += int((index.size != index.stored).any())
        sequence.length += 1
        sequence.length_device.fill_(sequence.length)
        sequence.offer_appended()
        sequence.publish()
        if (now := [stop for stop, _ in index.marks[0]]) == ends[-1]:
            continue
        ends.append(now)
        old = index.marks[0][0][1]
        assert torch.equal(index.centroid[:, :, :, :old], before[:, :, :, :old])
        assert_consistent_index(sequence)
    assert joined > 40
    assert (ends[1], ends[-1]) == ([64, 80], [64, 128])
