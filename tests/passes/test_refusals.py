"""Attention that is left alone, with its reason: one entry for each, and nothing invisible."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from ckv_compile.passes.match_attention import Cache, find_sites
from ckv_compile.testing import Captured, CaptureGraphs, capture_call, capture_generate, prompt, tiny_model


def reasons(captured: Captured) -> list[str]:
    """Reasons of a graph in which nothing matched, in the order of its attention."""
    sites, refusals = find_sites(captured.gm)
    assert not sites
    assert [refusal.index for refusal in refusals] == list(range(len(refusals)))
    return [refusal.reason for refusal in refusals]


WINDOW = "sliding window attention (each query sees only the last 8 tokens)"

# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_layers_with_a_sliding_window_are_named_with_their_window(cache):
    for captured in capture_generate(tiny_model("mistral_window"), prompt(padded=True), cache=cache, new_tokens=2):
        assert reasons(captured) == [WINDOW, WINDOW]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_mixed_model_matches_its_full_layers_only(cache):
    for captured in capture_generate(tiny_model("gemma3"), prompt(), cache=cache, new_tokens=2):
        sites, refusals = find_sites(captured.gm)
        assert [(site.index, site.name) for site in sites] == [(1, "model.layers.1.self_attn")]
        assert [(r.index, r.name, r.reason) for r in refusals] == [(0, "model.layers.0.self_attn", WINDOW)]


def test_a_window_shows_in_the_mask_when_the_cache_does_not_know_it():
    torch._dynamo.reset()
    model, backend = tiny_model("mistral_window"), CaptureGraphs()
    model.compile(backend=backend)
    cache = transformers.DynamicCache()
    inputs = prompt(padded=True)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        model(
            inputs["input_ids"][:, :1],
            attention_mask=F.pad(inputs["attention_mask"], (0, 1), value=1),
            past_key_values=cache,
        )
    assert len(backend.graphs) == 2
    for captured in backend.graphs:
        assert reasons(captured) == [WINDOW, WINDOW]


def test_attention_weights_that_the_caller_asks_for_are_refused():
    torch._dynamo.reset()
    backend = CaptureGraphs()
    with torch.no_grad():
        compiled = torch.compile(tiny_model("llama", "eager", num_hidden_layers=1), backend=backend)
        compiled(**prompt(), use_cache=True, output_attentions=True)
    found = [reason for captured in backend.graphs for reason in reasons(captured)]
    assert found == ["the attention weights are returned too (output_attentions)"]


def test_softcap_is_reported_for_every_layer():
    found = reasons(capture_call(tiny_model("gemma2", "eager"), **prompt(), use_cache=True))
    assert len(found) == 2
    assert all("softcap" in reason for reason in found)


def test_a_router_softmax_is_not_taken_for_attention():
    config = transformers.MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, sliding_window=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    sites, refusals = find_sites(capture_call(model, **prompt(), use_cache=True).gm)
    assert (len(sites), refusals) == (1, [])


def test_flex_attention_is_reported():
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, enable_gqa=True)

    shapes = [(1, heads, 16, 16) for heads in (4, 2, 2)]
    found = reasons(capture_call(attend, *(torch.randn(shape) for shape in shapes)))
    assert found == ["flex_attention without a block mask, or with one that is made in the same graph"]


def test_an_encoder_decoder_leaves_the_encoder_and_cross_attention_alone():
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    torch._dynamo.reset()
    backend = CaptureGraphs()
    model.compile(backend=backend)
    features, tokens = torch.randn(1, 8, 40), torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        first = model(input_features=features, decoder_input_ids=tokens, use_cache=True)
        encoded = transformers.modeling_outputs.BaseModelOutput(first.encoder_last_hidden_state)
        model(encoder_outputs=encoded, decoder_input_ids=tokens[:, :1], past_key_values=first.past_key_values)
    found = [
        find_sites(captured.gm) for captured in backend.graphs
    ]  # torch 2.11 breaks it at the encoder, and names start there
    sites = [site for graph, _ in found for site in graph]
    assert [site.cache for site in sites] == [Cache.EMPTY, Cache.DYNAMIC]
    assert all(site.name.endswith("layers.0.self_attn") for site in sites)
    refusals = [refusal for _, graph in found for refusal in graph]
    assert [refusal.name.rsplit(".", 1)[1] for refusal in refusals] == ["self_attn", "encoder_attn", "encoder_attn"]
    assert refusals[0].reason == "not causal: every query sees every key"
    assert all(refusal.reason.startswith("cross-attention") for refusal in refusals[1:])


# ---------------------------------------------------------------------- arguments and inputs of a model


def test_dropout_is_refused_with_its_value():
    model = tiny_model("llama", attention_dropout=0.1).train()
    assert (
        reasons(capture_call(model, **prompt(), use_cache=False))
        == ["dropout_p is 0.1; only inference is rewritten"] * 2
    )


def test_a_call_that_records_gradients_is_refused():
    torch._dynamo.reset()
    backend = CaptureGraphs()
    torch.compile(tiny_model("llama"), backend=backend)(**prompt(), use_cache=False)
    assert all(reason.startswith("gradients are recorded") for reason in reasons(backend.graphs[0]))


def test_float64_is_refused():
    found = reasons(capture_call(tiny_model("llama").double(), **prompt(), use_cache=False))
    assert found == ["dtype float64; supported are float32, bfloat16, float16"] * 2


def test_a_head_dim_without_an_operator_is_refused():
    found = reasons(capture_call(tiny_model("llama", head_dim=4), **prompt(), use_cache=False))
    assert found == ["head_dim 4; supported are multiples of 8 from 16 to 256"] * 2


def test_a_mask_of_the_caller_is_refused():
    inputs = prompt()
    inputs["attention_mask"] = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    found = reasons(capture_call(tiny_model("llama"), **inputs, use_cache=True))
    assert all("4-D tensor given by the caller" in reason for reason in found)


def test_an_additive_mask_is_refused():
    inputs = prompt()
    inputs["attention_mask"] = torch.zeros(2, 1, 9, 9)
    found = reasons(capture_call(tiny_model("llama"), **inputs, use_cache=True))
    assert all("additive 4-D tensor given by the caller" in reason for reason in found)


def test_packed_sequences_are_refused():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]] * 2)
    captured = capture_call(
        tiny_model("llama"), input_ids=prompt()["input_ids"], position_ids=positions, use_cache=False
    )
    found = reasons(captured)
    assert len(found) == 2
    assert all("position_ids" in reason for reason in found)


def test_attention_in_a_nested_graph_is_reported():
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query * 2, key, value, is_causal=True)

        return torch.utils.checkpoint.checkpoint(attend, query, key, value, use_reentrant=False)

    found = reasons(capture_call(run, *(torch.randn(1, 2, 5, 16) for _ in range(3))))
    assert len(found) == 1
    assert "nested graph" in found[0]


# ---------------------------------------------------------------------- near misses: small changes of meaning


class Attention(nn.Module):
    """One attention layer whose pieces can be replaced one at a time."""

    heads, kv_heads, dim = 4, 2, 16

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, self.heads * self.dim)
        self.key = nn.Linear(64, self.kv_heads * self.dim)
        self.value = nn.Linear(64, self.kv_heads * self.dim)
        self.output = nn.Linear(64, 64)

    def join(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past, new], dim=-2)

    def read(self, cache: Tensor) -> Tensor:
        rows, heads, tokens, dim = cache.shape
        return cache[:, :, None].expand(rows, heads, 2, tokens, dim).reshape(rows, heads * 2, tokens, dim)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def mask(self, num_queries: int, num_keys: int) -> Tensor | None:
        query = torch.arange(num_queries)[:, None] + num_keys - num_queries
        return self.sees(query, torch.arange(num_keys)[None, :])[None, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.mask(query.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(query, self.read(key), self.read(value), attn_mask=mask)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = hidden.shape
        return tuple(
            layer(hidden).view(rows, tokens, -1, self.dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.project(hidden)
        keys, values = self.join(keys, key), self.join(values, value)
        out = self.attend(query, keys, values).transpose(1, 2).reshape(*hidden.shape[:2], 64)
        return self.output(out), keys, values


def run(module: nn.Module, tokens: int = 3, past: int = 6) -> Captured:
    shape = (2, Attention.kv_heads, past, Attention.dim)
    return capture_call(module, torch.randn(2, tokens, 64), torch.randn(shape), torch.randn(shape))


def variant(**methods) -> nn.Module:
    return type("Variant", (Attention,), methods)()


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_unchanged_layer_matches(tokens):
    sites, refusals = find_sites(run(Attention(), tokens).gm)
    assert not refusals
    assert [(site.cache, site.is_decode) for site in sites] == [(Cache.DYNAMIC, tokens == 1)]


def refused(module: nn.Module, tokens: int = 3) -> str:
    found = reasons(run(module, tokens))
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("sees", "reason"),
    [
        (lambda self, query, key: key < query, "shifted by -1"),
        (lambda self, query, key: key <= query + 1, "shifted by 1"),
        (lambda self, query, key: key >= query, "not a causal rule"),
        (lambda self, query, key: (key <= query) & (key > query - 4), "only the last 4 tokens"),
        (lambda self, query, key: (key <= query) & (query - key < 4), "only the last 4 tokens"),
        (lambda self, query, key: (key <= query) | (key < 2), "allows more than the causal rule"),
        (lambda self, query, key: (key <= query) & (key // 4 == query // 4), "chunked"),
        (lambda self, query, key: (key <= query) & (key != 2), "not a causal rule"),
        (lambda self, query, key: (key <= query) ^ (key == 0), "not a causal rule"),
        (lambda self, query, key: (key >= 0) & (query >= 0), "queries also see keys after"),
        (lambda self, query, key: key * 2 <= query, "not a causal rule"),
    ],
)
def test_a_mask_with_another_rule_is_refused(sees, reason):
    assert reason in refused(variant(sees=sees))


@pytest.mark.parametrize(
    "sees",
    [
        lambda self, query, key: query >= key,
        lambda self, query, key: key < query + 1,
        lambda self, query, key: ~(key > query),
        lambda self, query, key: (key - query) <= 0,
        lambda self, query, key: (key <= query) & (key >= 0) & (query >= 0),
        lambda self, query, key: (key <= query).logical_and(key < 100),
        lambda self, query, key: torch.where(key > query, False, True),
    ],
)
def test_the_causal_rule_matches_however_it_is_written(sees):
    sites, refusals = find_sites(run(variant(sees=sees)).gm)
    assert (len(sites), refusals) == (1, [])


def test_a_lower_right_triangle_matches_and_an_upper_left_one_does_not():
    def triangle(self, num_queries, num_keys):
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)

    def upper_left(self, num_queries, num_keys):
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril()

    assert len(find_sites(run(variant(mask=triangle)).gm)[0]) == 1
    assert "sees keys 0..i" in refused(variant(mask=upper_left))


def test_causal_alignment_to_the_first_key_is_refused_with_a_filled_cache():
    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    assert "is_causal=True counts from the first" in refused(variant(attend=attend))
    assert "is_causal=True counts from the first" in refused(variant(attend=attend), tokens=1)


def test_several_queries_without_a_mask_are_not_causal():
    module = variant(mask=lambda self, num_queries, num_keys: None)
    assert refused(module) == "not causal: every query sees every key"
    assert len(find_sites(run(module, 1).gm)[0]) == 1


@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_that_are_scaled_after_the_cache_are_refused(tokens):
    def attend(self, query, key, value):
        return Attention.attend(self, query, key * 2, value)

    assert "changed between the cache and the attention" in refused(variant(attend=attend), tokens)


def test_a_cache_that_is_read_from_its_end_is_a_window():
    """What a sliding-window layer reads while it records what left its window."""

    def attend(self, query, key, value):
        seen = 5 + query.shape[2] - 1
        return Attention.attend(self, query, key[:, :, -seen:, :], value[:, :, -seen:, :])

    for tokens in (1, 3):
        captured = run(variant(attend=attend), tokens)
        _, (refusal,) = find_sites(captured.gm)
        assert refusal.reason == "sliding window attention (each query sees only the last 5 tokens)"
        assert refusal.local


def test_a_window_that_begins_at_a_count_of_the_host_is_a_window():
    """Neither bound is known: how the count compares with the window, dynamo did not see."""

    class Counting(Attention):
        def forward(self, hidden, keys, values, counted):
            count = counted.shape[0]
            begin = torch.sym_max(count - 7, 0)  # of the keys that the cache holds
            query, key, value = self.project(hidden)
            keys, values = self.join(keys, key), self.join(values, value)
            last = torch.arange(hidden.shape[1])[:, None] + count
            position = torch.arange(keys.shape[2])[None] + begin
            mask = ((position <= last) & (position > last - 8))[None, None]
            out = F.scaled_dot_product_attention(query, self.read(keys), self.read(values), attn_mask=mask)
            return self.output(out.transpose(1, 2).reshape(*hidden.shape[:2], 64)), keys, values

    shape = (2, Attention.kv_heads, 7, Attention.dim)
    counted = torch.zeros(9)
    torch._dynamo.mark_dynamic(counted, 0)
    captured = capture_call(Counting(), torch.randn(2, 1, 64), torch.randn(shape), torch.randn(shape), counted)
    _, (refusal,) = find_sites(captured.gm)
    assert refusal.reason == "sliding window attention (each query sees only the last 8 tokens)"
    assert refusal.local


def test_swapped_caches_are_refused():
    def forward(self, hidden, keys, values):
        return Attention.forward(self, hidden, values, keys)

    assert "not the halves of one cache" in refused(variant(forward=forward))


def test_values_from_the_cache_of_keys_are_refused():
    def attend(self, query, key, value):
        return Attention.attend(self, query, key, key)

    assert "not the halves of one cache" in refused(variant(attend=attend))


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (lambda self, past, new: torch.cat([new, past], dim=-2), "not an input of the graph|before the cached ones"),
        (lambda self, past, new: torch.cat([past, new, new], dim=2), "put together from 3 parts|own"),
        (lambda self, past, new: torch.cat([past * 2, new], dim=2), "not an input of the graph but computed"),
        (lambda self, past, new: torch.cat([past[:, :, :3], new], dim=2), "not an input of the graph but computed"),
    ],
)
def test_a_cache_that_is_joined_in_another_way_is_refused(join, reason):
    assert any(part in refused(variant(join=join)) for part in reason.split("|"))


def test_a_cache_that_is_joined_along_heads_is_refused():
    class Heads(Attention):
        def forward(self, hidden, keys, values):
            query, key, value = self.project(hidden)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True), keys, values

    found = reasons(run(Heads(), tokens=6, past=6))
    assert found == ["K or V is concatenated along dimension 1, not along the tokens"]


def test_a_cache_that_is_not_returned_is_refused():
    def forward(self, hidden, keys, values):
        return Attention.forward(self, hidden, keys, values)[0]

    assert "not returned as the updated cache" in refused(variant(forward=forward))


def test_a_cache_that_something_else_reads_is_refused():
    def forward(self, hidden, keys, values):
        out, keys, values = Attention.forward(self, hidden, keys, values)
        return out + keys.mean(), keys, values

    assert "also read by something else" in refused(variant(forward=forward))


def test_a_past_that_something_else_reads_is_refused():
    def forward(self, hidden, keys, values):
        out, new_keys, new_values = Attention.forward(self, hidden, keys, values)
        return out + values.mean(), new_keys, new_values

    assert "cached K or V is also read by" in refused(variant(forward=forward))


def test_attention_that_shares_a_cache_is_refused_twice():
    def attend(self, query, key, value):
        return Attention.attend(self, query, key, value) + Attention.attend(self, query * 2, key, value)

    found = reasons(run(variant(attend=attend)))
    assert len(found) == 2
    assert all("something else" in reason or "shared" in reason for reason in found)


@pytest.mark.parametrize(
    "read",
    [
        lambda self, cache: cache[:, None].expand(2, 2, 2, -1, 16).reshape(2, 4, -1, 16),  # heads 0 1 0 1
        lambda self, cache: torch.cat([cache, cache], 1),
        lambda self, cache: cache.repeat(1, 2, 1, 1),
        lambda self, cache: cache.flip(1).repeat_interleave(2, 1),
        lambda self, cache: cache.repeat_interleave(2, 1).flip(2),
    ],
)
def test_heads_that_are_repeated_in_another_order_are_refused(read):
    refused(variant(read=read))


@pytest.mark.parametrize(
    "read",
    [
        lambda self, cache: cache.repeat_interleave(2, dim=1),
        lambda self, cache: cache.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(2, 4, -1, 16),
        lambda self, cache: Attention.read(self, cache).contiguous(),
        lambda self, cache: Attention.read(self, cache.transpose(1, 2).contiguous().transpose(1, 2)),
    ],
)
def test_heads_that_are_repeated_in_order_match_however_it_is_written(read):
    sites, refusals = find_sites(run(variant(read=read)).gm)
    assert (len(sites), refusals) == (1, [])


def test_groups_of_different_size_for_keys_and_values_are_refused():
    class Uneven(Attention):
        def forward(self, hidden, keys, values):
            query, key, value = self.project(hidden)
            keys, values = self.join(keys, key), self.join(values, torch.cat([value, value], 1))
            mask = self.mask(query.shape[2], keys.shape[2])
            return F.scaled_dot_product_attention(query, self.read(keys), values, attn_mask=mask), keys, values

    shape = (2, 2, 6, 16)
    captured = capture_call(Uneven(), torch.randn(2, 3, 64), torch.randn(shape), torch.randn(2, 4, 6, 16))
    assert "in groups of equal size" in reasons(captured)[0]


@pytest.mark.parametrize(("repeated", "matches"), [((), True), (("keys", "values"), True), (("values",), False)])
def test_one_head_is_read_by_all_query_heads(repeated, matches):
    """Broadcast by torch or repeated by the model; not one of them each way."""

    class OneHead(Attention):
        def forward(self, hidden, keys, values):
            query, key, value = self.project(hidden)
            keys, values = self.join(keys, key[:, :1]), self.join(values, value[:, :1])
            read = {
                name: one.repeat_interleave(4, dim=1) if name in repeated else one
                for name, one in (("keys", keys), ("values", values))
            }
            mask = self.mask(query.shape[2], keys.shape[2])
            out = F.scaled_dot_product_attention(query, read["keys"], read["values"], attn_mask=mask)
            return out, keys, values

    shape = (2, 1, 6, 16)
    captured = capture_call(OneHead(), torch.randn(2, 3, 64), torch.randn(shape), torch.randn(shape))
    sites, refusals = find_sites(captured.gm)
    assert len(sites) == matches
    if matches:
        assert (sites[0].num_query_heads, sites[0].num_kv_heads) == (4, 1)
    else:
        assert "in groups of equal size" in refusals[0].reason


def test_arguments_by_position_match_like_arguments_by_name():
    def attend(self, query, key, value):
        mask = self.mask(query.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(query, self.read(key), self.read(value), mask, 0.0, False)

    (site,), refusals = find_sites(run(variant(attend=attend)).gm)
    assert not refusals
    assert site.scale == 0.25


def test_a_view_of_the_output_stays_with_the_caller():
    def attend(self, query, key, value):
        return Attention.attend(self, query, key, value).view(2, 4, 1, 16)

    captured = run(variant(attend=attend), 1)
    (site,), _ = find_sites(captured.gm)
    assert [user.target for user in site.node.users] == ["view"]


@pytest.mark.parametrize("rows", [1, 2])
def test_padding_of_another_row_or_of_queries_is_refused(rows):
    class Padded(Attention):
        def forward(self, hidden, keys, values, padding, which: int):
            query, key, value = self.project(hidden)
            keys, values = self.join(keys, key), self.join(values, value)
            causal = self.mask(query.shape[2], keys.shape[2])
            padding = padding.bool()
            by_key = padding[:, None, None, :]
            allowed = (by_key, padding[:, None, :3, None], padding.flip(0)[:, None, None, :], ~by_key)[which]
            mask = causal & allowed
            return (
                F.scaled_dot_product_attention(query, self.read(keys), self.read(values), attn_mask=mask),
                keys,
                values,
            )

    shape = (rows, 2, 6, 16)
    for which in range(4):
        captured = capture_call(
            Padded(), torch.randn(rows, 3, 64), torch.randn(shape), torch.randn(shape), torch.ones(rows, 9), which
        )
        sites, refusals = find_sites(captured.gm)
        assert len(sites) + len(refusals) == 1
        assert not sites  # a float padding mask is not taken for one of numbers or bools
        captured = capture_call(
            Padded(),
            torch.randn(rows, 3, 64),
            torch.randn(shape),
            torch.randn(shape),
            torch.ones(rows, 9).long(),
            which,
        )
        sites, _ = find_sites(captured.gm)
        assert [site.padding.name for site in sites] == (["l_padding_"] if which == 0 else [])


class StaticAttention(Attention):
    """Writes into a buffer of 12 tokens that the caller keeps."""

    def write(self, buffer: Tensor, position: Tensor, new: Tensor) -> Tensor:
        buffer.index_copy_(2, position, new)
        return buffer

    def position(self, count: Tensor, num_queries: int) -> Tensor:
        return torch.arange(num_queries) + count

    def static_mask(self, position: Tensor, num_keys: int) -> Tensor | None:
        return (torch.arange(num_keys)[None, :] <= position[:, None])[None, None]

    def forward(self, hidden, keys, values, count):
        query, key, value = self.project(hidden)
        position = self.position(count, query.shape[2])
        mask = self.static_mask(position, keys.shape[2])
        keys, values = self.write(keys, position, key), self.write(values, position, value)
        out = F.scaled_dot_product_attention(query, self.read(keys), self.read(values), attn_mask=mask)
        return self.output(out.transpose(1, 2).reshape(*hidden.shape[:2], 64))


def run_static(module: nn.Module, tokens: int = 3, count: Tensor | None = None) -> Captured:
    count = torch.tensor(4) if count is None else count
    return capture_call(module, torch.randn(2, tokens, 64), torch.zeros(2, 2, 12, 16), torch.zeros(2, 2, 12, 16), count)


def static_variant(**methods) -> nn.Module:
    return type("StaticVariant", (StaticAttention,), methods)()


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_static_cache_of_a_hand_written_layer_matches(tokens):
    (site,), refusals = find_sites(run_static(StaticAttention(), tokens).gm)
    assert not refusals
    assert (site.cache, site.is_decode, site.starts_empty) == (Cache.STATIC, tokens == 1, False)
    assert site.key_cache is site.past_key


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_static_cache_without_a_mask_is_refused(tokens):
    module = static_variant(static_mask=lambda self, position, num_keys: None)
    assert "sees the whole static cache" in reasons(run_static(module, tokens))[0]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_static_mask_that_does_not_follow_the_written_position_is_refused(tokens):
    def shifted(self, position, num_keys):
        return StaticAttention.static_mask(self, position + 1, num_keys)

    def from_zero(self, position, num_keys):
        return StaticAttention.static_mask(self, torch.arange(position.shape[0]), num_keys)

    assert "shifted by 1" in reasons(run_static(static_variant(static_mask=shifted), tokens))[0]
    assert "counts from the first key" in reasons(run_static(static_variant(static_mask=from_zero), tokens))[0]


def test_a_counter_that_moves_before_the_position_is_read_is_refused():
    def position(self, count, num_queries):
        count.add_(num_queries)
        return torch.arange(num_queries) + count

    assert "after it was written in place" in reasons(run_static(static_variant(position=position)))[0]


def test_positions_that_need_not_be_consecutive_are_refused():
    module = static_variant(position=lambda self, count, num_queries: count)
    assert "consecutive" in reasons(run_static(module, 3, torch.tensor([4, 5, 6])))[0]
    (site,), _ = find_sites(run_static(module, 1, torch.tensor([4])).gm)
    assert site.position.op == "placeholder"


@pytest.mark.parametrize(
    "write",
    [
        lambda self, buffer, position, new: buffer.index_copy_(2, position, new).mul_(2),
        lambda self, buffer, position, new: buffer.index_copy_(2, position, new).roll(1, 2),
        lambda self, buffer, position, new: buffer.index_copy(2, position, new),
        lambda self, buffer, position, new: buffer.index_add_(2, position, new),
        lambda self, buffer, position, new: buffer.index_copy_(2, position, new.flip(2)).index_copy_(2, position, new),
    ],
)
def test_a_static_cache_that_is_written_in_another_way_is_refused(write):
    assert len(reasons(run_static(static_variant(write=write)))) == 1
