"""Arrays that arrive later are the tensors that were sent."""

import numpy as np
import pytest
import torch

from ckv_compile.runtime.transfer import Arriving, to_device, with_arrays


def test_a_function_is_called_with_arrays_in_place_of_what_arrives():
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    seen = with_arrays(lambda *args, stop: (args, stop))(Arriving(tensor), "other", stop=1)
    assert isinstance(seen[0][0], np.ndarray)
    assert seen[0][0].tolist() == tensor.tolist()
    assert seen[0][1:] == ("other",)
    assert seen[1] == 1


def test_parts_arrive_with_the_whole():
    tensor = torch.arange(24).view(2, 3, 4)
    arriving = Arriving(tensor)
    assert np.array_equal(arriving.part(1, 1, 3).array(), tensor[:, 1:3].numpy())
    assert np.array_equal(arriving.array(), tensor.numpy())


def test_what_was_made_in_inference_mode_arrives_too():
    with torch.inference_mode():
        arriving = Arriving(torch.ones(3))
    assert arriving.array().tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_neither_direction_makes_the_host_wait():
    device = torch.device("cuda")
    tensor = torch.arange(1000, device=device)
    array = np.arange(1000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        arriving = Arriving(tensor)
        sent = to_device(array, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.array_equal(arriving.part(0, 10, 20).array(), array[10:20])
    assert np.array_equal(arriving.array(), array)
    assert torch.equal(sent, tensor)
