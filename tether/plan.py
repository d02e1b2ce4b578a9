"""What a run will need before it starts: memory by arithmetic on the model's config, time by a short probe on this machine.

Nothing is downloaded or loaded but the config and the tokenizer; the model is built on the meta device, where tensors have
shapes and no memory. Bytes are of the training process: weights and optimiser are float32 whatever `precision` is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from tether import precision as arithmetic
from tether.errors import UserError
from tether.hub import first_line, quiet
from tether.models import check_source, fetch_smollm2
from tether.precision import Precision
from tether.probe import Cost, measure
from tether.recipe import DPORecipe, LoraConfig, PPORecipe, RewardRecipe, TrainRecipe
from tether.rl_recipe import SamplingRecipe
from tether.row_lengths import RowLengths

FLOAT = 4
PROJECTION = 64 * 2**20  # scores of one tile of the vocabulary, their gradient, and what is in passing


@dataclass(frozen=True)
class Size:
    """A model in numbers."""

    parameters: int
    trainable: int
    layers: int
    hidden: int
    vocabulary: int
    kv_bytes_per_token: int  # bfloat16 keys and values, as sampling keeps them
    adapter: bool


@dataclass(frozen=True)
class Part:
    """One line of the memory table."""

    name: str
    bytes: float
    why: str


@dataclass(frozen=True)
class Change:
    """A setting that would lower the memory, and what the run would need with it and those before it."""

    setting: str
    bytes: float


@dataclass
class Plan:
    """What `tether plan` tells."""

    recipe: TrainRecipe
    size: Size
    precision: Precision
    memory: list[Part]
    free_bytes: float
    disk_bytes: float
    rows: RowLengths | None = None
    steps: int | None = None
    seconds_per_step: float | None = None
    scoring_seconds: float | None = None
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.memory)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.free_bytes

    @cached_property
    def seconds(self) -> float | None:
        """Of the whole run."""
        if self.steps is None or self.seconds_per_step is None:
            return None
        return self.steps * self.seconds_per_step + (self.scoring_seconds or 0.0)


def plan(recipe: TrainRecipe, rows: RowLengths | None, *, probe: bool = True, say: Callable[[str], None] = print) -> Plan:
    """Memory and time of a run. `rows` is what is known of its data; without it rows are taken to be half of max_length."""
    if recipe.model is None:
        raise UserError("no language model is trained, so there is nothing to plan", where="features")
    config, lora = load_config(recipe.model, recipe.lora, trust_remote_code=recipe.trust_remote_code)
    size = size_of(config, lora, scores_only=isinstance(recipe, RewardRecipe), trust_remote_code=recipe.trust_remote_code)
    kind = arithmetic.choose(recipe.precision)
    made = Plan(recipe, size, kind, [], free_memory(), _disk(recipe, size), rows)
    if rows is None:
        made.notes.append("the data is not known, so rows are taken to be half of max_length")
    costs = _Costs(config, size, isinstance(recipe, RewardRecipe), probe, say, made.notes)
    made.memory = _memory(recipe, size, kind, costs, rows)
    tokens = recipe.batch_size * (rows.tokens if rows else recipe.max_length / 2)
    per_step = recipe.batch_size
    if isinstance(recipe, SamplingRecipe):
        per_step = recipe.groups_per_step
        tokens = recipe.updates_per_batch * per_step * _group_tokens(recipe, rows.tokens if rows else recipe.max_length / 2)
        made.notes.append("answers are taken to have max_completion_length tokens; sampling and rewards take their time on top")
    made.steps = recipe.max_steps if rows is None else recipe.total_steps(math.ceil(rows.count / per_step))
    if cost := costs.of(kind):
        again = 4 / 3 if recipe.gradient_checkpointing else 1.0
        made.seconds_per_step = cost.seconds.at(size.layers, tokens) * again + cost.update_seconds_per_parameter * size.trainable
        if isinstance(recipe, DPORecipe) and recipe.has_reference and rows is not None:
            made.scoring_seconds = cost.seconds.at(size.layers, rows.tokens * rows.count) * cost.forward_share
        _note_load(made.notes)
    if not made.fits:
        made.changes = _changes(recipe, size, kind, costs, rows, made.free_bytes, config)
    return made


class _Costs:
    """Probes on demand, once for each precision; None where the machine has no room for a probe."""

    def __init__(self, config: Any, size: Size, scores_only: bool, probe: bool, say: Callable[[str], None], notes: list[str]) -> None:
        self.config, self.size, self.scores_only, self.probe, self.say, self.notes = config, size, scores_only, probe, say, notes
        self._known: dict[str, Cost | None] = {}
        self.process_bytes = float(psutil.Process().memory_info().rss)  # before the probe leaves anything behind

    def of(self, kind: Precision) -> Cost | None:
        if kind not in self._known:
            self._known[kind] = self._measure(kind) if self.probe else None
        return self._known[kind]

    def _measure(self, kind: Precision) -> Cost | None:
        per_layer = self.size.parameters / max(1, self.size.layers)
        need = FLOAT * 4 * (2 * per_layer + self.size.hidden * self.size.vocabulary)
        if need > free_memory() / 2:
            self.notes.append("the probe was left out, two layers do not fit into half of the free memory; activations are estimated")
            return None
        self.say(f"measuring a few layers in {kind} on this machine ...")
        try:
            cost = measure(self.config, precision=kind, scores_only=self.scores_only)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            self.notes.append(f"the probe failed ({first_line(error)}); activations are estimated and times unknown")
            return None
        if not cost.packed:
            self.notes.append("this model cannot be packed: padding costs more than is counted here")
        return cost


def load_config(name: str | Path, lora: LoraConfig | None, *, trust_remote_code: bool = False) -> tuple[Any, LoraConfig | None]:
    """The model's config, and the adapter that will be trained: the recipe's, or the one that `name` is."""
    from transformers import AutoConfig

    if str(name) == "smollm2":
        name = fetch_smollm2()
    path = Path(name).expanduser()
    options: dict[str, Any] = {}
    if path.suffix == ".gguf":
        name, options = path.parent, {"gguf_file": path.name}
    elif (path / "adapter_config.json").exists():
        from tether.adapters import find_base, read_adapter

        found, _ = read_adapter(path)
        targets = found.target_modules if isinstance(found.target_modules, str) else sorted(found.target_modules)
        config, _ = load_config(find_base(path, found), None, trust_remote_code=trust_remote_code)
        return config, LoraConfig(rank=found.r, alpha=float(found.lora_alpha), target_modules=targets)
    else:
        options["local_files_only"] = check_source(name)
    try:
        with quiet():
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **options), lora
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the model's config cannot be read: {first_line(error)}", where=str(name)) from error


def size_of(config: Any, lora: LoraConfig | None, *, scores_only: bool = False, trust_remote_code: bool = False) -> Size:
    """Counted on the model built without memory, tied weights once, with its adapter if there is one."""
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if lora is not None:
        import peft

        adapter = peft.LoraConfig(
            r=lora.rank, target_modules=lora.target_modules, modules_to_save=lora.modules_to_save or None, task_type="CAUSAL_LM"
        )
        with quiet(), torch.device("meta"):
            model = peft.get_peft_model(model, adapter)
    text = config.get_text_config()
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if scores_only and not getattr(text, "tie_word_embeddings", False):  # a reward model has no vocabulary head
        head = text.vocab_size * text.hidden_size
        total, trainable = total - head, trainable if lora else trainable - head
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv = 2 * text.num_hidden_layers * heads * width * 2
    return Size(total, trainable, text.num_hidden_layers, text.hidden_size, text.vocab_size, kv, lora is not None)


def free_memory() -> float:
    """Bytes that are free where the model will lie."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    return float(psutil.virtual_memory().available)


