"""generate reads whether to stop one step late: the same tokens, transformers as it was, and only where it helps."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile import generate
from ckv_compile.testing import prompt, tiny_model

utils = pytest.importorskip("transformers.generation.utils")
if not hasattr(utils, "DeferredStopCheck"):
    pytest.skip("this version of transformers has no deferred stop check", allow_module_level=True)


class Event:
    """Stands for a device event: on the CPU everything has happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(generate, "DEFERRING_DEVICES", frozenset({"cpu"}))


@pytest.fixture
def model():
    return tiny_model("llama")


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 0, **options})


def greedy(module, inputs, **kwargs):
    return module.generate(**inputs, **{"max_new_tokens": 20, "do_sample": False, **kwargs})


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("ends", [True, False])
def test_tokens_are_the_same_and_transformers_is_as_before(interpreted, model, cache, padded, ends):
    inputs = prompt(tokens=20, padded=padded, batch=2 if padded else 1)
    before = utils.DeferredStopCheck.__dict__["is_supported"]
    arguments = {"cache_implementation": "static"} if cache == "static" else {}
    if ends:
        arguments["eos_token_id"] = int(greedy(model, inputs)[0, 29])
        arguments["pad_token_id"] = 0
    expected = greedy(model, inputs, **arguments)
    module = compiled(model)
    for number in (1, 2):
        assert torch.equal(greedy(module, inputs, **arguments), expected)
        assert ckv_compile.explain(module, show=False).deferred_stops == number
    assert "did not wait for their stop check: 2" in str(ckv_compile.explain(module, show=False))
    assert utils.DeferredStopCheck.__dict__["is_supported"] is before
    assert generate._deferring == {}


def test_a_cache_that_is_returned_holds_no_token_of_the_step_that_was_undone(interpreted, model):
    inputs = prompt(tokens=20, batch=1)
    end = {"eos_token_id": int(greedy(model, inputs)[0, 29]), "pad_token_id": 0, "return_dict_in_generate": True}
    expected = greedy(model, inputs, **end)
    module = compiled(model)
    out = greedy(module, inputs, **end)
    name = "cache" if "cache" in out else "past_key_values"
    assert torch.equal(out.sequences, expected.sequences)
    assert out[name].get_seq_length() == expected[name].get_seq_length()
    ids = torch.cat([out.sequences, out.sequences[:, :5]], 1)
    again = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(
        greedy(module, again, past_key_values=out[name]), greedy(model, again, past_key_values=expected[name])
    )
    assert ckv_compile.explain(module, show=False).deferred_stops == 2


def test_a_static_cache_of_the_callers_is_not_deferred(interpreted, model):
    inputs = prompt(tokens=20, batch=1)
    module = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(greedy(module, inputs, past_key_values=cache), greedy(model, inputs))
    assert ckv_compile.explain(module, show=False).deferred_stops == 0
    cache = DynamicCache(config=model.config)
    greedy(module, inputs, past_key_values=cache)
    assert ckv_compile.explain(module, show=False).deferred_stops == 1


def test_the_option_turns_it_off(interpreted, model):
    module = compiled(model, deferred_stop=False)
    inputs = prompt(tokens=20)
    assert torch.equal(greedy(module, inputs), greedy(model, inputs))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.deferred_stops == 0
    assert "stop check" not in str(explanation)


def test_other_devices_and_other_models_are_left_alone(interpreted, model, monkeypatch):
    monkeypatch.setattr(generate, "DEFERRING_DEVICES", frozenset({"cuda"}))
    module = compiled(model)
    greedy(module, prompt(tokens=20))
    assert ckv_compile.explain(module, show=False).deferred_stops == 0


def test_without_it_in_transformers_nothing_happens(interpreted, model, monkeypatch):
    monkeypatch.delattr(utils, "DeferredStopCheck")
    with generate.deferred_stop_check() as deferred:
        assert deferred == []


def test_an_error_restores_transformers(interpreted, model):
    before = utils.DeferredStopCheck.__dict__["is_supported"]
    with pytest.raises(ZeroDivisionError), generate.deferred_stop_check(), generate.deferred_stop_check():
        raise ZeroDivisionError
    assert utils.DeferredStopCheck.__dict__["is_supported"] is before
