import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import empty_cache, nominal_cache

append_kv = torch.ops.ckv.append_kv


@pytest.mark.parametrize("layout", ["slab", "static"])
@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 5])
def test_new_tokens_land_behind_length_and_nothing_else_changes(layout, length_dtype, tokens):
    key, value = (empty_cache(2, 3, 20, 80, torch.float32, layout) for _ in range(2))
    key_new, value_new = torch.randn(2, 3, tokens, 80), torch.randn(2, 3, tokens, 80)
    append_kv(nominal_cache(key), nominal_cache(value, 4), key_new, value_new, torch.tensor([7], dtype=length_dtype))
    for cache, new in ((key, key_new), (value, value_new)):
        assert torch.equal(cache[:, :, 7 : 7 + tokens], new)
        assert cache[:, :, :7].isnan().all()
        assert cache[:, :, 7 + tokens :].isnan().all()


def test_slab_shared_by_key_and_value_takes_both():
    slab = torch.zeros(2, 16, 1, 3, 8)
    key, value = slab.permute(0, 2, 3, 1, 4).unbind(0)
    new = torch.ones(1, 3, 1, 8)
    append_kv(nominal_cache(key), nominal_cache(value), new, 2 * new, torch.tensor([9]))
    assert slab[0, 9].eq(1).all()
    assert slab[1, 9].eq(2).all()
    assert slab.sum() == 3 * 24


def test_copy_of_the_nominal_view_raises():
    key = empty_cache(1, 2, 32, 8, torch.float32, "static")
    clone = nominal_cache(key, 4).clone()
    new = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="copy of the nominal view"):
        append_kv(clone, nominal_cache(key), new, new, torch.tensor([5]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_new": torch.randn(1, 3, 1, 8)}, "key_new must match the cache"),
        ({"value_new": torch.randn(1, 2, 2, 8)}, "value_new must hold 1 tokens, got 2"),
        ({"key_new": torch.randn(1, 2, 1, 8).double()}, "key_new must have the cache's dtype"),
        ({"length": torch.tensor([0.5])}, "length must be int32 or int64"),
        ({"length": torch.tensor([1, 2])}, "length must have one element"),
        ({"length": torch.tensor([-1])}, "length must be at least 0, got -1"),
    ],
)
def test_invalid_argument_is_named(change, message):
    arguments = {
        "key": torch.zeros(1, 2, 8, 8),
        "value": torch.zeros(1, 2, 8, 8),
        "key_new": torch.randn(1, 2, 1, 8),
        "value_new": torch.randn(1, 2, 1, 8),
        "length": torch.tensor([0]),
    }
    with pytest.raises(ValueError, match=message):
        append_kv(**{**arguments, **change})


def test_opcheck():
    key, value = torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8)
    new = torch.randn(2, 2, 3, 8)
    torch.library.opcheck(append_kv.default, (key, value, new, new + 1, torch.tensor([4])))
