"""Kernels run on a GPU where there is one, else under Triton's interpreter, which knows no bfloat16."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    if request.param == "bfloat16" and DEVICE == "cpu":
        pytest.skip("the interpreter computes on the bit patterns of bfloat16")
    return getattr(torch, request.param)
