"""What one training step costs on this machine, measured on one and two layers of the model and scaled up to all of them.

The layers are random, so no weights are loaded: neither memory nor time depends on their values.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tether.batch import Example
from tether.engine import Engine
from tether.hub import quiet
from tether.packing import pack
from tether.precision import Precision

ROW = 128  # tokens of a probe row: half prompt, half answer


@dataclass(frozen=True)
class Linear:
    """A quantity that grows in a line with tokens and layers: rest + layers x layer, each fixed + tokens x slope."""

    layer_fixed: float
    layer_slope: float
    rest_fixed: float
    rest_slope: float

    def at(self, layers: int, tokens: float) -> float:
        return self.rest_fixed + tokens * self.rest_slope + layers * (self.layer_fixed + tokens * self.layer_slope)

    @classmethod
    def through(cls, shallow: tuple[float, float], deep: tuple[float, float], extra_layers: int, few: int, many: int) -> Linear:
        """From values at (few, many) tokens for a model of one layer and for one with `extra_layers` more.

        >>> Linear.through((10.0, 15.0), (13.0, 20.0), 1, 1, 2)
        Linear(layer_fixed=1.0, layer_slope=2.0, rest_fixed=4.0, rest_slope=3.0)
        """
        layer = [max(0.0, (d - s) / extra_layers) for s, d in zip(shallow, deep, strict=True)]
        rest = [max(0.0, s - own) for s, own in zip(shallow, layer, strict=True)]

        def line(at_few: float, at_many: float) -> tuple[float, float]:
            slope = max(0.0, (at_many - at_few) / (many - few))
            fixed = max(0.0, at_many - slope * many)
            return fixed, (at_many - fixed) / many

        return cls(*line(*layer), *line(*rest))


@dataclass(frozen=True)
class Cost:
    """Of one micro-batch, forward and backward."""

    activation_bytes: Linear  # kept for the backward pass, without the vocabulary projection's chunk
    seconds: Linear  # proportional to tokens
    forward_share: float  # of the seconds, when nothing is kept for a backward pass
    update_seconds_per_parameter: float
    packed: bool


def measure(config: Any, *, precision: Precision, scores_only: bool = False, patience_s: float = 10.0) -> Cost:
    """Run one and a few layers of the model that `config` describes. `scores_only`: a reward model, without vocabulary head.

    Both are timed in turn and the best of each is taken, because whatever else the machine does only makes a run longer.
    """
    few, many = ROW, 4 * ROW
    with torch.random.fork_rng(devices=[]):
        shallow = random_model(config, 1)
        deep_layers = 1 + (3 if _layer_parameters(shallow) < 30e6 else 1)
        models = [shallow, random_model(config, deep_layers)]
    engines = [Engine(model, precision=precision) for model in models]
    kept = [(kept_bytes(_step(e, few, scores_only), e.model), kept_bytes(_step(e, many, scores_only), e.model)) for e in engines]
    runs = [_step(engine, many, scores_only) for engine in engines]
    one, deep, forward = _in_turn([lambda: runs[0]().backward(), lambda: runs[1]().backward(), _without_grad(runs[1])], patience_s)
    layer = max(0.0, (deep - one) / (deep_layers - 1)) / many
    return Cost(
        Linear.through(kept[0], kept[1], deep_layers - 1, few, many),
        Linear(0.0, layer, 0.0, max(0.0, one / many - layer)),
        min(1.0, forward / deep),
        _update_seconds(models[1]),
        engines[1].packed,
    )


def random_model(config: Any, layers: int) -> Any:
    """The model's first layers with random float32 weights."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def kept_bytes(run: Callable[[], Tensor], model: Any) -> float:
    """Bytes that a forward pass keeps for its backward pass, each storage once, the model's own weights not counted."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = run()
    total = float(sum(storages.values()))
    del loss  # until here the graph held every storage, so that no address was used twice
    return total


def _step(engine: Engine, tokens: int, scores_only: bool) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(0)
    model: Any = engine.model
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator).tolist()
    rows = [ids[i : i + ROW] for i in range(0, tokens, ROW)]
    examples = [Example(row[: ROW // 2], [row[ROW // 2 :]], [[True] * (ROW // 2)]) for row in rows]
    device = next(model.parameters()).device
    packed = pack(examples, device=device)

    def run() -> Tensor:
        if scores_only:
            return engine.hidden(packed)[packed.last].float().mean()
        logps: Tensor = engine.logprobs(packed)
        return -logps.mean()

    return run


def _without_grad(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(run)


def _in_turn(runs: list[Callable[[], Any]], patience_s: float, rounds: int = 4) -> list[float]:
    """The shortest time of each after one round that warms up; fewer rounds when they take longer than `patience_s`."""
    best = [float("inf")] * len(runs)
    started = time.perf_counter()
    for turn in range(rounds):
        for i, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                best[i] = min(best[i], time.perf_counter() - began)
        if turn and time.perf_counter() - started > patience_s:
            break
    return best


def _layer_parameters(model: Any) -> int:
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return sum(p.numel() for p in model.parameters() if id(p) not in embeddings)


def _update_seconds(model: Any) -> float:
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
    return _in_turn([optimizer.step], 5.0, rounds=3)[0] / sum(p.numel() for p in parameters)
