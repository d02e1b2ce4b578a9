"""The model as a function of a packed stream: hidden states, and log-probabilities of the trained tokens.

At creation a probe runs the model on a few random tokens both ways, packed and as plain padded rows. A model that cannot be
packed (recurrent layers, attention of its own) takes the padded path: the same numbers, more slowly, with a notice.
Outside the engine's calls the model is untouched: its attention, its modules and its config are as they were.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.attention import IMPLEMENTATION, Plan, attending, recording_windows
from tether.batch import Example
from tether.block import Block, blocks_for
from tether.casts import Casts
from tether.head import Scores, token_logprobs
from tether.packing import Packed, pack
from tether.padding import Padded, pad

if TYPE_CHECKING:
    from tether.sharding import Root

Precision = Literal["fp32", "bf16"]
Path = Literal["packed", "padded", "whole"]  # whole: padded, and scores only from the full model's own forward


class Engine:
    """Runs a causal language model over packed streams.

    `precision="bf16"` keeps float32 weights, residual stream, norms and reductions around bfloat16 matmuls;
    "fp32" computes in the weights' own type. Dropout is off unless `train_dropout=True`: with it on, the same weights give two
    different answers and a ratio or margin that should start at nothing does not.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: Precision,
        gradient_checkpointing: bool = False,
        train_dropout: bool = False,
    ) -> None:
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is fp32 or bf16, got {precision!r}")
        self.model = model
        self.precision, self.gradient_checkpointing, self.train_dropout = precision, gradient_checkpointing, train_dropout
        # transformers shares one config between models built from it, and it remembers the attention implementation.
        memo: dict[int, Any] = {}
        # Any: transformers' methods are not known to nn.Module, whose attributes type as Tensor or Module.
        whole: Any = model
        for module in whole.modules():
            if hasattr(module, "config"):
                module.config = copy.deepcopy(module.config, memo)
        self._causal: Any = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
        self._decoder: Any = self._causal.get_decoder()
        self._scores = _scores_of(self._causal.config)
        self._takes = frozenset(inspect.signature(self._decoder.forward).parameters)
        self._casts = Casts()
        self._blocks: dict[nn.Module, Block] = {}
        self._root: Root | None = None  # of a sharded model
        self._inside = False
        self._path: Path = "packed"
        self.notice: str | None = None
        self._choose_path()

    @property
    def packed(self) -> bool:
        return self._path == "packed"

    @property
    def _has_head(self) -> bool:
        return self._causal.get_output_embeddings() is not None

    @property
    def lm_head(self) -> nn.Module:
        head = self._causal.get_output_embeddings()
        if head is None:
            raise TypeError(f"{type(self._causal).__name__} has no vocabulary head")
        return head

    # -- over several ranks ----------------------------------------------------------------------------------------

    def shard(self, *others: nn.Module) -> None:
        """Leave each rank its part of the model, and of `others`: modules that are computed with it, inside `inside`."""
        from tether.sharding import shard

        layers = [module for module in self._decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._casts = Casts(keep=False)  # gathered weights change without a trace
        for block in self._blocks.values():
            block.casts = self._casts
        self._root = shard([self.model, *others], layers)

    def inside(self, compute: Callable[..., Any], *args: Any) -> Any:
        """`compute(*args)`, with the weights at hand that lie outside the layers. Whatever reads a sharded model's weights, other than
        this engine's own calls, goes through here; all that belongs to one backward pass in one call."""
        if self._root is None or self._inside:
            return compute(*args)
        from tether.sharding import release

        self._inside = True
        try:
            return self._root(compute, *args)
        finally:
            self._inside = False
            if not torch.is_grad_enabled():
                release(self._root)

    # -- the two questions an algorithm asks -----------------------------------------------------------------------

    def hidden(self, packed: Packed) -> Tensor:
        """Last hidden states after the final norm, (N, H), one for each token of the stream."""
        return self.inside(self._hidden, packed)

    def _hidden(self, packed: Packed) -> Tensor:
        if self.packed:
            with self._running(Plan(packed.segments)):
                out = self._decoder(**self._inputs(packed.tokens[None], positions=packed.positions[None]))
            return out.last_hidden_state[0]
        padded = pad(packed)
        with self._running(None):
            out = self._decoder(**self._inputs(padded.tokens, mask=padded.mask))
        return padded.gather(out.last_hidden_state)

    def logprobs(self, packed: Packed, temperature: float = 1.0, stats: bool = False, hidden: Tensor | None = None) -> Any:
        """log pi(targets | past), (M,) float32. `hidden` (N, H), where `hidden(packed)` is at hand already, saves a pass.

        `stats=True` returns `(logprobs, {"entropy": (M,) nats, "correct": (M,) bool})`, both without gradient.
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        return self.inside(self._logprobs, packed, temperature, stats, hidden)

    def _logprobs(self, packed: Packed, temperature: float, stats: bool, hidden: Tensor | None) -> Any:
        if self._path == "whole":
            head: nn.Module = nn.Identity()
            states = self._whole_logits(pad(packed), packed.predict)
            scores = Scores(temperature=temperature)
        else:
            head = self.lm_head
            states = (self._hidden(packed) if hidden is None else hidden)[packed.predict]  # (M, H)
            scores = Scores(self._scores.scale, self._scores.softcap, temperature)
        with self._running(None), self._autocast():
            result = token_logprobs(
                states, head, packed.targets, scores, compute=self._compute_dtype(states), stats=stats, casts=self._casts
            )
        if not stats:
            return result.logprobs
        return result.logprobs, {"entropy": result.entropy, "correct": result.correct}

    # -- running the model -----------------------------------------------------------------------------------------

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else x.dtype

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(next(self._decoder.parameters()).device.type, dtype=torch.bfloat16)

    def _inputs(self, tokens: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": tokens}
        if positions is not None:
            inputs["position_ids"] = positions
        if mask is not None:
            inputs["attention_mask"] = mask
        if "use_cache" in self._takes:
            inputs["use_cache"] = False
        return inputs

    def _whole_logits(self, padded: Padded, predict: Tensor) -> Tensor:
        with self._running(None):
            logits = self.model(input_ids=padded.tokens, attention_mask=padded.mask, use_cache=False).logits
        return padded.gather(logits)[predict]

    @contextlib.contextmanager
    def _running(self, plan: Plan | None) -> Iterator[None]:
        """Dropout, attention, checkpointing and autocast as a forward pass needs them; all put back afterwards."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_mode(self.model, train=self.train_dropout and torch.is_grad_enabled()))
            stack.enter_context(self._recomputable(plan))
            # The blocks know no dropout.
            blocks = self._blocks if plan is not None and not self.train_dropout else {}
            checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
            again = (lambda: self._recomputable(plan)) if checkpointing else None
            stack.enter_context(_layers_as(self._decoder, blocks, again))
            stack.enter_context(self._autocast())
            yield

    @contextlib.contextmanager
    def _recomputable(self, plan: Plan | None) -> Iterator[None]:
        """What must hold again when a checkpointed layer runs a second time in the backward pass."""
        if plan is None:
            yield
            return
        with attending(plan), _implementation(self._decoder, IMPLEMENTATION):
            yield

    # -- which path --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _choose_path(self) -> None:
        name = type(self._causal).__name__
        why = _cannot_be_packed(self._decoder.config)
        examples = _probe_examples(self._decoder.config)
        expected = self._plain_probe(examples)
        if why is None:
            with recording_windows() as windows:
                why = self._differs(examples, expected)
            if why is None and not _windows(self._decoder.config) <= set(windows):
                why = "it has a sliding window that its attention function is not told about"
        if why is None:
            self._try_blocks(examples, expected, list(windows))
            return
        self.notice = f"{name} cannot be packed ({why}); rows are padded instead, which gives the same numbers more slowly."
        self._path = "padded"
        why = self._differs(examples, expected)
        if why is not None and self._has_head:
            self._path = "whole"

    def _try_blocks(self, examples: list[Example], expected: Tensor, windows: list[int | None]) -> None:
        """Use fused blocks for the layers that have one, if results, windows and a layer's gradients stay what they are."""
        self._blocks = blocks_for(self._decoder, self._casts)
        if not self._blocks:
            return
        with recording_windows() as seen:
            why = self._differs(examples, expected)
        if why is None and seen != windows:
            why = "its fused layers have other sliding windows"
        if why is None:
            why = self._gradients_differ(pack(examples, device=self._device))
        if why is not None:
            self._blocks = {}
            self.notice = f"{type(self._causal).__name__} runs without fused layers ({why}): the same numbers more slowly."

    def _gradients_differ(self, packed: Packed) -> str | None:
        """Gradients of one layer, fused and by plain autograd, by its input and its trainable parameters."""
        layer: Any = next(iter(self._blocks))
        plan = Plan(packed.segments)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, len(packed.tokens), self._decoder.config.hidden_size, generator=generator)
        x = x.to(self._device, self._decoder.dtype).requires_grad_()
        inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found = []
        with torch.enable_grad(), self._recomputable(plan), _mode(layer, train=False):
            rotary = self._decoder.rotary_emb(x, packed.positions[None])
            for forward in (layer.forward, self._blocks[layer]):
                y = forward(x, attention_mask=None, position_ids=packed.positions[None], position_embeddings=rotary)
                found.append(torch.autograd.grad((y * torch.linspace(-1.0, 1.0, y.shape[-1], device=y.device)).sum(), inputs))
        for plain, fused in zip(*found, strict=True):
            gap, size = float((plain - fused).abs().max()), float(plain.abs().max())
            if not gap <= self._tolerance * max(size, 1e-6):
                return f"a layer's gradients differ by {gap / max(size, 1e-6):.1e}"
        return None

    @property
    def _tolerance(self) -> float:
        # Weights in half precision round differently whatever the path; a wrong path is wrong by the spread of the scores.
        return 1e-4 if self._decoder.dtype in (torch.float32, torch.float64) else 5e-2

    def _plain_probe(self, examples: list[Example]) -> Tensor:
        """Log-probabilities by the model's own forward, a row at a time: no padding, no packing.

        For a model without a vocabulary head: the hidden states of each answer's last token.
        """
        parts = []
        with _mode(self.model, train=False):
            for example in examples:
                for answer in example.answers:
                    row = torch.tensor([example.prompt + answer], device=self._device)
                    if not self._has_head:
                        parts.append(self._decoder(**self._inputs(row)).last_hidden_state[0, -1])
                        continue
                    logits = self.model(input_ids=row, use_cache=False).logits[0, len(example.prompt) - 1 : -1]
                    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
                    parts.append(logp.gather(1, row[0, len(example.prompt) :, None])[:, 0])
        return torch.cat(parts)

    def _differs(self, examples: list[Example], expected: Tensor) -> str | None:
        """None if the present path gives the expected log-probabilities, else what is wrong, in words."""
        precision, self.precision = self.precision, "fp32"
        try:
            packed = pack(examples, device=self._device)
            found = self.logprobs(packed) if self._has_head else self.hidden(packed)[packed.last].flatten()
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        finally:
            self.precision = precision
        gap = float((found - expected).abs().max())
        if gap <= self._tolerance * max(1.0, float(expected.abs().max())):
            return None
        return f"its {self._path} and plain results differ by {gap:.1e}"

    @property
    def _device(self) -> torch.device:
        return next(self._decoder.parameters()).device


