"""Block lists of flex_attention against the mask that they must agree with."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from ckv_compile.runtime.block_lists import visits_causal

BLOCK = 16


def lists_of(first, past, queries):
    begin = torch.tensor(first)

    def mask_mod(batch, head, query, key):
        return (key <= query + past) & (key >= begin[batch])

    mask = create_block_mask(mask_mod, len(first), None, queries, past + queries, device="cpu", BLOCK_SIZE=BLOCK)
    return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]


def judged(lists, first, past, queries):
    return visits_causal(lists, first, past, queries, BLOCK, BLOCK)


@pytest.mark.parametrize("first", [[0], [0, 5], [0, 16, 40]], ids=str)
@pytest.mark.parametrize(("past", "queries"), [(0, 48), (0, 53), (47, 1), (48, 1), (41, 20)])
def test_what_create_block_mask_makes_agrees(first, past, queries):
    assert judged(lists_of(first, past, queries), first, past, queries)


@pytest.mark.parametrize("change", ["a block less", "a full block less", "twice", "full for partial", "out of range"])
def test_any_other_list_does_not(change):
    lists = [tensor.clone() for tensor in lists_of([0], 64, 32)]
    count, index, full_count, full_index = (tensor[0, 0] for tensor in lists)
    assert (count.tolist(), full_count.tolist()) == ([1, 1], [4, 5])
    if change == "a block less":
        count[1] = 0
    elif change == "a full block less":
        full_count[0] = 3
    elif change == "twice":
        count[0], index[0, 1] = 2, full_index[0, 0]
    elif change == "full for partial":
        count[0], full_count[0], full_index[0, 4] = 0, 5, index[0, 0]
    else:
        full_index[0, 1] = 9
    assert not judged(lists, [0], 64, 32)


@pytest.mark.parametrize("call", [([4], 64, 32), ([0], 48, 32), ([0], 65, 48)], ids=str)
def test_lists_of_another_call_do_not(call):
    lists = lists_of([0], 64, 32)
    assert judged(lists, [0], 64, 32)
    assert not judged(lists, *call)


@pytest.mark.parametrize(("past", "queries"), [(0, 48), (47, 1), (48, 1), (41, 20)])
def test_keys_behind_the_written_ones_may_be_visited_but_not_in_full(past, queries):
    first, keys = [0, 5], past + queries + 3 * BLOCK
    lists = [tensor.clone() for tensor in lists_of(first, past, queries)]
    assert visits_causal(lists, first, past, queries, BLOCK, BLOCK, keys)
    count, index = lists[:2]
    beyond = (past + queries + BLOCK) // BLOCK
    wide = torch.zeros(*index.shape[:3], index.shape[3] + 1, dtype=torch.int32)
    wide[..., : index.shape[3]] = index
    wide.scatter_(3, count[..., None].long(), beyond)
    assert visits_causal([count + 1, wide, *lists[2:]], first, past, queries, BLOCK, BLOCK, keys)
    assert not visits_causal([count + 1, wide, *lists[2:]], first, past, queries, BLOCK, BLOCK)
    assert not visits_causal([*lists[:2], count + 1, wide], first, past, queries, BLOCK, BLOCK, keys)
