"""From rewards to advantages: how much better than expected a completion, or a token of it, turned out.

Per row (`ADVANTAGES`): rewards (N,) and the group of each row (N,), the completions of one prompt instance. A reward that is not
finite means "could not be scored": the row gets advantage 0 and enters no statistic. Whatever divides by a standard deviation
gives exact zeros for a group whose rewards are equal up to rounding, and counts nothing on noise.

Per token: reward-to-go and generalised advantage estimation over active tokens; a hole (a tool's tokens) is skipped.
All advantages are constants of the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tether.masked import StdKind, all_equal, full_precision, select

STD_EPS = 1e-6


def _groups(rewards: Tensor, group_ids: Tensor) -> list[Tensor]:
    """Indices of the scored rows of each group."""
    scored = torch.isfinite(rewards)
    return [torch.nonzero(scored & (group_ids == g)).flatten() for g in torch.unique(group_ids)]


def _std(values: Tensor, std_kind: StdKind) -> Tensor:
    if std_kind not in ("sample", "population"):
        raise ValueError(f"std_kind is 'sample' (n - 1) or 'population' (n), got {std_kind!r}")
    return values.std(correction=1 if std_kind == "sample" else 0)


def no_baseline(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS) -> Tensor:
    """R itself."""
    return torch.where(torch.isfinite(rewards), full_precision(rewards), 0.0)


def batch_mean(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS) -> Tensor:
    """R - mean over the batch (REINFORCE with a baseline)."""
    scored, r = torch.isfinite(rewards), full_precision(rewards)
    return torch.where(scored, r - r[scored].mean(), 0.0)


def group_mean(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS) -> Tensor:
    """R - mean over the group (Dr. GRPO, arXiv:2503.20783): exact in direction, (G-1)/G times the gradient in size."""
    out = torch.zeros_like(full_precision(rewards))
    for rows in _groups(rewards, group_ids):
        if len(rows):
            out[rows] = full_precision(rewards[rows]) - full_precision(rewards[rows]).mean()
    return out


def group_norm(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS) -> Tensor:
    """(R - group mean)/(group std + eps) (GRPO, arXiv:2402.03300): free of the reward's scale, biased in direction.

    One right answer of three, sample standard deviation, gives 2/sqrt(3) and -1/sqrt(3):

    >>> [round(a, 3) for a in group_norm(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3)).tolist()]
    [1.155, -0.577, -0.577]
    """
    out = torch.zeros_like(full_precision(rewards))
    for rows in _groups(rewards, group_ids):
        r = full_precision(rewards[rows])
        if not all_equal(r):
            out[rows] = (r - r.mean()) / (_std(r, std_kind) + std_eps)
    return out


def batch_std(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS) -> Tensor:
    """(R - group mean)/(std of the batch's rewards + eps)."""
    scored = torch.isfinite(rewards)
    r = full_precision(rewards[scored])
    if all_equal(r):
        return torch.zeros_like(full_precision(rewards))
    return _without_equal_groups(group_mean(rewards, group_ids) / (_std(r, std_kind) + std_eps), rewards, group_ids)


def rloo(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS) -> Tensor:
    """R - mean of the other rows of the group (RLOO, arXiv:2402.14740): unbiased. Alone in its group: 0."""
    out = torch.zeros_like(full_precision(rewards))
    for rows in _groups(rewards, group_ids):
        if len(rows) > 1:
            r = full_precision(rewards[rows])
            out[rows] = (r - r.mean()) * len(rows) / (len(rows) - 1)  # the same number, without cancellation of two sums
    return out


def reinforce_pp_baseline(rewards: Tensor, group_ids: Tensor, std_kind: StdKind = "population", std_eps: float = STD_EPS) -> Tensor:
    """Centred by group, then whitened over the batch's rows (REINFORCE++ with baseline, arXiv:2501.03262)."""
    whitened = _whiten_rows(group_mean(rewards, group_ids), torch.isfinite(rewards), std_kind, std_eps)
    return _without_equal_groups(whitened, rewards, group_ids)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "none": no_baseline,
    "batch_mean": batch_mean,
    "group_mean": group_mean,
    "group_norm": group_norm,
    "batch_std": batch_std,
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def sum_then_normalize(
    reward_matrix: Tensor, weights: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS
) -> Tensor:
    """Weighted sum of the reward columns (N, K), unscored entries skipped, then `group_norm`: the widest column decides."""
    return group_norm(weighted_sum(reward_matrix, weights), group_ids, std_kind, std_eps)


def normalize_then_sum(
    reward_matrix: Tensor, weights: Tensor, group_ids: Tensor, std_kind: StdKind = "sample", std_eps: float = STD_EPS
) -> Tensor:
    """`group_norm` of each reward column, weighted sum, then whitened over the batch (GDPO): weights are relative influence."""
    columns = torch.stack([group_norm(column, group_ids, std_kind, std_eps) for column in reward_matrix.unbind(1)], 1)
    scored = torch.isfinite(reward_matrix).any(1)
    return _whiten_rows(columns @ weights.to(columns), scored, std_kind, std_eps)


MIXTURES: dict[str, Callable[..., Tensor]] = {"sum_then_normalize": sum_then_normalize, "normalize_then_sum": normalize_then_sum}


def weighted_sum(reward_matrix: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over reward functions (N, K) -> (N,); an unscored entry is skipped, a row with none is NaN (unscored)."""
    scored = torch.isfinite(reward_matrix)
    total = torch.where(scored, full_precision(reward_matrix), 0.0) @ weights.to(full_precision(reward_matrix))
    return torch.where(scored.any(1), total, torch.nan)


def _without_equal_groups(advantages: Tensor, rewards: Tensor, group_ids: Tensor) -> Tensor:
    out = advantages.clone()
    for rows in _groups(rewards, group_ids):
        if all_equal(full_precision(rewards[rows])):
            out[rows] = 0.0
    return out


def _whiten_rows(values: Tensor, scored: Tensor, std_kind: StdKind, std_eps: float) -> Tensor:
    v = values[scored]
    if all_equal(v):
        return torch.zeros_like(values)
    return torch.where(scored, (values - v.mean()) / (_std(v, std_kind) + std_eps), 0.0)


def overlong_penalty(length: Tensor | int, max_length: int, cache: int) -> Tensor:
    """Soft length penalty (DAPO, arXiv:2503.14476, eq. 13): 0 up to max_length - cache, falling to -1 at max_length, -1 beyond.

    >>> overlong_penalty(90, max_length=100, cache=20).item()
    -0.5
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache must lie in 1..max_length, got {cache} of {max_length}")
    n = torch.as_tensor(length)
    return ((max_length - cache - n.double()) / cache).clamp(-1.0, 0.0)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of this and all later active rewards of the row, (B, T); 0 at masked places."""
    kept, active = select(rewards, mask), mask.bool()
    out, ahead = torch.zeros_like(kept), torch.zeros_like(kept[:, 0])
    for t in reversed(range(kept.shape[1])):
        ahead = torch.where(active[:, t], kept[:, t] + gamma * ahead, ahead)
        out[:, t] = torch.where(active[:, t], ahead, 0.0)
    return out


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) by generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, where "next" is the next active token; after the last
    one V is 0, also for truncated rows. returns = A + V with the unwhitened A. Masked places give 0 and may hold anything.
    """
    r, v, active = select(rewards, mask), select(values, mask).detach(), mask.bool()
    advantages = torch.zeros_like(r)
    next_value, next_advantage = torch.zeros_like(r[:, 0]), torch.zeros_like(r[:, 0])
    for t in reversed(range(r.shape[1])):
        here = active[:, t]
        advantage = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, v[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages, select(advantages + v, active)
