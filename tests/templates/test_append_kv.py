import dataclasses

import pytest
import torch

from ckv_compile import rendered
from ckv_compile.testing import random_index


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 64), (80, 128)])
def test_new_tokens_land_behind_the_length_and_nowhere_else(device, tokens, dim, value_dim):
    batch, heads, capacity, length = 2, 3, 300, 290
    key, value = (torch.zeros(capacity, batch, heads, width, device=device) for width in (dim, value_dim))
    new = [torch.randn(batch, heads, tokens, width, device=device) for width in (dim, value_dim)]
    new[1] = new[1].transpose(1, 2).contiguous().transpose(1, 2)  # any strides
    nominal = [cache[:128].permute(1, 2, 0, 3) for cache in (key, value)]
    position = torch.tensor([length], dtype=torch.int32, device=device)
    at = rendered.append_kv(*nominal, *new, position)
    assert torch.equal(at.cpu(), (torch.arange(tokens) + length).int().expand(batch, heads, tokens))
    for cache, added in zip((key, value), new, strict=True):
        assert torch.equal(cache[length : length + tokens], added.permute(2, 0, 1, 3))
        cache[length : length + tokens] = 0
        assert not cache.any()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("graphs", [1, 2, 4])  # one of all KV heads, one of each, one of each query head
@pytest.mark.parametrize("score", ["max", "softmax", "recency"])
def test_route_appends_besides(device, tokens, graphs, score):
    batch, kv_heads, dim, value_dim, capacity, length = 2, 2, 48, 32, 300, 290
    index = random_index(
        batch, graphs, dim * (kv_heads if graphs == 1 else 1), [0] * batch, [60] * batch, 21, num_sink_tokens=4,
        communities_room=30,
    )  # fmt: skip
    state = type(index)(**{f.name: getattr(index, f.name).to(device) for f in dataclasses.fields(index)})
    query = torch.randn(batch, 4, tokens, dim, device=device)
    caches = [torch.zeros(capacity, batch, kv_heads, width, device=device) for width in (dim, value_dim)]
    new = [torch.randn(batch, kv_heads, tokens, width, device=device) for width in (dim, value_dim)]
    new[1] = new[1].transpose(1, 2).contiguous().transpose(1, 2)  # any strides
    nominal = [cache[:128].permute(1, 2, 0, 3) for cache in caches]
    position = torch.tensor([length], dtype=torch.int32, device=device)
    small = {
        "PROGRAMS": 2,
        "QUOTA": 8,
        "RUN": 4,
        "BLOCK_C": 16,
        "CHUNK": 32,
        "num_warps": 1,
    }  # a block is that of one warp
    arguments = (query, state, 0, graphs, kv_heads, 0.3, score, position, 16)
    alone = rendered.route(*arguments, **small)
    scores = state.scores.clone()
    found = rendered.route(*arguments, new=(*nominal, *new), **small)
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    assert torch.equal(scores.nan_to_num(), state.scores.nan_to_num())
    for cache, added in zip(caches, new, strict=True):
        assert torch.equal(cache[length : length + tokens], added.permute(2, 0, 1, 3))
        cache[length : length + tokens] = 0
        assert not cache.any()
