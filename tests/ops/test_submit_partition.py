import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from ckv_compile.ops import submit_partition as module
from ckv_compile.testing import nominal_cache

submit_partition = torch.ops.ckv.submit_partition
prefill_attention = torch.ops.ckv.prefill_attention


@pytest.fixture
def calls():
    seen = []
    previous = module.set_handler(lambda *arguments: seen.append(arguments))
    yield seen
    module.set_handler(previous)


def test_handler_gets_the_ticket_and_the_edges(calls):
    ticket, key = torch.tensor([7, 3]), torch.randn(1, 2, 9, 8)
    neighbor, weight = torch.zeros(1, 4, 5, 3, dtype=torch.int32), torch.rand(1, 4, 5, 3)
    submit_partition(ticket, nominal_cache(key), torch.tensor([4], dtype=torch.int32), 5, neighbor, weight, 2)
    ((ticket_id, layer, seen_key, length, num_new, *edges),) = calls
    assert (ticket_id, layer, length, num_new) == (7, 2, 4, 5)
    assert (type(ticket_id), type(length), type(num_new)) == (int, int, int)
    assert seen_key.data_ptr() == key.data_ptr()
    assert edges[0] is not None
    assert torch.equal(edges[1], weight)
    assert ticket.tolist() == [7, 4]


def test_negative_ticket_only_counts(calls):
    ticket = torch.tensor([-1, 0])
    submit_partition(ticket, torch.randn(1, 1, 1, 8), torch.tensor([0]), 1, None, None, 0)
    assert calls == []
    assert ticket.tolist() == [-1, 1]


def test_without_a_handler_only_the_counter_moves():
    previous = module.set_handler(None)
    try:
        ticket = torch.tensor([1, 0])
        submit_partition(ticket, torch.randn(1, 1, 1, 8), torch.tensor([0]), 1, None, None, 0)
        assert ticket.tolist() == [1, 1]
    finally:
        module.set_handler(previous)


def test_set_handler_returns_the_one_before(calls):
    def other(*arguments):
        pass

    mine = module.set_handler(other)
    assert module.set_handler(mine) is other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ticket": torch.tensor([1])}, "ticket must hold an id and a counter"),
        ({"ticket": torch.tensor([1, 0], dtype=torch.int32)}, "ticket must be int64"),
        ({"weight": torch.rand(1, 1, 1, 1)}, "weight must be given exactly when neighbor is"),
        ({"num_new": -1}, "num_new must be at least 0, got -1"),
    ],
)
def test_invalid_argument_is_named(change, message):
    arguments = {
        "ticket": torch.tensor([1, 0]), "key": torch.randn(1, 1, 1, 8), "length": torch.tensor([0]), "num_new": 1,
        "neighbor": None, "weight": None, "layer": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        submit_partition(**{**arguments, **change})


def test_opcheck():
    arguments = (torch.tensor([-1, 0]), torch.randn(1, 2, 3, 8), torch.tensor([0]), 3, None, None, 1)
    torch.library.opcheck(submit_partition.default, arguments)


PROGRAM = textwrap.dedent(
    """
    import json
    import torch
    from torch._dynamo.utils import counters
    from ckv_compile.ops import submit_partition as module

    ckv = torch.ops.ckv
    events = []

    def handler(ticket_id, layer, key, length, num_new, neighbor, weight):
        cached = key.as_strided((1, 2, length + num_new, 8), key.stride())
        events.append([ticket_id, layer, length, num_new, float(cached.sum())])

    module.set_handler(handler)

    def prefill(query, key_new, length, first, ticket, *caches):
        out = query
        for layer in range(2):
            key, value = caches[2 * layer], caches[2 * layer + 1]
            ckv.append_kv(key, value, key_new, key_new, length)
            ckv.submit_partition(ticket, key, length, key_new.shape[2], None, None, layer)
            out = ckv.prefill_attention(out, key, value, length, first, ticket, 0.3, None)
        return out

    torch.manual_seed(0)
    compiled = torch.compile(prefill, fullgraph=True, backend="inductor", dynamic=True)
    report = []
    for tokens in (9, 12):
        events.clear()
        caches = [torch.zeros(1, 2, 32, 8) for _ in range(4)]
        query, key_new = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8)
        rest = (torch.tensor([3]), torch.tensor([0]))
        ticket = torch.tensor([5, 0])
        views = [cache[:, :, :1] for cache in caches]
        out = compiled(query, key_new, *rest, ticket, *views)
        compiled_events, compiled_ticket = list(events), ticket.tolist()
        compiled_caches = [cache.clone() for cache in caches]
        events.clear()
        for cache in caches:
            cache.zero_()
        want = prefill(query, key_new, *rest, ticket, *views)
        same = torch.equal(out, want) and all(map(torch.equal, caches, compiled_caches))
        report.append([compiled_events, list(events), compiled_ticket, same])
    inductor = counters["inductor"]
    print(json.dumps([report, inductor["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]]))
    """
)


@pytest.mark.slow
def test_compiled_prefill_submits_every_layer_once_on_cold_and_warm_caches(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    hits = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        report, *hit = json.loads(done.stdout.splitlines()[-1])
        hits.append(sum(hit))
        for tokens, (compiled, eager, ticket, same) in zip((9, 12), report, strict=True):
            assert [event[:4] for event in compiled] == [[5, 0, 3, tokens], [5, 1, 3, tokens]]
            assert [event[4] for event in compiled] == [event[4] for event in eager]  # the append came before
            assert ticket == [5, 2]
            assert same
    assert hits[0] == 0
    assert hits[1] > 0
