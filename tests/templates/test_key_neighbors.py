"""The kernel of ``ckv::key_neighbors`` against cosines in float64, on caches that are NaN outside of what is read."""

import pytest
import torch
import torch.nn.functional as F

import ckv_compile.ops  # noqa: F401
from ckv_compile.kernels import key_neighbors as kernel
from ckv_compile.testing import random_cache

SINKS = 3
SMALL = {"BLOCK_M": 32, "BLOCK_N": 32}


def case(device, first=(0,), start=0, stop=100, heads=2, dim=64, dtype=torch.float32, layout="slab"):
    key = random_cache(len(first), heads, stop + 9, dim, [min(f, stop) for f in first], stop, dtype, layout)
    return key.to(device), list(first), start, stop


def check(key, first, start, stop, size, kappa=8, **tuned):
    """Each list holds the largest cosines of its block, up to what products in float32 lose."""
    given = torch.tensor(first, dtype=torch.int32)
    found = kernel.key_neighbors(key[:, :, :1], given, start, stop, size, kappa, SINKS, **{**SMALL, **tuned}).cpu()
    assert found.dtype == torch.int32
    assert found.shape == (len(first), key.shape[1], stop - start, kappa)
    for row, pads in enumerate(first):
        for head in range(key.shape[1]):
            for begin in range(start, stop, size):
                end = min(begin + size, stop)
                unit = F.normalize(key[row, head, begin:end].cpu().double().nan_to_num(), dim=1)
                position = torch.arange(end - begin)
                candidate = (position < position[:, None]) & (position + begin >= pads + SINKS)
                cosine = torch.where(candidate, unit @ unit.T, -torch.inf)
                best = torch.topk(cosine, min(kappa, end - begin)).values
                best = F.pad(best, (0, kappa - best.shape[1]), value=-torch.inf)
                listed = found[row, head, begin - start : end - start].long()
                own = torch.where(listed >= 0, cosine.gather(1, listed.clamp(min=0)), -torch.inf)
                torch.testing.assert_close(own, best, atol=2e-6, rtol=0)
                ordered = listed.sort(1).values
                assert not (ordered.diff(dim=1).eq(0) & ordered[:, 1:].ge(0)).any(), "a key twice"
    return found


@pytest.mark.parametrize(
    ("first", "start", "stop", "size"),
    [
        ([0], 0, 100, 40), ([0, 9], 10, 137, 127), ([0, 33], 0, 64, 64), ([70], 13, 90, 30), ([0], 5, 6, 4),
        ([0, 200], 0, 97, 97), ([2], 64, 129, 32),
    ],
)  # fmt: skip
def test_lists_hold_the_nearest_earlier_nodes_of_the_block(device, first, start, stop, size):
    check(*case(device, first, start, stop), size)


@pytest.mark.parametrize("kappa", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("keys", [32, 64, 128])
def test_every_kappa_and_block(device, kappa, keys):
    check(*case(device, stop=150), 150, kappa, BLOCK_N=keys)


@pytest.mark.parametrize("layout", ["slab", "static"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_dim(device, dim, layout):
    check(*case(device, stop=70, dim=dim, layout=layout), 50, 4)


def test_every_dtype(device, dtype):
    check(*case(device, [0, 6], stop=90, dtype=dtype), 60, 4)


@pytest.mark.parametrize("size", [1e-18, 1e-4, 300.0, 1e15])
def test_lengths_do_not_matter(device, size):
    key, *span = case(device, stop=80)
    key *= size
    key[:, :, 1::3] *= 7.0
    check(key, *span, 80, 4)


def test_equal_keys_are_all_neighbours_of_each_other(device):
    key, *span = case(device, stop=90)
    key[:, :, 20:60] = key[:, :, 20:21]
    found = check(key, *span, 90, 4)
    assert found[:, :, 30:60].ge(20).all()


def test_opposite_and_zero_keys(device):
    key, *span = case(device, stop=60)
    key[:, :, 30:60] = -key[:, :, :30]
    key[:, :, 10:15] = 0
    check(key, *span, 60, 8)


def test_blocks_at_once_are_the_blocks_one_by_one(device):
    key, first, start, stop = case(device, [0, 20], 8, 120)
    together = check(key, first, start, stop, 40)
    parts = [check(key, first, begin, min(begin + 40, stop), 40) for begin in range(start, stop, 40)]
    assert torch.equal(together, torch.cat(parts, 2))


def test_descriptors_read_the_same(device):
    arguments = (*case(device, [0, 20], 8, 150), 140)
    assert torch.equal(check(*arguments), check(*arguments, TMA=True))


def test_default_configuration(device):
    key, *span = case(device, stop=300, heads=1, dim=128)
    check(key, *span, 256, BLOCK_M=64, BLOCK_N=128)


def test_what_the_kernel_does_not_do_is_left_to_the_reference():
    key = torch.zeros(1, 1, 1, 64)
    assert kernel.applies(key, 2048, 8, join_heads=False)
    assert not kernel.applies(key, 2048, 8, join_heads=True)
    assert not kernel.applies(key, 8193, 8, join_heads=False)
    assert not kernel.applies(key, 2048, 17, join_heads=False)
    assert not kernel.applies(key.double(), 2048, 8, join_heads=False)
