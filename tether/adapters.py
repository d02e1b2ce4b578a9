"""Low-rank adapters (Hu et al. 2021) by way of PEFT: made, loaded, saved, switched.

Loading is stricter than PEFT's own: a file that does not fill the adapter exactly is refused by name, where PEFT leaves the
rest at its random start with a warning. Merging stands in `merging.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tether import atomic
from tether.errors import UserError
from tether.hub import first_line, quiet
from tether.models import check_replaceable, load_model, load_tokenizer, load_weights, write_model
from tether.recipe import LoraConfig

TRAINED = "default"  # PEFT saves the adapter of this name into the folder itself, others below it
START = "start"  # the adapter that training began with, frozen: the reference
WEIGHTS = "adapter_model.safetensors"


# -- made --------------------------------------------------------------------------------------------------------------


def add_lora(model: Any, lora: LoraConfig, *, seed: int, extra_modules: tuple[str, ...] = ()) -> Any:
    """`model` with a fresh adapter that changes nothing yet (B is zero); only the adapter is trainable.

    `extra_modules` are trained in full beside it, as `lora.modules_to_save` are. The global random state is left alone.
    """
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT declares an integer and divides it
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        modules_to_save=[*lora.modules_to_save, *extra_modules] or None,
        task_type="SEQ_CLS" if extra_modules else "CAUSAL_LM",
    )
    return wrap(model, config, seed=seed)


def wrap(model: Any, config: Any, *, seed: int = 0) -> Any:
    """`model` with an untrained adapter as `config` describes it, named `TRAINED`."""
    try:
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(seed)
            wrapped = peft.get_peft_model(model, config, adapter_name=TRAINED, autocast_adapter_dtype=True)
    except ValueError as error:
        raise UserError(
            f"the adapter does not fit the model: {first_line(error)}",
            where="lora.target_modules",
            remedy='Use "all-linear", or names of layers that the model has.',
        ) from error
    # The place the base was loaded from, whole: a relative path would be lost with the working folder.
    wrapped.peft_config[TRAINED].base_model_name_or_path = getattr(model, "tether_source", model.name_or_path)
    return wrapped.eval()


def is_adapted(model: Any) -> bool:
    return isinstance(model, peft.PeftModel)


# -- loaded ------------------------------------------------------------------------------------------------------------


def load_adapter_folder(folder: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Base model and adapter of a PEFT folder, nothing trainable, with the folder's tokenizer if it has one."""
    config, tensors = read_adapter(folder)
    if config.task_type == "SEQ_CLS":
        raise UserError(
            "this is the adapter of a reward model, not of a language model",
            where=str(folder),
            remedy="Give the language model here; a reward model goes where a reward is asked for.",
        )
    base, tokenizer = load_model(find_base(folder, config), dtype=dtype, trust_remote_code=trust_remote_code)
    if is_adapted(base):
        raise UserError("the base of this adapter is itself an adapter", where=str(folder), remedy="Merge the first one: `tether merge`.")
    if (folder / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    _fit_vocabulary(base, tensors, config, tokenizer, folder)
    model = wrap(base, config)
    fill(model, tensors, TRAINED, where=folder)
    model.requires_grad_(False)
    return model, tokenizer


def read_adapter(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """PEFT config and tensors of an adapter folder; a broken, pickled or foreign one is refused by name."""
    path = folder / "adapter_config.json"
    try:
        kind = json.loads(path.read_text()).get("peft_type")
    except FileNotFoundError:
        raise UserError("adapter_config.json is missing", where=str(folder), remedy="The adapter is incomplete; save it again.") from None
    except (json.JSONDecodeError, AttributeError) as error:
        raise UserError(f"is broken: {first_line(error)}", where=str(path), remedy="The adapter is incomplete; save it again.") from error
    if kind != "LORA":
        raise UserError(f"{kind} adapters are not supported", where=str(path), remedy="Use a LoRA adapter.")
    config = peft.LoraConfig.from_pretrained(str(folder))
    if config.bias != "none":
        raise UserError(f"adapters that train biases (bias={config.bias}) are not supported", where=str(path), remedy="Use bias: none.")
    weights = folder / WEIGHTS
    if not weights.exists():
        pickled = (folder / "adapter_model.bin").exists()
        what = "the adapter's weights are pickled, and reading a pickle can run any code" if pickled else f"{WEIGHTS} is missing"
        raise UserError(
            what, where=str(folder), remedy="Save it as safetensors." if pickled else "The adapter is incomplete; save it again."
        )
    try:
        return config, load_file(weights)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"is broken or cut off: {first_line(error)}", where=str(weights), remedy="Copy it again, or go back to an earlier checkpoint."
        ) from error


def find_base(folder: Path, config: Any) -> str:
    """Where the base model of an adapter lies: as written, or beside the adapter if that is where the path now leads."""
    name = config.base_model_name_or_path
    if not name:
        raise UserError(
            "the adapter does not say which model it belongs to", where=str(folder), remedy="Set base_model_name_or_path in it."
        )
    for path in (Path(name), folder / name):
        if path.exists():
            return str(path)
    if Path(name).is_absolute():
        raise UserError(
            f"the base model of this adapter is gone: {name}", where=str(folder), remedy="Set base_model_name_or_path to where it is now."
        )
    return str(name)


def fill(model: Any, tensors: Mapping[str, Tensor], adapter: str, *, where: Path | str) -> None:
    """Put a file's tensors into one adapter of the model: exactly its tensors, in its shapes, or UserError."""
    expected = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    own = model.state_dict()
    if wrong := [n for n in tensors if n in expected and tensors[n].shape != expected[n].shape]:
        name = wrong[0]
        found, wanted = list(tensors[name].shape), list(expected[name].shape)
        rank = "lora_A" in name and found[1:] == wanted[1:]
        what = f"the adapter has rank {found[0]}, but rank {wanted[0]} was asked for" if rank else f"{name} is {found}, expected {wanted}"
        raise UserError(what, where=str(where), remedy="Keep the settings it was trained with (lora.rank, lora.target_modules).")
    if missing := sorted(set(expected) - set(tensors)):
        raise UserError(
            f"the adapter is incomplete: {missing[0]} and {len(missing) - 1} more are missing"
            if len(missing) > 1
            else f"{missing[0]} is missing",
            where=str(where),
            remedy="Copy it again, or keep the settings it was trained with (lora.target_modules, lora.modules_to_save).",
        )
    # An adapter with added tokens carries the base's embeddings along, at times twice; nothing else may be in the file.
    known = {*expected, *own, *(f"{n}.".replace(f".{adapter}.", ".").removesuffix(".") for n in own)}
    if foreign := sorted(set(tensors) - known):
        raise UserError(
            f"{foreign[0]} has no place in this model", where=str(where), remedy="The adapter belongs to another model or settings."
        )
    set_peft_model_state_dict(model, {n: t for n, t in tensors.items() if n in expected or n in own}, adapter_name=adapter)


def _fit_vocabulary(base: Any, tensors: Mapping[str, Tensor], config: Any, tokenizer: Any, folder: Path) -> None:
    """Give the base the rows of tokens that were added before training; rows that the file does not hold are refused."""
    names = {"input": _path_of(base, base.get_input_embeddings()), "output": _path_of(base, base.get_output_embeddings())}
    stored = {
        side: [t.shape[0] for n in ("weight", "base_layer.weight") if (t := tensors.get(f"base_model.model.{name}.{n}")) is not None]
        for side, name in names.items()
    }
    vocabulary = base.get_input_embeddings().weight.shape[0]
    rows = max([vocabulary, *stored["input"], *stored["output"], *([len(tokenizer)] if tokenizer is not None else [])])
    if rows == vocabulary:
        return
    single = config.trainable_token_indices
    trained = set(single if isinstance(single, list) else next(iter(single.values()), []) if single else [])
    covered = trained >= set(range(vocabulary, rows))
    tied = base.config.get_text_config().tie_word_embeddings
    if not (covered and tied) and not all(stored.values()):
        lacking = "output" if stored["input"] else "input"
        raise UserError(
            f"{rows - vocabulary} tokens were added, but the file does not hold their {lacking} embeddings",
            where=str(folder),
            remedy="Save the adapter with save_embedding_layers=True, or train both: modules_to_save of the input and output embeddings.",
        )
    with torch.random.fork_rng(devices=[]), quiet():
        base.resize_token_embeddings(rows, mean_resizing=False)


def _path_of(model: Any, module: Any) -> str:
    return next((name for name, m in model.named_modules() if m is module), "")


# -- as the start of a training ----------------------------------------------------------------------------------------


def check_settings(config: Any, lora: LoraConfig | None, folder: Path) -> None:
    """Settings that contradict the adapter which training begins with are refused: it cannot take another rank."""
    if lora is not None and (lora.rank, float(lora.alpha)) != (config.r, float(config.lora_alpha)):
        raise UserError(
            f"the adapter it starts from has rank {config.r} and alpha {config.lora_alpha:g}, not rank {lora.rank} and alpha {lora.alpha:g}",
            where=str(folder),
            remedy="Leave lora out to go on with that adapter, or merge it first (`tether merge`) and train a new one on top.",
        )


def train_from(model: Any, folder: Path, lora: LoraConfig | None) -> None:
    """Make the loaded adapter trainable, and load it a second time, frozen, as the reference that it is tied to.

    The reference of a policy that starts from an adapter is that adapter; with the adapter off it would be the raw base.
    Settings in `lora` that contradict the adapter are refused: it would have to be trained from scratch.
    """
    config, tensors = read_adapter(folder)
    check_settings(config, lora, folder)
    config.inference_mode = True
    model.add_adapter(START, config)
    fill(model, tensors, START, where=folder)
    model.set_adapter(TRAINED)
    for name, parameter in model.named_parameters():
        if f".{START}." in name:
            parameter.requires_grad_(False)
    model.eval()


@contextlib.contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Within, the model computes what it did before training: with the adapter it started from, else with none."""
    wanted = [(p, p.requires_grad) for p in model.parameters()]
    try:
        if START in model.peft_config:
            model.set_adapter(START, inference_mode=True)
            yield
        else:
            with model.disable_adapter():
                yield
    finally:
        if START in model.peft_config:
            model.set_adapter(TRAINED)
        for parameter, value in wanted:  # switching adapters also switches what is trainable
            parameter.requires_grad_(value)


def reference_state(model: Any) -> dict[str, Tensor]:
    """The tensors that the reference computes with, under the names they have without adapters."""
    state = {}
    for name, tensor in model.state_dict().items():
        adapter = next((a for a in model.peft_config if f".{a}." in f"{name}."), None)
        if adapter is None or adapter == START:
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
            state[plain] = tensor
    return state


# -- saved -------------------------------------------------------------------------------------------------------------


def save_adapter(model: Any, tokenizer: Any, folder: str | Path, *, files: Mapping[str, str] | None = None) -> Path:
    """The trained adapter as a PEFT folder (float32, safetensors) with the tokenizer; appears whole or not at all."""
    target = Path(folder)
    check_replaceable(target)
    with atomic.new_folder(target) as fresh:
        write_adapter(model, tokenizer, fresh)
        for name, text in (files or {}).items():
            (fresh / name).write_text(text)
    return target


def write_adapter(model: Any, tokenizer: Any, folder: Path) -> None:
    """The files of `save_adapter`, straight into an existing folder."""
    vocabulary = model.config.get_text_config().vocab_size
    resized = vocabulary != getattr(model.get_base_model(), "tether_source_vocab", vocabulary)
    with quiet():
        # Said outright: left to itself, PEFT asks the hub whether the vocabulary was changed.
        model.save_pretrained(folder, selected_adapters=[TRAINED], save_embedding_layers=resized)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


# -- as a checkpoint ---------------------------------------------------------------------------------------------------


def write_trained(model: Any, tokenizer: Any, folder: Path) -> None:
    """What training changes, bit for bit: the adapter, or the whole model in the type its weights have."""
    if is_adapted(model):
        write_adapter(model, tokenizer, folder)
    else:
        write_model(model, tokenizer, folder, dtype=None)


def read_trained(model: Any, folder: Path) -> None:
    """Put what `write_trained` wrote back into the same model: into its one adapter, or over all its weights.

    UserError when the folder holds the other kind, or an adapter of other settings; nothing is wrapped a second time.
    """
    if is_adapted(model) != (folder / "adapter_config.json").exists():
        here = "an adapter" if is_adapted(model) else "every weight"
        there = "every weight" if is_adapted(model) else "an adapter"
        raise UserError(
            f"the checkpoint trained {there}, this run trains {here}", where=str(folder), remedy="Keep the lora setting it was made with."
        )
    if not is_adapted(model):
        saved, _ = load_weights(type(model), str(folder), model.dtype, trust_remote_code=False, local_only=True)
        model.load_state_dict(saved.state_dict())
        return
    config, tensors = read_adapter(folder)
    own = model.peft_config[TRAINED]
    fill(model, tensors, TRAINED, where=folder)
    if (config.r, config.lora_alpha, config.use_rslora) != (own.r, own.lora_alpha, own.use_rslora):
        raise UserError(
            f"the adapter was trained with alpha {config.lora_alpha:g}, but alpha {own.lora_alpha:g} was asked for",
            where=str(folder),
            remedy="Keep the settings it was trained with (lora.alpha).",
        )
