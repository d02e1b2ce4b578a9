"""The critic: what reward is still to come, asked at every token before it is written.

V_t belongs to the state ahead of token t, so it is read where the model predicts that token (`Packed.predict`). `SharedCritic` is a
head on the policy's own trunk, computed in the same pass; `SeparateCritic` is a model of its own, which may start as a reward model.
Over several ranks that model is sharded as the policy is; the head is whole on each.
Values are float32, whatever the matmuls run in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tether import ranks
from tether.errors import UserError
from tether.packing import Packed
from tether.policy import Policy, options_of
from tether.ppo_recipe import PPORecipe
from tether.run import Run
from tether.scalar import ScalarModel

HEAD = "value_head.safetensors"
FOLDER = "critic"


class Critic(Protocol):
    """Log-probs and values of the trained tokens, both (M,), in as few passes as it takes."""

    def judge(self, policy: Policy, packed: Packed, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(log-probs, values, {"entropy": (M,), ...})."""

    def parameters(self) -> dict[str, nn.Parameter]: ...

    def write_weights(self, folder: Path) -> None: ...

    def read_weights(self, folder: Path) -> None: ...


class SharedCritic:
    """A linear head on the policy's last hidden states. It starts at 0: the first advantages are those of no critic at all."""

    def __init__(self, policy: Policy) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.head = nn.Linear(_width(policy), 1).to(policy.device)
            self.head.weight.zero_()
            self.head.bias.zero_()

    def judge(self, policy: Policy, packed: Packed, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        def read() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            hidden = policy.engine.hidden(packed)  # (N, H)
            logps, stats = policy.engine.logprobs(packed, temperature, stats=True, hidden=hidden)
            return logps, self.head(hidden[packed.predict].float())[:, 0], stats

        # One call: both gradients go back through one pass of a policy that may be sharded.
        out: tuple[Tensor, Tensor, dict[str, Tensor]] = policy.engine.inside(read)
        return out

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.head.named_parameters())

    def write_weights(self, folder: Path) -> None:
        if ranks.first():
            save_file({name: p.detach().contiguous() for name, p in self.parameters().items()}, folder / HEAD)

    def read_weights(self, folder: Path) -> None:
        self.head.load_state_dict(load_file(folder / HEAD))


class SeparateCritic:
    """A model with a score head, asked at every token. It reads the policy's token ids, so its tokenizer must be the policy's."""

    def __init__(self, scalar: ScalarModel, policy: Policy) -> None:
        if scalar.heads != 1:
            raise UserError(
                f"the critic has {scalar.heads} heads, one is wanted", where="critic_model", remedy="Give a model with one head."
            )
        if scalar.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(
                "the critic has another tokenizer than the policy, and it reads the policy's tokens",
                where="critic_model",
                remedy="Give a model of the same family, or leave critic_model out.",
            )
        self.scalar = scalar

    def judge(self, policy: Policy, packed: Packed, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logps, stats = policy.logprobs(packed, temperature, stats=True)
        return logps, self.scalar.values(packed), stats

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.scalar.parameters()

    def write_weights(self, folder: Path) -> None:
        if ranks.first():
            (folder / FOLDER).mkdir()
        self.scalar.write_weights(folder / FOLDER)

    def read_weights(self, folder: Path) -> None:
        self.scalar.read_weights(folder / FOLDER)


def make_critic(recipe: PPORecipe, policy: Policy, run: Run) -> SharedCritic | SeparateCritic:
    """The recipe's critic. A head that a reward model brings along is kept; any other starts afresh."""
    if recipe.critic == "shared":
        return SharedCritic(policy)
    options: dict[str, Any] = options_of(recipe, run)
    scalar = ScalarModel.load(recipe.critic_model or recipe.model, fresh_head=True, **{**options, "precision": policy.precision})
    if scalar.engine.notice:
        run.note("not_packed", f"the critic: {scalar.engine.notice}")
        run.say(f"the critic: {scalar.engine.notice}")
    if ranks.size() > 1:
        scalar.shard()
    return SeparateCritic(scalar, policy)


def _width(policy: Policy) -> int:
    """Of the last hidden states."""
    head = policy.engine.lm_head
    features = getattr(head, "in_features", None)
    return int(features) if features else int(policy.model.get_input_embeddings().weight.shape[1])
