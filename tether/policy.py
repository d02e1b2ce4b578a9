"""The model as algorithms see it: log-probabilities, its reference, its trainable parameters, saving."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tether import adapters, models, ranks
from tether import precision as arithmetic
from tether.adapters import is_adapted
from tether.engine import Engine
from tether.errors import UserError
from tether.packing import Packed
from tether.precision import Precision
from tether.sharding import InParts, Twin

if TYPE_CHECKING:
    from tether.chat import Codec
    from tether.recipe import LoraConfig, TrainRecipe
    from tether.run import Run


class Policy(InParts):
    """A language model to train, with the model it started from at hand.

    Weights are float32 whatever they are stored in; `precision` is what the matmuls run in. What is trainable:

    | `name` is | `lora` | trainable | reference |
    |---|---|---|---|
    | a model | None | every weight | a frozen copy |
    | a model | given | a fresh adapter | the model with the adapter off |
    | an adapter folder | None or equal | that adapter | the adapter as it was |
    """

    def __init__(self, model: Any, tokenizer: Any, engine: Engine, *, name: str, trust_remote_code: bool = False) -> None:
        self.model, self.tokenizer, self.engine = model, tokenizer, engine
        self.name, self.trust_remote_code = name, trust_remote_code
        self.precision: Precision = engine.precision
        self._reference: Engine | None = None
        self._reference_fingerprint: str | None = None
        self._witness = _witness(model)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        precision: str = "auto",
        lora: LoraConfig | None = None,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
        train_dropout: bool = False,
        chat_template: str | None = None,
        seed: int = 0,
    ) -> Policy:
        """`name` as in `load_model`. `seed` decides a fresh adapter; the global random state is left alone.

        Dropout stays off, in the adapter too, unless `train_dropout`: with it on, a policy differs from its own reference.
        `chat_template` is template text that replaces the tokenizer's, also in what is saved.
        """
        model: Any
        with _random_state_kept():
            model, tokenizer = models.load_model(name, trust_remote_code=trust_remote_code)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if is_adapted(model):
            adapters.train_from(model, Path(name).expanduser(), lora)
        elif lora is not None:
            model = adapters.add_lora(model, lora, seed=seed)
        if ranks.size() == 1:  # else each layer goes to its device as it is sharded
            model.to(_device())
        engine = Engine(
            model,
            precision=arithmetic.choose(precision),
            gradient_checkpointing=gradient_checkpointing,
            train_dropout=train_dropout,
        )
        return cls(model, tokenizer, engine, name=str(name), trust_remote_code=trust_remote_code)

    @classmethod
    def from_recipe(cls, recipe: TrainRecipe, run: Run) -> Policy:
        """The policy that a run trains, sharded over its ranks. A resumed run keeps the precision it began with."""
        policy = cls.load(recipe.model, **options_of(recipe, run), train_dropout=_wants_dropout(recipe))
        record(policy, run)
        if ranks.size() > 1:
            policy.shard()
        return policy

    def shard(self) -> None:
        """Leave each rank its part of every weight."""
        self._twin = Twin(self.model)
        self.engine.shard()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def codec(self) -> Codec:
        from tether.chat import Codec

        return Codec(self.tokenizer, generation_config=getattr(self.model, "generation_config", None))

    def logprobs(self, packed: Packed, temperature: float = 1.0, stats: bool = False) -> Any:
        """log pi of the trained tokens, (M,) float32; with `stats` as `Engine.logprobs`."""
        return self.engine.logprobs(packed, temperature, stats)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; tied ones once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
        """A model folder (`save_model`), or with an adapter a PEFT folder (`save_adapter`)."""

        def write(model: Any) -> None:
            if is_adapted(model):
                adapters.save_adapter(model, self.tokenizer, folder)
            else:
                models.save_model(model, self.tokenizer, folder, dtype=dtype)

        self.on_first(write)
        return ranks.share(Path(folder))

    def save_result(self, run: Run) -> Path:
        """`save` into the run's `model/`; says so when storing in half precision takes back most of what was learnt."""
        folder = self.save(run.folder / "model")
        stored = models.source_dtype(self.model)
        if is_adapted(self.model) or stored not in (torch.float16, torch.bfloat16):
            return folder
        with self.whole(in_memory=True) as model:
            pairs = list(zip(self._witness, _witness(model), strict=True))
        trained = _share([now != start for start, now in pairs])
        kept = _share([now.to(stored).float() != start for start, now in pairs])
        if kept < trained / 2:
            words = (
                f"training moved {trained:.1%} of the weights; stored in {str(stored).removeprefix('torch.')}, as the model came, only "
                f"{kept:.1%} of them differ from the start. The float32 weights are a model folder too: {run.checkpoints()[-1]}"
            )
            run.note("rounded_away", words)
            run.say("warning: " + words)
        return folder

    def write_weights(self, folder: Path) -> None:
        """For a checkpoint: what training changes, bit for bit."""
        self.on_first(lambda model: adapters.write_trained(model, self.tokenizer, folder))

    def read_weights(self, folder: Path) -> None:
        self.restored(lambda model: adapters.read_trained(model, folder))

    # -- the reference -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reference(self) -> Iterator[Reference]:
        """The policy as it was at the start, without gradient, for as long as the block lasts.

        A full model is copied on the first call (or loaded again if training has already moved it); `drop_reference` frees it.
        """
        with torch.no_grad():
            if is_adapted(self.model):
                with adapters.as_reference(self.model):
                    yield Reference(self.engine)
            else:
                if self._reference is None:
                    self._reference = self._frozen_copy()
                yield Reference(self._reference)

    def drop_reference(self) -> None:
        self._reference = None

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[Reference]:
        """As `reference`, for use before training only: a full model that has not moved is not copied for it."""
        if not is_adapted(self.model) and self._reference is None and self.untouched():
            with torch.no_grad():
                yield Reference(self.engine)
            return
        held = self._reference
        with self.reference() as reference:
            yield reference
        self._reference = held

    def untouched(self) -> bool:
        """Whether the trainable weights are still those that were loaded (a sample of each is compared)."""
        with self.whole(in_memory=True) as model:
            return self._as_loaded(model)

    def _as_loaded(self, model: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._witness, _witness(model), strict=True))

    def reference_fingerprint(self) -> str:
        """The reference by content: equal for a model with a fresh adapter and for the model alone."""
        if self._reference_fingerprint is None:
            with self.whole(in_memory=True) as model:
                if is_adapted(model):
                    state = adapters.reference_state(model)
                    self._reference_fingerprint = models.fingerprint_of(state, model.get_base_model().config)
                else:
                    self._reference_fingerprint = models.fingerprint(model if self._as_loaded(model) else self._load_again())
        return self._reference_fingerprint

    def _frozen_copy(self) -> Engine:
        """An engine over weights that share nothing with the policy's. Under bf16 the matrices are kept in bf16: they are
        rounded to it in every matmul anyway, so the numbers are the same."""
        with self.whole(in_memory=True) as whole:
            model = copy.deepcopy(whole) if self._as_loaded(whole) else self._load_again()
        if self._twin is None:  # else each layer goes to its device as it is sharded
            model.to(self.device)
        for parameter in model.parameters():
            parameter.grad = None
        model.requires_grad_(False)
        engine = Engine(model, precision=self.precision)
        if self.precision == "bf16" and engine.packed:
            embedding = model.get_input_embeddings().weight
            for module in model.modules():
                if type(module) is nn.Linear and module.weight is not embedding:
                    module.weight.data = module.weight.data.to(torch.bfloat16)
        if self._twin is not None:
            engine.shard()
        return engine

    def _load_again(self) -> Any:
        with _random_state_kept():
            model, _ = models.load_model(self.name, trust_remote_code=self.trust_remote_code)
        known = self._reference_fingerprint
        if known is not None and models.fingerprint(model) != known:
            raise UserError(
                "the model this run started from has changed on disk, and it is needed as the reference",
                where=self.name,
                remedy="Put the old model back, or start a new run.",
            )
        return model


