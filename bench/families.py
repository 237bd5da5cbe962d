"""Every family of decoder models in transformers, tiny and random, through the backend: matched, refused, or not built.

    python -m bench.families [--families llama gpt2 ...] [--cache dynamic static] [--inductor] [--update FILE]

Each family generates a few tokens greedily, without and with left padding, and must give eager's tokens and logits: the
whole context is inside the budget. "matched" means that every decode step ran the sparse operators; "refused" tells the
first reason for which attention was left as it was. Rewritten graphs run node by node unless ``--inductor`` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import torch

MAX_PARAMETERS = 8_000_000
VOCABULARY = 128
NEW_TOKENS = 6
TOLERANCE = 1e-3  # of the largest logit

# Sizes by the names that configurations give them. A name that a configuration does not have is not passed.
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim", "embedding_dim"], 64),
    **dict.fromkeys(["word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"], 64),
    **dict.fromkeys(["attention_hidden_size", "backbone_hidden_size", "ple_embed_dim"], 64),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "attention_heads", "num_decoder_attention_heads"], 4),
    **dict.fromkeys(["num_encoder_attention_heads", "swa_num_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"], 2),
    **dict.fromkeys(["head_dim", "swa_head_dim", "attention_head_dim", "d_head", "dim_head", "kv_channels"], 16),
    **dict.fromkeys(["attention_head_size", "qk_nope_head_dim", "v_head_dim", "linear_head_dim"], 16),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "query_pre_attn_scalar", "index_head_dim"], 16),
    **dict.fromkeys(["rotary_dim", "qk_rope_head_dim", "hidden_size_per_layer_input", "laurel_rank"], 8),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads"], 4),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff"], 96),
    **dict.fromkeys(["feed_forward_size", "ffn_hidden_size", "d_inner", "intermediate_size_mlp"], 96),
    **dict.fromkeys(["dense_intermediate_size", "n_inner", "shared_intermediate_size"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"], 32),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "topk_groups"], 1),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank", "hc_lowrank", "router_hidden_size"], 32),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"], 4),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_headdim"], 32),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"], 256),
    **dict.fromkeys(["model_max_length", "context_length", "original_max_position_embeddings"], 256),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"], 2),
    **dict.fromkeys(["sliding_window", "attention_window_size", "window_size", "sliding_window_size"], 8),
    **dict.fromkeys(["attention_chunk_size", "local_attention", "keep_window_size"], 8),
    **dict.fromkeys(["num_mem_blocks", "adapter_rank", "first_k_dense_replace", "num_dense_layers"], 1),
    **dict.fromkeys(["pronunciation_vocab_size", "shape_vocab_size"], 32),
    "encoder_hash_byte_group_vocab": 64, "mamba_d_ssm": 128, "n_groups": 1, "o_groups": 2, "num_kv_shared_layers": 0,
    "index_topk": 64, "num_layers_per_stack": 2,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1,
    "initializer_range": 0.2, "init_std": 0.2,
}  # fmt: skip
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MAX_LAYERS = 4

# What the table above cannot know of a family.
OWN: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4, "head_dim": 8},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
    "dory": {  # two entries for one layer
        **dict.fromkeys(["n_input_layers", "n_recurrent_layers", "n_output_layers"], 2),
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", "mlp"] * 3,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"num_key_value_heads": 4, "head_dim": 8},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "zamba2": {"attention_head_dim": 32, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}
# Names whose default may be None although the family's code reads a number.
NEEDED = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")


@dataclasses.dataclass
class Outcome:
    """What became of one family. ``result``: matched, refused, wrong, crashed, not done, eager fails, or not built."""

    family: str
    model: str
    result: str
    reason: str = ""
    parameters: int = 0
    layers: int = 0


def tiny_config(family: str) -> Any:
    """The family's configuration with sizes of a tiny model. Raises whatever the family's own checks raise."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    return config_class(**{**_shrunk(config_class().to_dict()), **OWN.get(family, {})})


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """The entries to change. Lists with one entry per layer keep layers that differ, so that each kind is there."""
    changed = {name: SIZES[name] for name in values if name in SIZES and (values[name] is not None or name in NEEDED)}
    changed |= {name: SIZES[name] for name in ("eos_token_id", "bos_token_id", "pad_token_id") if name in values}
    if values.get("num_key_value_heads") is not None and values["num_key_value_heads"] == values.get(
        "num_attention_heads"
    ):
        changed["num_key_value_heads"] = SIZES["num_attention_heads"]  # no grouping where the family has none
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), None)
    lists = {
        name: value for name, value in values.items()
        if isinstance(value, list) and count is not None and len(value) == count
    }  # fmt: skip
    if lists:
        kinds: dict[str, int] = {}
        for layer in range(count):
            kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
        kept = sorted(kinds.values())[:MAX_LAYERS]
        kept = kept if len(kept) > 1 else [kept[0], kept[0]]
        changed |= {
            name: [SIZES[name]] * len(kept) if name in SIZES else [value[layer] for layer in kept]
            for name, value in lists.items()
        }
        changed |= {name: len(kept) for name in LAYER_COUNTS if name in values}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            changed[name] = {"model_type": value["model_type"], **_shrunk(value)}
    return changed


