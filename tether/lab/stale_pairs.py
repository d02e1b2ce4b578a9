"""Pairs of yesterday against answers of today: the best answer is in no pair.

Six answers with logits of their own. The reference gives the best one 2 %; the pairs are drawn from the reference's other five, as if it
had not come up. DPO on these pairs is set beside the same loss on pairs of the policy's own answers, and beside PPO and GRPO, which ask for the
reward of what they sample. Each update sees sixteen answers. The reward is exact and so is what each policy earns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.advantage import group_norm
from tether.lab import bandit
from tether.losses.kl import penalised_rewards
from tether.losses.policy_gradient import policy_loss
from tether.losses.preference import PairLogps, preference_loss
from tether.losses.value import value_loss

REF = torch.tensor([0.34, 0.28, 0.18, 0.12, 0.06, 0.02], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 2.0, 0.0, 2.5, 1.5, 5.0], dtype=torch.float64)
BEST = 5
SEEN = torch.arange(6) != BEST
BETA = 0.5  # of DPO, and of the KL in the reward of PPO: the same optimum
GRPO_KL = 0.1  # of the KL in the loss of GRPO, whose rewards are divided by their deviation: another scale
ANSWERS = 16  # of one update
RUNS = 32  # policies that learn side by side, each with draws of its own


def optimal_reward() -> float:
    """Expected reward of ref exp(r/beta) / Z."""
    return bandit.optimum(REWARDS, REF.log(), BETA).reward


def limit_of_pairs() -> Tensor:
    """Probabilities (6,) that DPO reaches with ever more pairs of the seen answers.

    Each pair moves two logits by opposite amounts: the seen ones keep their sum and take the gaps of log ref + r/beta, the unseen
    one stays where it was.
    """
    logits = REF.log()
    logits[SEEN] += REWARDS[SEEN] / BETA - (REWARDS[SEEN] / BETA).mean()
    return logits.softmax(0)


@dataclass
class Policies:
    """RUNS policies of six logits each, all at the reference, and their random draws."""

    logits: Tensor  # (RUNS, 6)
    rng: torch.Generator

    @classmethod
    def made(cls, seed: int) -> Policies:
        return cls(REF.log().repeat(RUNS, 1).requires_grad_(), torch.Generator().manual_seed(seed))

    @property
    def logps(self) -> Tensor:
        return self.logits.log_softmax(-1)

    def draw(self, p: Tensor, n: int) -> Tensor:
        """(RUNS, n) answers; `p` is (RUNS, 6) or (6,)."""
        return torch.multinomial(p.detach().expand(RUNS, -1), n, replacement=True, generator=self.rng)

    def step(self, loss: Tensor, rate: float) -> None:
        (gradient,) = torch.autograd.grad(loss, self.logits)
        self.logits = (self.logits - rate * gradient).detach().requires_grad_()

    def label(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(chosen, rejected) of pairs, by the true rewards through Bradley and Terry."""
        first = torch.rand(a.shape, generator=self.rng, dtype=torch.float64) < torch.sigmoid(REWARDS[a] - REWARDS[b])
        return torch.where(first, a, b), torch.where(first, b, a)


