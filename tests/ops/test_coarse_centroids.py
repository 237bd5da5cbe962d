import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.config import GROUP

coarse_centroids = torch.ops.ckv.coarse_centroids


def case(groups=3, dim=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = 2, 2, groups * GROUP
    code = torch.randint(-127, 128, (*shape, dim), generator=generator, dtype=torch.int8)
    scale = torch.rand(shape, generator=generator)
    size = torch.randint(1, 30, shape, generator=generator, dtype=torch.int32)
    return code, scale, size


def oracle(code, scale, size):
    """(mean, spread) [B, G, K, D] in float64, one group after another."""
    batch, graphs, communities, dim = code.shape
    mean, spread = (torch.zeros(batch, graphs, communities // GROUP, dim, dtype=torch.float64) for _ in range(2))
    for row in range(batch):
        for graph in range(graphs):
            for group in range(communities // GROUP):
                ids = [c for c in range(group * GROUP, (group + 1) * GROUP) if size[row, graph, c] > 0]
                tokens = [code[row, graph, c].double() * scale[row, graph, c].double() for c in ids]
                tokens = [x for c, x in zip(ids, tokens, strict=True) for _ in range(int(size[row, graph, c]))]
                if tokens:
                    every = torch.stack(tokens)
                    mean[row, graph, group] = every.mean(0)
                    spread[row, graph, group] = every.std(0, correction=0)
    return mean, spread


def test_mean_and_spread_are_those_of_every_token_at_its_centroid():
    code, scale, size = case()
    got, steps = coarse_centroids(code, scale, size)
    for part, want in enumerate(oracle(code, scale, size)):
        decoded = got[:, :, :, part].double() * steps[..., part, None].double()
        error = (decoded - want).abs()
        assert (error <= 0.501 * steps[..., part, None].double() + 1e-6).all()
        assert torch.equal(steps[..., part] > 0, want.abs().amax(-1) > 0)


def test_a_group_of_equal_centroids_has_no_spread():
    code, scale, size = case(groups=1)
    code[:], scale[:] = code[:, :, :1].clone(), 0.5
    got, steps = coarse_centroids(code, scale, size)
    assert steps[..., 1].abs().max() < 1e-4
    torch.testing.assert_close(
        got[:, :, 0, 0].float() * steps[:, :, 0, 0, None], code[:, :, 0].float() * 0.5, rtol=0, atol=0.26
    )


def test_communities_without_members_do_not_count():
    code, scale, size = case()
    size[:, :, ::3] = 0
    want = oracle(code, scale, size)
    scale[:, :, ::3] = torch.nan
    got, steps = coarse_centroids(code, scale, size)
    for part in range(2):
        decoded = got[:, :, :, part].double() * steps[..., part, None].double()
        assert ((decoded - want[part]).abs() <= 0.501 * steps[..., part, None].double() + 1e-6).all()


def test_a_group_without_members_says_so():
    code, scale, size = case()
    size[0, 1, GROUP : 2 * GROUP] = 0
    _, steps = coarse_centroids(code, scale, size)
    assert (steps[..., 1] == -1).nonzero().tolist() == [[0, 1, 1]]
    assert steps[0, 1, 1, 0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": torch.zeros(1, 1, 12, 4, dtype=torch.int8)}, "with a multiple of 8 communities, got"),
        ({"code": torch.zeros(2, 2, 24, 10)}, "centroid must be int8, got torch.float32"),
        ({"scale": torch.zeros(2, 2, 23)}, r"centroid_scale must be \(2, 2, 24\), got \(2, 2, 23\)"),
        ({"size": torch.zeros(2, 2, 24)}, "size must be int32 or int64, got torch.float32"),
    ],
)
def test_invalid_argument_is_named(change, message):
    arguments = dict(zip(("code", "scale", "size"), case(), strict=True))
    with pytest.raises(ValueError, match=message):
        coarse_centroids(*(arguments | change).values())


def test_opcheck():
    torch.library.opcheck(coarse_centroids.default, case())
