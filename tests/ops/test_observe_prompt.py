"""``ckv::observe_prompt``: the handler sees a prefill's queries and all keys, in its place."""

import pytest
import torch

import ckv_compile.ops.observe_prompt as module

observe_prompt = torch.ops.ckv.observe_prompt


@pytest.fixture
def calls():
    events = []
    previous = module.set_handler(lambda *event: events.append(event))
    yield events
    module.set_handler(previous)


def arguments(ticket=7, length=5):
    cache = torch.randn(1, 2, 32, 8)
    return torch.tensor([ticket, 0]), torch.randn(1, 4, 3, 8), cache[:, :, :1], torch.tensor([length]), 0.25, 6, cache


def test_the_handler_gets_the_queries_and_every_key_up_to_theirs(calls):
    ticket, query, nominal, length, scale, layer, cache = arguments()
    observe_prompt(ticket, query, nominal, length, scale, layer)
    ((identifier, of_layer, seen, key, past, by),) = calls
    assert (identifier, of_layer, past, by) == (7, 6, 5, 0.25)
    assert torch.equal(seen, query)
    assert torch.equal(key, cache[:, :, :8])
    assert ticket.tolist() == [7, 1]


def test_a_negative_ticket_only_counts(calls):
    ticket, *rest, _ = arguments(ticket=-1)
    observe_prompt(ticket, *rest)
    assert calls == []
    assert ticket.tolist() == [-1, 1]


def test_invalid_arguments_are_named():
    _, query, nominal, length, scale, layer, _ = arguments()
    with pytest.raises(ValueError, match="ticket must hold an id and a counter"):
        observe_prompt(torch.tensor([1]), query, nominal, length, scale, layer)
    with pytest.raises(ValueError, match=r"key must be \[1, num_kv_heads, any, 8\]"):
        observe_prompt(torch.tensor([1, 0]), query, nominal[..., :4], length, scale, layer)


def test_opcheck(calls):
    ticket, *rest, _ = arguments(ticket=-1)
    torch.library.opcheck(observe_prompt.default, (ticket, *rest))