def dpo_loss(logps: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Pairs (RUNS, n): the sum over runs of each one's mean."""
    ref = REF.log().expand(RUNS, -1)
    c, r, ref_c, ref_r = (x.gather(1, y).flatten() for x in (logps, ref) for y in (chosen, rejected))
    one = torch.ones_like(c)
    return preference_loss(PairLogps(c, r, ref_c, ref_r, one, one), "dpo", beta=BETA, total_pairs=chosen.shape[1])[0]


def fixed_pairs(policies: Policies, n_pairs: int = 512, rate: float = 1.0) -> Callable[[], None]:
    """DPO on the same pairs of the reference's answers throughout."""
    p = torch.where(SEEN, REF, 0.0)
    chosen, rejected = policies.label(policies.draw(p, n_pairs), policies.draw(p, n_pairs))

    def update() -> None:
        rows = torch.randint(n_pairs, (RUNS, ANSWERS // 2), generator=policies.rng)
        policies.step(dpo_loss(policies.logps, chosen.gather(1, rows), rejected.gather(1, rows)), rate)

    return update


def fresh_pairs(policies: Policies, rate: float = 1.0) -> Callable[[], None]:
    """DPO on pairs of what the policy itself says now."""

    def update() -> None:
        p = policies.logps.exp()
        policies.step(dpo_loss(policies.logps, *policies.label(policies.draw(p, ANSWERS // 2), policies.draw(p, ANSWERS // 2))), rate)

    return update


def grpo(policies: Policies, rate: float = 0.2) -> Callable[[], None]:
    """One update a batch; group of sixteen, divided by its deviation; KL in the loss (k3)."""
    runs = torch.arange(RUNS).repeat_interleave(ANSWERS)

    def update() -> None:
        logps = policies.logps
        drawn = policies.draw(logps.exp(), ANSWERS)
        logp = logps.gather(1, drawn).view(-1, 1)
        ref = REF.log()[drawn].view(-1, 1)
        advantages = group_norm(REWARDS[drawn].flatten(), runs)
        mask = torch.ones_like(logp)
        loss, _ = policy_loss(
            logp, logp.detach(), advantages, mask, ref_logp=ref, kl_coef=GRPO_KL, mode="seq-mean-token-mean", total_rows=ANSWERS
        )
        policies.step(loss, rate)

    return update


def ppo(policies: Policies, rate: float = 0.1, epochs: int = 4, critic_rate: float = 0.3) -> Callable[[], None]:
    """Four updates a batch with the clip; a critic of one number, as there is one prompt; KL in the reward (k1)."""
    values = torch.zeros(RUNS, 1, dtype=torch.float64, requires_grad=True)

    def update() -> None:
        nonlocal values
        drawn = policies.draw(policies.logps.exp(), ANSWERS)
        old = policies.logps.gather(1, drawn).detach().view(-1, 1)
        mask = torch.ones_like(old)
        returns = penalised_rewards(REWARDS[drawn].flatten(), old, REF.log()[drawn].view(-1, 1), mask, BETA)[:, None]
        old_values = values.detach().repeat_interleave(ANSWERS, 0)
        for _ in range(epochs):
            logp = policies.logps.gather(1, drawn).view(-1, 1)
            policies.step(policy_loss(logp, old, returns - old_values, mask, total_tokens=ANSWERS)[0], rate)
            error, _ = value_loss(values.repeat_interleave(ANSWERS, 0), old_values, returns, mask, value_clip=None, total_tokens=ANSWERS)
            (gradient,) = torch.autograd.grad(error, values)
            values = (values - critic_rate * gradient).detach().requires_grad_()

    return update


METHODS: dict[str, Callable[[Policies], Callable[[], None]]] = {
    "DPO, fixed pairs": fixed_pairs,
    "DPO, fresh pairs": fresh_pairs,
    "PPO": ppo,
    "GRPO": grpo,
}


@dataclass(frozen=True)
class Learned:
    """Means over the runs: exact expected reward before each update and after the last; then the last policy."""

    reward: list[float]
    best: float  # probability of the best answer
    kl: float  # KL(policy, reference), nats


def learn(method: str, *, updates: int = 300, seed: int = 0) -> Learned:
    policies = Policies.made(seed)
    update = METHODS[method](policies)
    rewards = []
    for _ in range(updates):
        rewards.append(_earned(policies))
        update()
    logps = policies.logps.detach()
    return Learned([*rewards, _earned(policies)], float(logps.exp()[:, BEST].mean()), float(bandit.kl(logps, REF.log()).mean()))


def _earned(policies: Policies) -> float:
    return float((policies.logps.detach().exp() @ REWARDS).mean())