def _memory(recipe: TrainRecipe, size: Size, kind: Precision, costs: _Costs, rows: RowLengths | None) -> list[Part]:
    longest = rows.longest if rows else recipe.max_length
    # The fullest micro-batch decides, so a step is taken to be of long rows.
    tokens = max(longest, min(recipe.tokens_per_micro_batch, recipe.batch_size * longest))
    if isinstance(recipe, SamplingRecipe):  # a group is never cut: its prompt is computed once
        group = round(_group_tokens(recipe, rows.longest if rows else recipe.max_length - recipe.max_completion_length))
        tokens = max(group, min(recipe.tokens_per_micro_batch, recipe.groups_per_step * group))
    parts = [
        Part("weights", FLOAT * size.parameters, f"{size.parameters:,} parameters in float32"),
        Part("gradients", FLOAT * size.trainable, f"{size.trainable:,} trainable parameters in float32"),
        Part("optimiser", 2 * FLOAT * size.trainable, "AdamW: two float32 numbers for each trainable parameter"),
        Part("activations", _activations(recipe, size, kind, costs, tokens), f"{tokens:,} tokens in a micro-batch, {kind}"),
    ]
    if kind == "bf16":
        parts.append(Part("copies", 2 * size.parameters, "the weights in bfloat16, for the matmuls"))
    if not isinstance(recipe, RewardRecipe):
        head = 0 if size.adapter else FLOAT * size.hidden * size.vocabulary
        why = f"a tile of {size.vocabulary:,} scores at a time" + ("" if size.adapter else ", and the head's gradient before it is added")
        parts.append(Part("logits", PROJECTION + head, why))
    if isinstance(recipe, DPORecipe) and recipe.has_reference:
        if recipe.reference != "start":
            parts.append(Part("reference", FLOAT * size.parameters, f"{recipe.reference}, while it scores the data (taken to be as large)"))
        elif rows is not None:
            parts.append(Part("reference", 2 * FLOAT * rows.count, "two numbers for each row, worked out before the first step"))
    if isinstance(recipe, SamplingRecipe):
        if recipe.has_reference and not size.adapter:
            parts.append(Part("reference", FLOAT * size.parameters, "a frozen copy"))
        if isinstance(recipe, PPORecipe) and recipe.critic == "separate":
            held_by_critic = FLOAT * (size.parameters + 3 * size.trainable)
            parts.append(Part("critic", held_by_critic, "a model of the policy's size with its gradients and AdamW"))
        held = min(recipe.batch_size, recipe.sampling_slots) * (recipe.max_completion_length + longest)
        why = f"keys and values while sampling, {size.kv_bytes_per_token:,} bytes a token"
        parts.append(Part("sampling", size.kv_bytes_per_token * held, why))
    parts.append(Part("process", costs.process_bytes, "Python and its libraries, as they are in this process"))
    return parts


