import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import GARBAGE

community_centroids = torch.ops.ckv.community_centroids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "graphs"), [(3, 3), (3, 9), (3, 1), (1, 1), (1, 7), (2, 4)])
def test_centroid_is_the_mean_key_of_the_graphs_head(heads, graphs, dtype):
    torch.manual_seed(0)
    key = torch.randn(2, heads, 50, 5).to(dtype)
    size = torch.tensor([7, 0, 1, 12], dtype=torch.int32).expand(2, graphs, 4).contiguous()
    start = torch.tensor([20, 3, 0, 2], dtype=torch.int32).expand(2, graphs, 4).contiguous()
    member = torch.full((2, graphs, 40), GARBAGE, dtype=torch.int32)
    member[..., 0] = 49
    for row in range(2):
        for graph in range(graphs):
            member[row, graph, 2:27] = torch.randperm(50)[:25]
    centroid = community_centroids(key, member, start, size)
    assert centroid.dtype == dtype
    for row in range(2):
        for graph in range(graphs):
            for c, (begin, count) in enumerate(zip(start[row, graph].tolist(), size[row, graph].tolist(), strict=True)):
                tokens = member[row, graph, begin : begin + count].long()
                if graphs == 1:
                    own = key[row, :, tokens].double().transpose(0, 1).flatten(1)
                else:
                    own = key[row, graph * heads // graphs, tokens].double()
                want = own.mean(0) if count else torch.zeros(centroid.shape[-1], dtype=torch.float64)
                torch.testing.assert_close(
                    centroid[row, graph, c].double(), want, atol=1e-6, rtol=torch.finfo(dtype).eps
                )


def test_no_communities_give_an_empty_tensor():
    empty = torch.zeros(1, 2, 0, dtype=torch.int32)
    assert community_centroids(torch.randn(1, 2, 4, 8), empty, empty, empty).shape == (1, 2, 0, 8)


def test_result_repeats():
    key = torch.randn(1, 1, 4000, 64)
    member = torch.randperm(4000).int().view(1, 1, -1)
    size = torch.full((1, 1, 4), 1000, dtype=torch.int32)
    start = torch.arange(0, 4000, 1000, dtype=torch.int32).view(1, 1, 4)
    assert torch.equal(*(community_centroids(key, member, start, size) for _ in range(2)))


def test_graphs_that_split_heads_raise():
    index = torch.zeros(1, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="member must hold 1 graph or a multiple of 4, got 2"):
        community_centroids(torch.randn(1, 4, 8, 8), index, index, index)


@pytest.mark.parametrize("graphs", [1, 2, 4])
def test_opcheck(graphs):
    member = torch.arange(8, dtype=torch.int32).expand(1, graphs, 8).contiguous()
    size = torch.tensor([3, 5], dtype=torch.int32).expand(1, graphs, 2).contiguous()
    start = torch.tensor([0, 3], dtype=torch.int32).expand(1, graphs, 2).contiguous()
    torch.library.opcheck(community_centroids.default, (torch.randn(1, 2, 8, 4), member, start, size))