def tiny_random_model(family: str) -> torch.nn.Module:
    """Raises ValueError where the family cannot be made tiny, and whatever building it raises."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    for name in ("is_decoder", "use_cache"):
        if hasattr(config, name):
            setattr(config, name, True)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters with every size of the table at its least")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def sweep_family(
    family: str, caches: tuple[str, ...] = ("dynamic",), paddings: tuple[bool, ...] = (False, True)
) -> Outcome:
    """Generate with the family's tiny model, eagerly and compiled. Never raises."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_random_model(family)
        except Exception as error:
            return Outcome(family, name, "not built", _text(error))
        size = sum(parameter.numel() for parameter in model.parameters())
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        outcome = Outcome(family, name, "matched", parameters=size, layers=layers)
        if not hasattr(model, "generate"):
            return dataclasses.replace(outcome, result="eager fails", reason="the model has no generate")
        for cache, padded in itertools.product(caches, paddings):
            try:
                expected = _generate(model, cache, padded)
            except Exception as error:
                if padded:
                    continue  # some take no mask
                return dataclasses.replace(outcome, result="eager fails", reason=_text(error))
            result, reason = _compare(model, expected, cache, padded)
            if result != "matched":
                outcome = dataclasses.replace(outcome, result=result, reason=reason)
            if result in ("wrong", "crashed"):
                break
        return outcome


def _generate(module: Any, cache: str, padded: bool) -> Any:
    from ckv_compile.testing import prompt

    static = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    torch.manual_seed(0)
    return module.generate(
        **prompt(tokens=24, padded=padded), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **static,
    )  # fmt: skip


def _compare(model: Any, expected: Any, cache: str, padded: bool) -> tuple[str, str]:
    import ckv_compile

    torch._dynamo.reset()
    where = f"{cache} cache, {'left padding' if padded else 'no padding'}"
    module = torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 0})
    before = ckv_compile.explain(module, show=False)
    try:
        got = _generate(module, cache, padded)
    except Exception as error:
        return "crashed", f"{where}: {_text(error)}"
    largest = max(float(logits.abs().nan_to_num().max()) for logits in expected.logits)
    distance = max(
        float((ours - eagers).abs().nan_to_num().max())
        for ours, eagers in zip(got.logits, expected.logits, strict=True)
    )
    if not torch.equal(got.sequences, expected.sequences) or distance > TOLERANCE * max(1.0, largest):
        return "wrong", f"{where}: logits differ by {distance:.2g} of {largest:.2g}"
    after = ckv_compile.explain(module, show=False)
    if after.sparse_steps - before.sparse_steps == NEW_TOKENS - 1:
        return "matched", ""
    reasons = [reason for reasons in after.refused.values() for reason in reasons] + list(after.dense_steps)
    reasons.sort(key=lambda reason: reason.startswith("sliding window attention"))  # local layers stay, others decide
    return "refused", f"{where}: {reasons[0] if reasons else 'no attention was found in any graph'}"


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# ---------------------------------------------------------------------- all of them


def prepare(*, inductor: bool) -> None:
    """Do once what every family needs, so that the processes forked from here have it."""
    import ckv_compile.backend

    torch.set_num_threads(1)
    if not inductor:
        ckv_compile.backend._compile = lambda gm, fakes, patches: gm.forward  # type: ignore[assignment]
    sweep_family("llama")


def _child(family: str, caches: tuple[str, ...], results: Any) -> None:
    results.send(sweep_family(family, caches))


def in_own_process(family: str, caches: tuple[str, ...], timeout: float) -> Outcome:
    """The outcome of a family; a process that dies or never ends is a crash of its family alone."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, caches, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return Outcome(family, "", "not done", f"after {timeout:.0f} s")
    except EOFError:
        process.join()
        return Outcome(family, "", "crashed", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main() -> None:
    import collections

    from rich.console import Console
    from rich.progress import track

    from bench.results_file import write_results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=families())
    parser.add_argument("--cache", nargs="*", default=["dynamic"], choices=["dynamic", "static"])
    parser.add_argument("--inductor", action="store_true", help="compile graphs instead of running them node by node")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one family")
    parser.add_argument("--update", type=Path, help="an earlier result, whose rows of other families are kept")
    arguments = parser.parse_args()
    console = Console()
    earlier = json.loads(arguments.update.read_text())["rows"] if arguments.update else []
    prepare(inductor=arguments.inductor)
    outcomes = [Outcome(**row) for row in earlier if row["family"] not in arguments.families]
    for family in track(arguments.families, console=console):
        outcome = in_own_process(family, tuple(arguments.cache), arguments.timeout)
        console.print(f"{outcome.family}: {outcome.result} {outcome.reason}", markup=False, highlight=False)
        outcomes.append(outcome)
    outcomes.sort(key=lambda outcome: outcome.family)
    counts = collections.Counter(outcome.result for outcome in outcomes)
    path = write_results("families", [dataclasses.asdict(outcome) for outcome in outcomes], dict(counts))
    console.print(f"{dict(counts)}, written to {path}")


if __name__ == "__main__":
    main()