def _group_tokens(recipe: SamplingRecipe, prompt: float) -> float:
    """Computed tokens of a prompt with all its answers at full length."""
    return prompt + recipe.num_generations * recipe.max_completion_length


def _activations(recipe: TrainRecipe, size: Size, kind: Precision, costs: _Costs, tokens: int) -> float:
    """What the forward pass keeps. Only what grows with the tokens is taken from the probe: copies of weights stand apart."""
    cost = costs.of(kind)
    if cost is None:
        # Without a probe: about 18 numbers of the hidden size for each token and layer, as measured on Llama-like models.
        layer, rest = 18.0 * size.hidden * (2 if kind == "bf16" else FLOAT), 0.0
    else:
        layer, rest = cost.activation_bytes.layer_slope, cost.activation_bytes.rest_slope
    if not recipe.gradient_checkpointing:
        return tokens * (size.layers * layer + rest)
    return tokens * (layer + rest + size.layers * size.hidden * FLOAT)  # one layer at a time, and each layer's input


def _changes(
    recipe: TrainRecipe, size: Size, kind: Precision, costs: _Costs, rows: RowLengths | None, free: float, config: Any
) -> list[Change]:
    """Settings to turn, cheapest first, each on top of those before it, until the run fits."""
    changes: list[Change] = []

    def need(recipe: TrainRecipe, size: Size, kind: Precision, rows: RowLengths | None) -> float:
        return sum(part.bytes for part in _memory(recipe, size, kind, costs, rows))

    now = need(recipe, size, kind, rows)

    def turn(setting: str, recipe_: TrainRecipe, size_: Size, kind_: Precision, rows_: RowLengths | None) -> bool:
        """Take the change if it lowers the need; say whether that is enough."""
        nonlocal recipe, size, kind, rows, now
        after = need(recipe_, size_, kind_, rows_)
        if after < now:
            recipe, size, kind, rows, now = recipe_, size_, kind_, rows_, after
            changes.append(Change(setting, after))
        return now <= free

    smaller = recipe
    while smaller.tokens_per_micro_batch > 512 and need(smaller, size, kind, rows) > free:
        smaller = smaller.replace(tokens_per_micro_batch=smaller.tokens_per_micro_batch // 2)
    if turn(f"tokens_per_micro_batch={smaller.tokens_per_micro_batch}", smaller, size, kind, rows):
        return changes
    if turn("gradient_checkpointing=true", recipe.replace(gradient_checkpointing=True), size, kind, rows):
        return changes
    if not size.adapter:
        adapted = recipe.replace(lora=LoraConfig())
        lighter = size_of(config, adapted.lora, scores_only=isinstance(recipe, RewardRecipe), trust_remote_code=recipe.trust_remote_code)
        if turn("lora={}", adapted, lighter, kind, rows):
            return changes
    # bfloat16 keeps smaller activations and a copy of the weights: which weighs more depends on the run.
    other: Precision = "fp32" if kind == "bf16" else "bf16"
    if turn(f"precision={other}", recipe.replace(precision=other), size, other, rows):
        return changes
    shorter, cut = recipe, rows
    while shorter.max_length > 128 and need(shorter, size, kind, cut) > free:
        shorter = shorter.replace(max_length=shorter.max_length // 2)
        cut = cut.cut(shorter.max_length) if cut else None
    turn(f"max_length={shorter.max_length}", shorter, size, kind, cut)
    return changes


def _disk(recipe: TrainRecipe, size: Size) -> float:
    """Checkpoints (weights and optimiser; one more while the newest is written) and the result."""
    stored = size.trainable if size.adapter else size.parameters
    checkpoints = recipe.keep_checkpoints + 1 if recipe.keep_checkpoints else 0  # one more while the newest is being written
    return FLOAT * (stored + 2 * size.trainable) * checkpoints + FLOAT * stored


def _note_load(notes: list[str]) -> None:
    if hasattr(os, "getloadavg"):
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores + 0.5:
            notes.append(f"the machine is busy (load {load:.1f} on {cores} cores), so the times are upper bounds")


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of anything that `load_model` loads, without the model."""
    from tether import models

    if str(name) == "smollm2":
        name = fetch_smollm2()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        from transformers import AutoTokenizer

        with quiet():
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if (path / "adapter_config.json").exists() and not (path / "tokenizer_config.json").exists():
        from tether.adapters import find_base, read_adapter

        return load_tokenizer(find_base(path, read_adapter(path)[0]), trust_remote_code=trust_remote_code)
    local_only = True if path.is_dir() else check_source(name)
    return models.load_tokenizer(name, trust_remote_code=trust_remote_code, local_only=local_only)
