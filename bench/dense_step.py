"""Models with random weights, and the strongest dense decode step of one that torch's own kernels make.

The dense step is the same transformers model under Inductor, in one CUDA graph, with this package's kernel for the linear
layers, so that it differs from the sparse step in its attention only (and is faster than with cuBLAS). Its cache holds K
and V of exactly the context, contiguous per layer; a step writes the last position in place and attends to all of it
through cuDNN, without a mask. The length is a symbol of the compiled graph, so that one compilation serves every context.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from bench.decode_layer import dense_forms
from bench.timing import capture, time_calls
from ckv_compile.passes import graph_edit
from ckv_compile.passes.group_projections import group_projections

ATTENTION = "bench_dense"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A published configuration, all of it that costs time."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    window: int | None = None  # of every other layer, the first one included
    more: tuple[tuple[str, Any], ...] = ()  # further entries of the configuration

    def config(self, layers: int | None = None, positions: int = 1 << 21):
        theta = 1e6 if self.family == "Qwen3" else 5e5
        own = {} if self.family == "GptOss" else {"rope_theta": theta}
        if self.family != "Qwen2":
            own["head_dim"] = self.head_dim
        if self.window:
            own["sliding_window"] = self.window
        return getattr(transformers, f"{self.family}Config")(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=positions, tie_word_embeddings=False, bos_token_id=None,
            eos_token_id=None, pad_token_id=0, **own, **dict(self.more),
        )  # fmt: skip

    def gib(self, layers: int | None = None) -> float:
        """Of the weights in bfloat16, but for norms and biases."""
        experts = dict(self.more).get("num_local_experts", 1)
        layer = self.hidden * (self.head_dim * 2 * (self.heads + self.kv_heads) + 3 * self.intermediate * experts)
        return 2 * ((layers or self.layers) * layer + 2 * self.vocab * self.hidden) / 2**30

    def cache_gib(self, tokens: int, layers: int | None = None) -> float:
        """Of K and V in bfloat16, of the layers that see everything."""
        return 4 * self.full_layers(layers or self.layers) * tokens * self.kv_heads * self.head_dim / 2**30

    def full_layers(self, layers: int) -> int:
        """Layers, of so many, that see the whole context."""
        return layers // 2 if self.window else layers

    @property
    def attention(self) -> str:
        """The implementation that transformers is asked for: gpt-oss knows no SDPA."""
        return "eager" if self.family == "GptOss" else "sdpa"


SHAPES = {
    "qwen3-4b": Shape("Qwen3", 2560, 36, 32, 8, 128, 9728, 151936),
    "qwen3-8b": Shape("Qwen3", 4096, 36, 32, 8, 128, 12288, 151936),
    "qwen3-14b": Shape("Qwen3", 5120, 40, 40, 8, 128, 17408, 151936),
    "llama-3.1-8b": Shape("Llama", 4096, 32, 32, 8, 128, 14336, 128256),
    "qwen2.5-7b": Shape("Qwen2", 3584, 28, 28, 4, 128, 18944, 152064),
    "gpt-oss-20b": Shape(
        "GptOss", 2880, 24, 64, 8, 64, 2880, 201088, 128, (("num_local_experts", 32), ("num_experts_per_tok", 4))
    ),
    "tiny": Shape("Qwen3", 64, 2, 4, 2, 16, 96, 128),
    "tiny-qwen2": Shape("Qwen2", 64, 2, 4, 2, 16, 96, 128),
    "tiny-gpt-oss": Shape(
        "GptOss", 64, 2, 4, 2, 16, 96, 128, 8, (("num_local_experts", 4), ("num_experts_per_tok", 2))
    ),
}


def random_model(shape: Shape, layers: int | None, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """The model with random weights made on the device, in eval mode, that never ends a generation by itself."""
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            model = AutoModelForCausalLM.from_config(shape.config(layers), attn_implementation=shape.attention)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(0 if name.endswith("bias") else 1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def cache_argument(model: torch.nn.Module) -> str:
    """What this version of transformers calls the cache in a model's call."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# ---------------------------------------------------------------------- the dense step


class FixedLayer(CacheLayerMixin):
    """K and V ``[B, H, n, D]`` of exactly n tokens; an update writes the last of them."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.position = keys, values, position
        self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[2]


def grouped_inductor(gm: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Callable:
    """Inductor with this package's kernel for the linear layers: what is not attention is the same in both arms."""
    from torch._inductor.compile_fx import compile_fx

    if inputs and any(isinstance(value, Tensor) and value.device.type == "cuda" for value in inputs):
        importlib.import_module("ckv_compile.lowering")  # registers the kernel
        gm = graph_edit.copy_graph(gm)
        group_projections(gm, "all")
    return compile_fx(gm, inputs)


class DenseStep:
    """Decode steps of a model that shares the given model's weights, at any context."""

    def __init__(self, model: torch.nn.Module, form: Callable, *, compiled: bool = True, dynamic: bool = True) -> None:
        def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
            return form(query, key, value).transpose(1, 2), None

        # transformers makes no mask for an implementation that it knows no mask function of.
        AttentionInterface.register(ATTENTION, attention)
        with torch.device("meta"):
            twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation=ATTENTION)
        twin.load_state_dict(model.state_dict(), assign=True)
        buffers = dict(model.named_buffers())
        for path, module in twin.named_modules():
            for name in list(module._buffers):
                module._buffers[name] = buffers[f"{path}.{name}".lstrip(".")]
        self.model, self.device, self.dynamic = twin.eval(), model.device, dynamic
        self.step = self.model
        if compiled:
            self.step = torch.compile(
                self.model, fullgraph=True, dynamic=None if dynamic else False, backend=grouped_inductor
            )
        self.token = torch.ones(1, 1, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def at(self, contiguous: list[Tensor]) -> Callable[[], Tensor]:
        """A step over K and V of layer 0, K and V of layer 1, ... each ``[1, H, n, D]``: what to call, or to capture."""
        tokens = contiguous[0].shape[2]
        position = torch.tensor([tokens - 1], device=self.device)
        for tensor in contiguous if self.dynamic else ():
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        cache = Cache(
            layers=[FixedLayer(k, v, position) for k, v in zip(contiguous[::2], contiguous[1::2], strict=True)]
        )
        inputs = {
            "input_ids": self.token, "position_ids": position[None], "use_cache": True, "logits_to_keep": 1,
            cache_argument(self.model): cache,
        }  # fmt: skip

        @torch.no_grad()
        def step() -> Tensor:
            return self.step(**inputs).logits

        return step


def fastest_form(contiguous: list[Tensor], query_heads: int, device: str) -> tuple[str, Callable]:
    """The fastest way to attend densely to K and V ``[1, H, n, D]``, cuDNN's if any of its forms runs."""
    key, value = contiguous[:2]
    query = torch.randn(1, query_heads, 1, key.shape[3], dtype=key.dtype, device=key.device)
    found: dict[str, tuple[float, Callable]] = {}
    for name, form in dense_forms(device).items():
        try:
            replay = capture(lambda form=form: form(query, key, value), device)
            found[name] = time_calls(replay, 10, device), form
        except Exception as error:  # not every version takes every shape
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    cudnn = {name: entry for name, entry in found.items() if name.startswith("cudnn")} or found
    name = min(cudnn, key=lambda name: cudnn[name][0])
    return name, cudnn[name][1]