class Reference:
    """What the policy is tied to: log-probabilities and nothing else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @torch.no_grad()
    def logprobs(self, packed: Packed, temperature: float = 1.0) -> Tensor:
        """(M,) float32, without gradient."""
        logps: Tensor = self._engine.logprobs(packed, temperature)
        return logps


def options_of(recipe: TrainRecipe, run: Run) -> dict[str, Any]:
    """What a recipe says about loading, for a policy and a reward model alike. Takes the threads that it asks for, too."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    template = None
    if recipe.chat_template is not None:
        path = Path(recipe.chat_template)
        if not path.is_file():
            raise UserError("there is no such template file", where=f"chat_template: {path}", remedy="Give the path of a Jinja file.")
        template = path.read_text(encoding="utf-8")
    return {
        "precision": run.recorded("precision") or recipe.precision,
        "lora": recipe.lora,
        "gradient_checkpointing": recipe.gradient_checkpointing,
        "trust_remote_code": recipe.trust_remote_code,
        "chat_template": template,
        "seed": recipe.seed,
    }


def record(model: Any, run: Run) -> None:
    """Keep in the run what was decided by measuring, and say what is slower than it could be."""
    run.record("precision", model.precision)
    if model.engine.notice:
        run.note("not_packed", model.engine.notice)
        run.say(model.engine.notice)


def _wants_dropout(recipe: TrainRecipe) -> bool:
    return recipe.lora is not None and recipe.lora.dropout > 0 and not recipe.dropout_forbidden


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _witness(model: Any) -> list[Tensor]:
    """A few values of each trainable parameter. An optimiser step moves every one that has a gradient; version counters of
    tensors would not do, because fused optimisers leave them alone."""
    return [p.detach().reshape(-1)[:64].cpu().clone() for p in model.parameters() if p.requires_grad]


def _share(where: list[Tensor]) -> float:
    return float(torch.cat(where).double().mean()) if where else 0.0


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Building a model draws random numbers for weights that are then overwritten."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
