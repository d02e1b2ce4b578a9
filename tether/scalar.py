"""One number per answer: a transformer with a linear head, read at the answer's last token.

The head has no bias: comparisons cannot see a constant, so a bias would stay where it began. The model is the architecture's
own `...ForSequenceClassification`, so a saved folder is a reward model for transformers too.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tether import adapters, models, ranks
from tether import precision as arithmetic
from tether.adapters import is_adapted
from tether.batch import Example
from tether.engine import Engine
from tether.errors import UserError
from tether.headed import classifier_class, set_pad_token
from tether.packing import Packed, own_parts, pack
from tether.policy import options_of, record
from tether.precision import Precision
from tether.sharding import InParts, Twin

if TYPE_CHECKING:
    from tether.chat import Codec
    from tether.recipe import LoraConfig, RewardRecipe
    from tether.run import Run

SIDE_FILE = "scalar.json"  # what a model folder has no place for: mean, std and lcb
HEAD = "score.weight"


class ScalarModel(InParts):
    """A reward model. Scores depend on a prompt and an answer alone, never on what else is in the batch.

    `mean` and `std` say where its scores lie (`set_normalisation`), `lcb` how much the spread of several heads counts.
    """

    def __init__(self, model: Any, tokenizer: Any, engine: Engine, *, mean: float = 0.0, std: float = 1.0, lcb: float = 1.0) -> None:
        self.model, self.tokenizer, self.engine = model, tokenizer, engine
        self.precision: Precision = engine.precision
        self.mean, self.std, self.lcb = mean, std, lcb

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        heads: int | None = None,
        precision: str = "auto",
        lora: LoraConfig | None = None,
        fresh_head: bool = False,
        lcb: float | None = None,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        seed: int = 0,
    ) -> ScalarModel:
        """A saved reward model, its adapter folder, or a foreign `...ForSequenceClassification` folder.

        A model without a head is UserError, unless `fresh_head`: then it gets `heads` heads (1 if None), normal with standard
        deviation 1/sqrt(width + 1), drawn from `seed`. A stored head is always kept; `heads` that contradicts it is UserError.
        """
        side: dict[str, float] = {}
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            path = Path(name).expanduser()
            if (path / SIDE_FILE).is_file():
                side = _read_side_file(path / SIDE_FILE)
            if path.is_dir() and (path / "adapter_config.json").exists():
                model, tokenizer = _load_adapted(path, lora, fresh_head, heads, trust_remote_code, seed)
            else:
                model, tokenizer = _load_plain(name, heads, fresh_head, trust_remote_code, seed)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if heads is not None and heads != model.config.num_labels:
            raise UserError(
                f"the model has {model.config.num_labels} heads, not {heads}",
                where=str(name),
                remedy="Leave heads out, or start from a language model.",
            )
        if lora is not None and not is_adapted(model):
            model = adapters.add_lora(model, lora, seed=seed, extra_modules=("score",))
        set_pad_token(model.get_base_model() if is_adapted(model) else model, tokenizer)
        if ranks.size() == 1:  # else each layer goes to its device as it is sharded
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        engine = Engine(_Headless(model), precision=arithmetic.choose(precision), gradient_checkpointing=gradient_checkpointing)
        return cls(model, tokenizer, engine, **{**side, **({} if lcb is None else {"lcb": lcb})})

    @classmethod
    def from_recipe(cls, recipe: RewardRecipe, run: Run) -> ScalarModel:
        """The reward model that a run trains: with a fresh head, unless it starts from a reward model."""
        assert recipe.model is not None
        model = cls.load(recipe.model, heads=recipe.heads, fresh_head=True, lcb=recipe.lcb, **options_of(recipe, run))
        record(model, run)
        if ranks.size() > 1:
            model.shard()
        return model

    def shard(self) -> None:
        """Leave each rank its part of every weight."""
        self._twin = Twin(self.model)
        self.engine.shard(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def heads(self) -> int:
        return int(self.model.config.num_labels)

    @cached_property
    def codec(self) -> Codec:
        from tether.chat import Codec

        return Codec(self.tokenizer)

    # -- scores --------------------------------------------------------------------------------------------------------

    def scores(self, packed: Packed) -> Tensor:
        """(A, heads) float32, read at each answer's last token (its end mark included)."""
        return self._read(packed, packed.last)

    def values(self, packed: Packed) -> Tensor:
        """(M,) float32, the one head read ahead of each trained token: a critic's values."""
        return self._read(packed, packed.predict)[:, 0]

    def _read(self, packed: Packed, places: Tensor) -> Tensor:
        """(places, heads) of the head at these places of the stream."""

        def read() -> Tensor:
            hidden = self.engine.hidden(packed)[places]
            base = self.model.get_base_model() if is_adapted(self.model) else self.model
            scores: Tensor = base.score(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
            return scores

        out: Tensor = self.engine.inside(read)
        return out

    def combine(self, scores: Tensor) -> Tensor:
        """(A, heads) -> (A,): mean over heads - lcb x their standard deviation (population). One head: the score itself."""
        if scores.shape[-1] == 1:
            return scores[..., 0]
        return scores.mean(-1) - self.lcb * scores.std(-1, correction=0)

    def set_normalisation(self, *, mean: float, std: float) -> None:
        """Where combined scores lie on typical answers; kept with the model. UserError when they have no spread."""
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise UserError(
                f"scores with mean {mean} and spread {std} cannot be normalised", remedy="The model gives all answers one score."
            )
        self.mean, self.std = mean, std

    @torch.no_grad()
    def score_texts(self, texts: Sequence[tuple[Any, Any]], *, normalised: bool = False, tokens_per_micro_batch: int = 4096) -> list[float]:
        """One number for each (prompt, answer), by this model's own tokenizer; messages go through its template, text is plain.

        Token ids are refused: another model's ids mean other words here. `normalised` gives (score - mean) / std.
        """
        rendered = []
        # A prompt is computed once for the answers in a row; plain text goes through no template and stands apart from messages.
        for (prompt, _), group in itertools.groupby(texts, key=lambda text: (text[0], isinstance(text[1], str))):
            answers = [answer for _, answer in group]
            for text in (prompt, *answers):
                _refuse_ids(text)
            rendered.append(self.codec.render_answers(prompt, answers))
            for note in rendered[-1].notes:
                if note.action == "drop":
                    raise UserError(note.what, where=f"text {sum(len(r.answers) for r in rendered) + 1}", remedy=note.remedy)
        out = self.score_examples(self.codec.examples(rendered), tokens_per_micro_batch)
        return ((out - self.mean) / self.std if normalised else out).tolist()

    @torch.no_grad()
    def score_examples(self, examples: Sequence[Example], tokens_per_micro_batch: int) -> Tensor:
        """Combined scores of every answer, in order of examples then answers, (A,) in main memory; over several ranks on all of them."""
        starts = [0, *itertools.accumulate(len(e.answers) for e in examples)]
        out = torch.zeros(starts[-1])
        for part in own_parts(examples, tokens_per_micro_batch):
            packed = pack([examples[i] for i in part], device=self.device)
            places = [place for i in part for place in range(starts[i], starts[i + 1])]
            out[torch.tensor(places, dtype=torch.long)] = self.combine(self.scores(packed)).float().cpu()
        return ranks.summed(out)  # an answer's score is 0 on all ranks but the one that computed it

    # -- trained and kept ----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
        """A reward model folder for transformers, or with an adapter a PEFT folder that holds the head too.

        Without an adapter the weights are stored as float32 unless `dtype` says otherwise: scores come back bit for bit.
        """
        files = {SIDE_FILE: self._side_file()}

        def write(model: Any) -> None:
            if is_adapted(model):
                adapters.save_adapter(model, self.tokenizer, folder, files=files)
            else:
                models.save_model(model, self.tokenizer, folder, dtype=dtype or model.dtype, files=files)

        self.on_first(write)
        return ranks.share(Path(folder))

    def write_weights(self, folder: Path) -> None:
        """For a checkpoint: what training changes, bit for bit."""

        def write(model: Any) -> None:
            adapters.write_trained(model, self.tokenizer, folder)
            (folder / SIDE_FILE).write_text(self._side_file())

        self.on_first(write)

    def read_weights(self, folder: Path) -> None:
        self.restored(lambda model: adapters.read_trained(model, folder))
        side = _read_side_file(folder / SIDE_FILE)
        self.mean, self.std = side["mean"], side["std"]

    def _side_file(self) -> str:
        return json.dumps({"format": 1, "heads": self.heads, "mean": self.mean, "std": self.std, "lcb": self.lcb}, indent=2) + "\n"


def _load_plain(name: str | Path, heads: int | None, fresh_head: bool, trust_remote_code: bool, seed: int) -> tuple[Any, Any]:
    """A whole model: its stored head, or a fresh one if that is allowed."""
    path = Path(name).expanduser()
    source, local_only = str(name), True
    if source == "smollm2":
        source = str(models.fetch_smollm2())
    elif path.suffix == ".gguf":
        return _from_language_model(*models.load_model(path), heads=heads or 1, fresh_head=fresh_head, seed=seed, name=source)
    else:
        local_only = models.check_source(name)
    source = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    config = models.load_config(source, trust_remote_code=trust_remote_code, local_only=local_only)
    claims = any("SequenceClassification" in a for a in config.architectures or ())
    model, lacking = models.load_weights(
        classifier_class(config, source),
        source,
        torch.float32,
        trust_remote_code=trust_remote_code,
        local_only=local_only,
        may_lack={HEAD},
        num_labels=config.num_labels if claims else heads or 1,
    )
    if not hasattr(model, "score"):
        raise UserError(f"{type(model).__name__} has no score head", where=source, remedy="Use a decoder model (such as Llama or Qwen).")
    if lacking:
        if claims or not fresh_head:
            raise _no_head(source)
        fresh(model.score, seed)
    return model, models.load_tokenizer(source, trust_remote_code=trust_remote_code, local_only=local_only)


def _from_language_model(language_model: Any, tokenizer: Any, *, heads: int, fresh_head: bool, seed: int, name: str) -> tuple[Any, Any]:
    """The trunk of a loaded language model under a fresh head."""
    if not fresh_head:
        raise _no_head(name)
    language_model.config.num_labels = heads
    kind = classifier_class(language_model.config, name)
    model = kind(language_model.config).to(language_model.dtype).eval()
    trunk = getattr(language_model, language_model.base_model_prefix)
    getattr(model, model.base_model_prefix).load_state_dict(trunk.state_dict())
    model.tether_source = getattr(language_model, "tether_source", name)
    fresh(model.score, seed)
    return model, tokenizer


def _load_adapted(
    folder: Path, lora: LoraConfig | None, fresh_head: bool, heads: int | None, trust_remote_code: bool, seed: int
) -> tuple[Any, Any]:
    """A reward model's adapter, head included; or a language model's adapter, merged, under a fresh head."""
    config, tensors = adapters.read_adapter(folder)
    head = tensors.get(f"base_model.model.{HEAD}")
    if config.task_type != "SEQ_CLS" and head is None:
        if not fresh_head:
            raise _no_head(str(folder))
        if lora is not None:
            raise UserError(
                "a reward model's adapter would lie on another adapter", where=str(folder), remedy="Merge that one first: `tether merge`."
            )
        from tether.merging import merge

        language_model, tokenizer = models.load_model(folder, trust_remote_code=trust_remote_code)
        merged = merge(language_model, where=str(folder))
        return _from_language_model(merged, tokenizer, heads=heads or 1, fresh_head=True, seed=seed, name=str(folder))
    if head is None:
        raise _no_head(str(folder))
    base, tokenizer = _load_plain(adapters.find_base(folder, config), len(head), True, trust_remote_code, seed)
    if (folder / "tokenizer_config.json").exists():
        tokenizer = models.load_tokenizer(folder, trust_remote_code=trust_remote_code)
    adapters.check_settings(config, lora, folder)
    config.inference_mode = False
    model = adapters.wrap(base, config)
    adapters.fill(model, tensors, adapters.TRAINED, where=folder)
    return model, tokenizer


def fresh(head: nn.Linear, seed: int) -> None:
    """Normal with standard deviation 1/sqrt(width + 1): scores start near 0, whatever the width."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1))


def _no_head(where: str) -> UserError:
    return UserError(
        "this model has no score head: it is not a reward model, or its head was lost",
        where=where,
        remedy="Give a reward model (`tether reward` makes one); a random head would give random scores.",
    )


def _refuse_ids(text: Any) -> None:
    if not isinstance(text, str) and not (isinstance(text, (list, tuple)) and all(isinstance(m, dict) for m in text)):
        raise TypeError(f"a reward model scores text or messages by its own tokenizer, got {type(text).__name__}; decode token ids first")


def _read_side_file(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_text())
        return {name: float(content[name]) for name in ("mean", "std", "lcb")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the reward model's normalisation cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            remedy="Copy the folder again, or delete this file to use raw scores.",
        ) from error


class _Headless(nn.Module):
    """The trunk dressed as a language model, so that the engine can find out whether it packs: its scores over the
    vocabulary are the hidden states projected on the input embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.get_base_model() if is_adapted(model) else model
        self.trunk = getattr(base, base.base_model_prefix)
        self.config = SimpleNamespace()  # no scaling or capping of scores: the projection is plain
        weight = base.get_input_embeddings().weight
        width = base.score.in_features
        with torch.random.fork_rng(devices=[]):
            self.projection = nn.Linear(width, weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        if width == weight.shape[1]:
            self.projection.weight = weight

    def get_decoder(self) -> Any:
        return self.trunk

    def get_output_embeddings(self) -> nn.Linear:
        return self.projection

    def forward(self, **inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.projection(self.trunk(**inputs).last_hidden_state))