def _scores_of(config: Any) -> Scores:
    """What the model does to its projection; the probe finds a model that does anything else."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Scores(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def _cannot_be_packed(config: Any) -> str | None:
    """What only a longer probe would show."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "attention_chunk_size", None):
        return "it attends in chunks"
    return None


def _windows(config: Any) -> set[int]:
    """Sliding windows that the config promises."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return {window} if window and used else set()


def _probe_examples(config: Any) -> list[Example]:
    """A pair and a single answer of random tokens; the global random state is left alone."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(1, config.vocab_size, (n,), generator=generator).tolist()

    def example(prompt: int, *answers: int) -> Example:
        return Example(tokens(prompt), [tokens(n) for n in answers], [[True] * n for n in answers])

    return [example(5, 4, 7), example(3, 6)]


@contextlib.contextmanager
def _mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Train or evaluation mode for every module, each put back to what it was."""
    changed = [module for module in model.modules() if module.training != train]
    for module in changed:
        module.training = train
    try:
        yield
    finally:
        for module in changed:
            module.training = not train


@contextlib.contextmanager
def _implementation(decoder: nn.Module, name: str) -> Iterator[None]:
    configs: dict[int, Any] = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


@contextlib.contextmanager
def _layers_as(decoder: nn.Module, blocks: dict[nn.Module, Block], again: Callable[[], Any] | None) -> Iterator[None]:
    """Layers run as their block if they have one, and recompute themselves in the backward pass if there is an `again`.

    transformers' own switch for recomputation does nothing in evaluation mode, which is how dropout is kept off.
    """

    def recomputed(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            assert again is not None
            return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), again()), **kwargs)

        return run

    layers: list[nn.Module] = list(blocks)
    if again is not None:
        layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        forward = blocks.get(layer, layer.forward)
        layer.forward = forward if again is None else recomputed(forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
