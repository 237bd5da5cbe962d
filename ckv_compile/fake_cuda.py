"""Inductor's CUDA code without a GPU: lowers a function on fake CUDA tensors and returns the generated wrapper.

Only code generation runs: nothing is compiled by Triton and nothing is launched. Tests use it to see which kernels a
graph gets and what is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class _Properties:
    name = "NVIDIA H200"
    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = 141 << 30
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block_optin = 232448
    shared_memory_per_block = 49152
    max_threads_per_block = 1024
    L2_cache_size = 60 << 20
    gcnArchName = ""  # noqa: N815  (torch's name)


class _Driver:
    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


@contextlib.contextmanager
def pretend_gpu() -> Iterator[None]:
    """An H200, for whoever asks what the device is like."""
    import torch._inductor.scheduler as scheduler
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import hints

    known: dict[str, Any] = {
        "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
    }  # fmt: skip
    properties = hints.DeviceProperties(**{k: v for k, v in known.items() if k in hints.DeviceProperties._fields})
    with contextlib.ExitStack() as stack:

        def patch(owner, name, value):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))

        patch(hints.DeviceProperties, "create", classmethod(lambda cls, device: properties))
        patch(torch.cuda, "get_device_properties", lambda *_, **__: _Properties)
        patch(torch.cuda, "get_device_capability", lambda *_, **__: (9, 0))
        patch(torch.cuda, "current_device", lambda *_: 0)
        for name in ("get_device_properties",):
            patch(CudaInterface, name, staticmethod(lambda *_, **__: _Properties))
            patch(CudaInterface.Worker, name, staticmethod(lambda *_, **__: _Properties))
        patch(CudaInterface.Worker, "current_device", staticmethod(lambda *_: 0))
        patch(CudaInterface, "get_compute_capability", staticmethod(lambda *_, **__: "90"))
        patch(CudaInterface, "is_triton_capable", staticmethod(lambda *_, **__: True))
        patch(CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda *_, **__: None))
        patch(scheduler, "has_triton", lambda *_, **__: True)
        patch(AsyncCompile, "triton", lambda *_, **__: None)
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver())
        try:
            yield
        finally:
            triton.runtime.driver._active = before


def generated_code(function: Callable, make_arguments: Callable[[], list]) -> str:
    """The wrapper that Inductor writes for ``function``; ``make_arguments`` makes its (fake) tensors on "cuda"."""
    from torch._functorch.aot_autograd import aot_module_simplified  # noqa: F401  (registers what lowering needs)
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode, pretend_gpu():
        arguments = make_arguments()
        graph = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*arguments)
        with V.set_fake_mode(mode), DebugContext():
            lowering = GraphLowering(graph, example_inputs=arguments, shape_env=mode.shape_env, is_inference=True)
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
                lowering.run(*arguments)
                code: Any = lowering.codegen()[0]
                return getattr(code, "value", code)
