"""What a run will need before it starts: memory by arithmetic on the model's config, time by a short probe on this machine.

Nothing is downloaded or loaded but the config and the tokenizer; the model is built on the meta device, where tensors have
shapes and no memory. Bytes are of one training process: weights and optimiser are float32 whatever `precision` is. On several ranks
each line is the fullest rank's, and what travels between them is added (`plan_traffic.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tether import link as links
from tether import precision as arithmetic
from tether.cluster import Cluster
from tether.errors import UserError
from tether.hub import first_line, quiet
from tether.layout import layout_of
from tether.models import check_source, fetch_smollm2
from tether.plan_judges import judge_parts
from tether.plan_memory import Part, Size, group_tokens, memory, together
from tether.plan_sizes import FLOAT
from tether.plan_traffic import Flow, passes_of, samples_elsewhere, seconds_of, traffic
from tether.precision import Precision
from tether.probe import Cost, measure
from tether.recipe import DPORecipe, LoraConfig, RewardRecipe, TrainRecipe
from tether.rl_recipe import SamplingRecipe
from tether.row_lengths import RowLengths

HERE = Cluster()
MOST_MEASURED = 8  # processes between which the exchange is measured


@dataclass(frozen=True)
class Change:
    """A setting that would lower the memory, and what the run would need with it and those before it."""

    setting: str
    bytes: float


@dataclass
class Plan:
    """What `tether plan` tells: of one rank, where there are several."""

    recipe: TrainRecipe
    size: Size
    precision: Precision
    memory: list[Part]
    free_bytes: float
    disk_bytes: float
    rows: RowLengths | None = None
    steps: int | None = None
    compute_seconds: float | None = None  # of a step
    exchange_seconds: float = 0.0  # between ranks, of a step
    scoring_seconds: float | None = None
    cluster: Cluster = HERE
    traffic: list[Flow] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        return together(self.memory)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.free_bytes

    @property
    def seconds_per_step(self) -> float | None:
        """With nothing computed while ranks exchange: where they overlap, the longer of the two is the least it takes."""
        return None if self.compute_seconds is None else self.compute_seconds + self.exchange_seconds

    @cached_property
    def seconds(self) -> float | None:
        """Of the whole run."""
        if self.steps is None or self.seconds_per_step is None:
            return None
        return self.steps * self.seconds_per_step + (self.scoring_seconds or 0.0)


def plan(
    recipe: TrainRecipe, rows: RowLengths | None, *, cluster: Cluster = HERE, probe: bool = True, say: Callable[[str], None] = print
) -> Plan:
    """Memory and time of a run. `rows` is what is known of its data; without it rows are taken to be half of max_length."""
    if recipe.model is None:
        raise UserError("no language model is trained, so there is nothing to plan", where="features")
    config, lora = load_config(recipe.model, recipe.lora, trust_remote_code=recipe.trust_remote_code)
    scores_only = isinstance(recipe, RewardRecipe)
    size = size_of(config, lora, scores_only=scores_only, trust_remote_code=recipe.trust_remote_code, ranks=cluster.ranks)
    kind = arithmetic.choose(recipe.precision)
    made = Plan(recipe, size, kind, [], _free_for_a_rank(cluster), _disk(recipe, size), rows, cluster=cluster)
    if rows is None:
        made.notes.append("the data is not known, so rows are taken to be half of max_length")
    costs = _Costs(config, size, scores_only, probe, say, made.notes)
    judges, not_counted = _judges(recipe, kind, cluster.ranks)
    made.notes += not_counted
    held = partial(memory, costs=costs, beside=judges, device=cluster.device_bytes is not None, remote=samples_elsewhere(recipe))
    made.memory = held(recipe, size, kind, rows=rows)
    per_step = recipe.batch_size
    if isinstance(recipe, SamplingRecipe):
        per_step = recipe.groups_per_step
        made.notes.append("answers are taken to have max_completion_length tokens; sampling and rewards take their time on top")
    made.steps = recipe.max_steps if rows is None else recipe.total_steps(math.ceil(rows.count / per_step))
    made.traffic = traffic(recipe, size, kind, rows, remote=samples_elsewhere(recipe))
    _times(made, costs, say if probe else None)
    if cluster.ranks > 1 and cluster.device_bytes is not None:
        loaded = FLOAT * size.parameters / 2**30
        made.notes.append(
            f"as it starts, each rank has the whole model in main memory: {loaded:.1f} GiB; the first has it again when it saves"
        )
    if cluster.ranks > per_step:
        made.notes.append(
            f"a step has {per_step} {'groups' if per_step != recipe.batch_size else 'rows'}: the other ranks hold their part of the model and compute nothing"
        )
    if not made.fits:
        made.changes = _changes(recipe, size, kind, held, rows, made.free_bytes, config)
    return made


def _judges(recipe: TrainRecipe, kind: Precision, ranks: int) -> tuple[list[Part], list[str]]:
    if not isinstance(recipe, SamplingRecipe):
        return [], []

    def size(model: str, scores_only: bool) -> Size:
        config, lora = load_config(model, None, trust_remote_code=recipe.trust_remote_code)
        return size_of(config, lora, scores_only=scores_only, trust_remote_code=recipe.trust_remote_code, ranks=ranks)

    return judge_parts(recipe, kind, ranks, size)


def _times(made: Plan, costs: _Costs, say: Callable[[str], None] | None) -> None:
    """Of a step: from what the devices are said to do, else from the probe; without `say` nothing is measured."""
    recipe, rows, size, cluster = made.recipe, made.rows, made.size, made.cluster
    passes = passes_of(recipe, rows, cluster.ranks)
    tokens = recipe.batch_size * (rows.tokens if rows else recipe.max_length / 2)  # of all ranks
    if isinstance(recipe, SamplingRecipe):
        tokens = recipe.groups_per_step * group_tokens(recipe, rows.tokens if rows else recipe.max_length / 2)
    updates = recipe.updates_per_batch if isinstance(recipe, SamplingRecipe) else 1
    trained = tokens * updates * (2 if passes.critic else 1)
    looked = tokens * sum(bool(n) for n in (passes.looked, passes.reference, passes.critic_looked))
    before = rows.tokens * rows.count if isinstance(recipe, DPORecipe) and recipe.has_reference and rows is not None else None
    if cluster.flops is not None:
        backward = 2 if size.adapter else 4  # a frozen weight has no gradient of its own
        work = trained * (2 + backward + 2 * recipe.gradient_checkpointing) + 2 * looked
        made.compute_seconds = work * size.parameters / cluster.ranks / cluster.flops
        made.scoring_seconds = None if before is None else 2 * before * size.parameters / cluster.ranks / cluster.flops
    elif cluster.device_bytes is not None and cluster.ranks > 1:
        made.notes.append("the devices are not this machine's: give --flops, and --bandwidth, for the time of a step")
    elif cost := costs.of(made.precision):
        # Ranks without devices share the processors: together they compute at the rate of one.
        share = 1 / cluster.ranks if torch.cuda.is_available() else 1.0
        again = 4 / 3 if recipe.gradient_checkpointing else 1.0
        seconds = cost.seconds.at(size.layers, trained) * again + cost.seconds.at(size.layers, looked) * cost.forward_share
        made.compute_seconds = share * (seconds + cost.update_seconds_per_parameter * size.trainable)
        made.scoring_seconds = None if before is None else share * cost.seconds.at(size.layers, before) * cost.forward_share
        _note_load(made.notes)
    if cluster.ranks == 1:
        return
    link = cluster.link
    if link is None and cluster.device_bytes is None and say is not None:
        several = min(cluster.ranks, MOST_MEASURED)
        say(f"measuring what {several} processes on this machine exchange ...")
        link = links.measure(several)
        if several < cluster.ranks:
            made.notes.append(f"the exchange was measured between {several} processes")
    if link is None:
        made.notes.append("the time of the exchange is not counted: give --bandwidth")
    else:
        made.cluster = replace(cluster, link=link)
        made.exchange_seconds = seconds_of(made.traffic, link)


def _free_for_a_rank(cluster: Cluster) -> float:
    if cluster.device_bytes is not None:
        return cluster.device_bytes
    return free_memory() if torch.cuda.is_available() else free_memory() / cluster.ranks


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


def size_of(config: Any, lora: LoraConfig | None, *, scores_only: bool = False, trust_remote_code: bool = False, ranks: int = 1) -> Size:
    """Counted on the model built without memory, tied weights once, with its adapter if there is one."""
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    head = model.get_output_embeddings()
    without = [] if getattr(text, "tie_word_embeddings", False) or head is None or not scores_only else list(head.parameters())
    if lora is not None:
        import peft

        adapter = peft.LoraConfig(
            r=lora.rank, target_modules=lora.target_modules, modules_to_save=lora.modules_to_save or None, task_type="CAUSAL_LM"
        )
        with quiet(), torch.device("meta"):
            model = peft.get_peft_model(model, adapter)
    layout = layout_of(model, ranks, without=without)  # a reward model has no vocabulary head
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv = 2 * text.num_hidden_layers * heads * width * 2
    whole = layout.whole
    return Size(whole.all, whole.trained, text.num_hidden_layers, text.hidden_size, text.vocab_size, kv, lora is not None, layout)


def free_memory() -> float:
    """Bytes that are free where the model will lie."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    return float(psutil.virtual_memory().available)


def _changes(
    recipe: TrainRecipe, size: Size, kind: Precision, held: Callable[..., list[Part]], rows: RowLengths | None, free: float, config: Any
) -> list[Change]:
    """Settings to turn, cheapest first, each on top of those before it, until the run fits."""
    changes: list[Change] = []

    def need(recipe: TrainRecipe, size: Size, kind: Precision, rows: RowLengths | None) -> float:
        return together(held(recipe, size, kind, rows=rows))

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
        reward, ranks = isinstance(recipe, RewardRecipe), size.layout.ranks
        lighter = size_of(config, adapted.lora, scores_only=reward, trust_remote_code=recipe.trust_remote_code, ranks=ranks)
        if turn("lora={}", adapted, lighter, kind, rows):
            return changes
    # bfloat16 keeps smaller activations and a copy of the weights: which weighs more depends on the run.
    other: Precision = "fp32" if kind == "bf16" else "bf16"
    if turn(f"precision={other}", recipe.replace(precision=other), size, other, rows):
        return changes
    shorter, cut = recipe, rows
    least = max(128, 2 * recipe.max_completion_length) if isinstance(recipe, SamplingRecipe) else 128  # a prompt needs room too
    while shorter.max_length > least and need(shorter, size, kind, cut) > free:
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
