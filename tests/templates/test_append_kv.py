import pytest
import torch

from ckv_compile import rendered


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
