import pytest
import torch

import ckv_compile.ops  # noqa: F401

encode_centroids = torch.ops.ckv.encode_centroids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 80), (2, 3, 5, 64), (1, 1)])
def test_error_is_half_a_step_of_the_row_and_the_channel(dtype, shape):
    torch.manual_seed(0)
    mean = (torch.randn(shape) * 10.0 ** torch.randint(-3, 4, (*shape[:-1], 1))).to(dtype)
    channel_scale = torch.rand(*shape[:-2], shape[-1]) + 0.25
    code, scale = encode_centroids(mean, channel_scale)
    assert (code.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert (code.shape, scale.shape) == (mean.shape, mean.shape[:-1])
    step = scale[..., None].double() * channel_scale[..., None, :].double()
    error = (code.double() * step - mean.double()).abs()
    assert (error <= (0.5 + 1e-4) * step).all()
    assert code.abs().amax(-1).eq(127).all()


def test_a_channel_scale_keeps_one_large_channel_from_setting_the_step_of_all():
    torch.manual_seed(0)
    mean = torch.randn(9, 64)
    mean[:, 5] *= 300
    even = mean.abs().amax(0)
    for_all, evened = ((mean, torch.ones(64)), (mean, even))
    errors = []
    for argument in (for_all, evened):
        code, scale = encode_centroids(*argument)
        difference = code * scale[:, None] * argument[1] - mean
        errors.append(difference[:, torch.arange(64) != 5].norm())
    assert errors[1] < errors[0] / 20


def test_row_of_zeros_has_scale_zero():
    mean = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    code, scale = encode_centroids(mean, torch.tensor([2.0, 2.0]))
    assert code.tolist() == [[0, 0], [64, -127]]
    assert scale[0] == 0
    assert scale[1] == pytest.approx(1 / 127)


@pytest.mark.parametrize(
    ("mean", "channel_scale", "message"),
    [
        (torch.zeros(3), torch.ones(3), "mean must be"),
        (torch.zeros(2, 3), torch.ones(2), r"channel_scale must be \(3,\)"),
        (torch.zeros(2, 3), torch.ones(3).double(), "channel_scale must be float32"),
    ],
)
def test_invalid_argument_is_named(mean, channel_scale, message):
    with pytest.raises(ValueError, match=message):
        encode_centroids(mean, channel_scale)


def test_opcheck():
    torch.library.opcheck(encode_centroids.default, (torch.randn(2, 5, 8), torch.rand(2, 8) + 0.5))
