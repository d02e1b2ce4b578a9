"""Models out of GGUF files (llama.cpp's format), as ordinary float weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from tether.errors import UserError
from tether.hub import first_line, quiet


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model of a `.gguf` file, its quantised blocks expanded to `dtype`, and its tokenizer.

    The model that transformers returns still claims to be quantised and refuses to be saved, so the weights move into a fresh
    model built from the same config without that claim.
    """
    if not path.is_file():
        raise UserError("there is no such GGUF file", where=str(path), remedy="Give the path of an existing .gguf file.")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError("reading GGUF files needs the package gguf", where=str(path), remedy='pip install "tether-lm[gguf]"') from None
    try:
        with quiet():
            read: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise UserError(
            f"this GGUF file cannot be read: {first_line(error)}",
            where=str(path),
            remedy="The file may be broken or of an architecture that transformers does not read from GGUF; use the safetensors model.",
        ) from error

    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    # `assign` keeps the tensors of the state dict; the tie between input and output embeddings is made again afterwards.
    model.load_state_dict(read.state_dict(), assign=True)
    _fill_buffers(model, read)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_dict(read.generation_config.to_dict())
    model = model.to(dtype).eval()
    model.tether_source, model.tether_source_dtype = str(path.resolve()), dtype
    return model, tokenizer


def _fill_buffers(model: Any, read: Any) -> None:
    """Buffers that no state dict carries (rotary frequencies) are still on the meta device; take the loaded model's."""
    loaded = dict(read.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)
            module._buffers[leaf] = loaded[name]
