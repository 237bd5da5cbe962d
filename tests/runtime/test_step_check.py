"""Steps verified on the device: which masks and counters pass, and when the host hears of one that does not."""

import pytest
import torch

from ckv_compile.runtime.padding import padding_of_given
from ckv_compile.runtime.step_check import StepCheck

CPU = torch.device("cpu")


def padding_mask(first, tokens, dtype=torch.int64):
    return (torch.arange(tokens) >= torch.tensor(first)[:, None]).to(dtype)


def given_mask(first, length, size, rows=None):
    positions = torch.arange(size)
    mask = (positions >= torch.tensor(first)[:, None]) & (positions <= length)
    return mask[:rows, None, None]


def steps(check, masks, verify="verify_padding", length=10):
    """What the host sees after each step."""
    seen = []
    for number, mask in enumerate(masks):
        getattr(check, verify)(mask, length + number)
        check.conclude()
        seen.append(check.failed())
    return seen


@pytest.mark.parametrize("first", [[0], [4], [0, 3, 9]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("extra", [0, 3])
def test_masks_that_go_on_pass(first, dtype, extra):
    check = StepCheck(len(first), 32, first, 9, CPU)
    masks = [padding_mask(first, 11 + number + extra, dtype) for number in range(8)]
    assert steps(check, masks) == [False] * 8
    assert not check.concluded()


def test_masks_of_several_new_tokens():
    check = StepCheck(1, 32, [2], 9, CPU)
    for length, mask, failed in ((10, padding_mask([2], 14), False), (14, padding_mask([2], 18) * 0, True)):
        check.verify_padding(mask, length, 4)
        check.conclude()
        assert check.failed() is failed


def test_any_nonzero_entry_counts_as_one():
    check = StepCheck(1, 32, [2], 9, CPU)
    assert steps(check, [padding_mask([2], 11) * 7]) == [False]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("position", [0, 2, 3, 7, 10])
def test_a_mask_that_differs_anywhere_is_found_and_stays_found(row, position):
    first = [0, 3]
    check = StepCheck(2, 32, first, 9, CPU)
    masks = [padding_mask(first, 11 + number) for number in range(5)]
    masks[2][row, position] ^= 1
    assert steps(check, masks) == [False, False, True, True, True]
    assert check.concluded()


def test_what_lies_behind_the_new_token_is_not_looked_at():
    check = StepCheck(1, 32, [0], 9, CPU)
    mask = torch.cat([padding_mask([0], 11), torch.zeros(1, 4, dtype=torch.int64)], 1)
    assert steps(check, [mask]) == [False]


@pytest.mark.parametrize(("first", "rows"), [([0, 0], None), ([0, 0], 1), ([0, 4], None), ([5, 5], 1)], ids=str)
def test_whole_masks_pass_and_are_found_in_both_directions(first, rows):
    good = [given_mask(first, 10 + number, 24, rows) for number in range(4)]
    assert steps(StepCheck(2, 32, first, 9, CPU), good, "verify_given") == [False] * 4
    for position in (0, 8, 12, 23):
        bad = [mask.clone() for mask in good]
        bad[1][-1, 0, 0, position] ^= True
        assert steps(StepCheck(2, 32, first, 9, CPU), bad, "verify_given") == [False, True, True, True]


@pytest.mark.parametrize("counter", [torch.tensor(10), torch.tensor([10], dtype=torch.int32)], ids=str)
def test_a_counter_is_compared_beside_a_mask_and_alone(counter):
    for masked in (False, True):
        check = StepCheck(1, 32, [0], 9, CPU)
        for length, expected in ((10, False), (11, True)):
            if masked:
                check.verify_padding(padding_mask([0], length + 1), length)
            check.verify_counter(counter, length)
            check.conclude()
            assert check.failed() == expected


def test_the_message_says_what_is_needed_and_from_when_nothing_can_be_trusted():
    check = StepCheck(1, 32, [3], 9, CPU)
    steps(check, [padding_mask([0], 11)])
    message = check.message(11)
    for words in ("attention_mask must be zero for the first 3", "no logits behind token 9", "12 tokens"):
        assert words in message


def test_a_step_costs_three_small_operations_and_moves_no_mask(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.launched = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not any(alias in str(func) for alias in ("slice", "select", "view", "alias")):
                self.launched.append(str(func))
            return func(*args, **(kwargs or {}))

    check = StepCheck(2, 32, [0, 3], 9, CPU)
    mask, given = padding_mask([0, 3], 11), given_mask([0, 0], 10, 24, 1)
    plain = StepCheck(2, 32, [0, 0], 9, CPU)
    with Count() as padded:
        check.verify_padding(mask, 10)
        check.conclude()
        check.failed()
    assert len(padded.launched) == 3, padded.launched
    with Count() as whole:
        plain.verify_given(given, 10)
        plain.conclude()
    assert len(whole.launched) == 3, whole.launched


def additive(mask, dtype):
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("first", "rows"), [([0, 0], None), ([0, 0], 1), ([0, 4], None), ([5, 5], 1)], ids=str)
def test_additive_masks_pass_and_any_other_number_is_found(first, rows, dtype):
    good = [additive(given_mask(first, 10 + number, 24, rows), dtype) for number in range(4)]
    assert [padding_of_given(mask, 10 + number, 2) for number, mask in enumerate(good)] == [first] * 4
    assert steps(StepCheck(2, 32, first, 9, CPU), good, "verify_given") == [False] * 4
    for position in (0, 8, 12, 23):
        for change in (-1.0, -torch.inf, torch.nan, 1.0):
            bad = [mask.clone() for mask in good]
            bad[1][-1, 0, 0, position] = change
            assert padding_of_given(bad[1], 11, 2) is None
            assert steps(StepCheck(2, 32, first, 9, CPU), bad, "verify_given") == [False, True, True, True]
