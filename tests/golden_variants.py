"""The golden file, and how each of its variants is computed: a batch and the case's params give what the case expects.

The file is chosen by TETHER_CASES_GOLDEN (default: the copy in tests/cases).
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.slow_way import kl_full
from tether import advantage, masked, stats
from tether.losses import kl
from tether.losses.kto import kto_baseline, kto_loss
from tether.losses.policy_gradient import mismatch_weights, policy_loss
from tether.losses.preference import PREFERENCE_LOSSES, PairLogps, preference_loss
from tether.losses.reward_model import reward_model_loss
from tether.losses.sft import sft_loss
from tether.losses.value import value_loss

FILE = Path(os.environ.get("TETHER_CASES_GOLDEN") or Path(__file__).parent / "cases/losses.json")
GOLDEN = json.loads(FILE.read_text())
CASES = GOLDEN["cases"]

Out = dict[str, Any]


class Batch:
    """The named fields of a batch as tensors; `fill` stands at masked places instead of the file's own filler."""

    def __init__(self, name: str | None, dtype: torch.dtype, fill: float | None) -> None:
        self.fields, self.dtype, self.fill = GOLDEN["batches"][name] if name else {}, dtype, fill

    def __getitem__(self, name: str) -> Tensor:
        values = self.fields[name]
        if name == "reward_matrix":
            values = [[math.nan if x is None else x for x in row] for row in values]
        if name.endswith("mask") or name in ("group_ids", "labels"):
            return torch.tensor(values)
        tensor = torch.tensor(values, dtype=self.dtype)
        if self.fill is not None and tensor.dim() == 2 and name != "reward_matrix":
            kind = next((k for k in ("chosen", "rejected", "kl") if k in name.split("_")), None)
            mask = self[f"{kind}_mask" if kind else "mask"].bool()
            tensor = torch.where(mask, tensor, self.fill)
        return tensor

    def leaf(self, name: str) -> Tensor:
        return self[name].requires_grad_()


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return grad


# --- how each variant is computed: (batch, params) -> what the case expects --------------------------------------------


def pairwise(variant: str) -> Callable[[Batch, dict[str, Any]], Out]:
    def compute(b: Batch, params: dict[str, Any]) -> Out:
        c, r = b.leaf("chosen_logps"), b.leaf("rejected_logps")
        cm, rm = b["chosen_mask"], b["rejected_mask"]
        pairs = PairLogps(
            masked.masked_sum(c, cm, -1),
            masked.masked_sum(r, rm, -1),
            masked.masked_sum(b["ref_chosen_logps"], cm, -1),
            masked.masked_sum(b["ref_rejected_logps"], rm, -1),
            cm.sum(-1),
            rm.sum(-1),
        )
        loss, metrics = preference_loss(pairs, variant, **params)
        per_pair = metrics["loss/per_pair"]
        if PREFERENCE_LOSSES[variant].nll == "token":
            # The file gives every pair the step's mean token loss; ours gives each pair its own share of it. The means agree.
            coef = params.get("nll_coef", 1.0)
            per_pair = per_pair - coef * metrics["nll_loss"] + coef * metrics["nll_loss"].mean()
        return {
            "loss": loss,
            "per_pair": per_pair,
            "grad_chosen_logps": gradient(loss, c),
            "grad_rejected_logps": gradient(loss, r),
            "metrics": {name: value.mean() for name, value in metrics.items()},
        }

    return compute


def kto(b: Batch, params: dict[str, Any]) -> Out:
    policy, shifted = b.leaf("policy_logps"), b.leaf("kl_policy_logps")
    gaps = masked.masked_sum(shifted, b["kl_mask"], -1) - masked.masked_sum(b["kl_ref_logps"], b["kl_mask"], -1)
    z0, raw = kto_baseline(gaps)
    sums = masked.masked_sum(policy, b["mask"], -1)
    loss, metrics = kto_loss(
        sums,
        masked.masked_sum(b["ref_logps"], b["mask"], -1),
        b["labels"],
        z0,
        beta=params["beta"],
        desirable_weight=params["lambda_d"],
        undesirable_weight=params["lambda_u"],
    )
    return {
        "loss": loss,
        "per_item": metrics["loss/per_row"],
        "kl_raw": raw,
        "kl": z0,
        "grad_policy_logps": gradient(loss, policy),
        "grad_kl_policy_logps_must_be_zero": torch.autograd.grad(loss, shifted, allow_unused=True)[0] is None,
        "metrics": {**{k: v.mean() for k, v in metrics.items()}, "kl": z0},
    }


def flat(logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The active tokens as one stream, and the row of each."""
    return logp[mask.bool()], mask.nonzero()[:, 0]


def sft(b: Batch, params: dict[str, Any]) -> Out:
    logp, mask = b.leaf("policy_logps"), b["mask"]
    tokens, row = flat(logp, mask)
    loss = sft_loss(tokens, mode=params["aggregation"], row=row, n_rows=len(mask), norm_constant=params.get("norm_constant"))
    padded = masked.reduce(-logp, mask, params["aggregation"], norm_constant=params.get("norm_constant"))
    torch.testing.assert_close(loss, padded)
    return {"loss": loss, "grad_policy_logps": gradient(loss, logp)}


def sft_accum(b: Batch, params: dict[str, Any]) -> Out:
    logp, mask = b["policy_logps"], b["mask"].bool()
    total = int(mask.sum())
    parts = [sft_loss(logp[rows][mask[rows]], total_tokens=total) for rows in params["microbatches"]]
    wrong = [sft_loss(logp[rows][mask[rows]]) for rows in params["microbatches"]]
    return {
        "loss": sum(parts),
        "microbatch_contributions": torch.stack(parts),
        "global_tokens": total,
        "wrong_mean_of_microbatch_means": torch.stack(wrong).mean(),
    }


def reward_model(b: Batch, params: dict[str, Any]) -> Out:
    chosen, rejected = b.leaf("chosen_scores"), b.leaf("rejected_scores")
    margin = b["margins"] if params.get("use_margin") else None
    loss, metrics = reward_model_loss(chosen, rejected, margin=margin, center_coef=params.get("center_coef", 0.0))
    return {
        "loss": loss,
        "grad_chosen_scores": gradient(loss, chosen),
        "grad_rejected_scores": gradient(loss, rejected),
        "metrics": {name: value.mean() for name, value in metrics.items()},
    }


def row_advantages(b: Batch, params: dict[str, Any]) -> Tensor:
    rewards = b["rewards"]
    if params.get("kl_in_reward"):
        rewards = kl.penalised_rewards(rewards, b["old_logps"], b["ref_logps"], b["mask"], params["kl_in_reward"])
    options = {name: params[name] for name in ("std_kind", "std_eps") if name in params}
    if params["advantage"] in advantage.MIXTURES:
        return advantage.MIXTURES[params["advantage"]](b["reward_matrix"], b["reward_weights"], b["group_ids"], **options)
    return advantage.ADVANTAGES[params["advantage"]](rewards, b["group_ids"], **options)


def token_advantages(b: Batch, params: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(shaped rewards, unwhitened advantages, returns)."""
    shaped = kl.shaped_rewards(
        b["rewards"], b["old_logps"], b["ref_logps"], b["mask"], kl_coef=params["kl_coef"], kind=params.get("kl_kind_reward", "k1")
    )
    if params.get("advantage") == "reinforce_pp":
        togo = advantage.reward_to_go(shaped, b["mask"], params["gamma"])
        return shaped, togo, togo
    return shaped, *advantage.gae(shaped, b["old_values"], b["mask"], params["gamma"], params["lam"])


def advantages_of(b: Batch, params: dict[str, Any]) -> Tensor:
    if params["advantage"] in ("gae", "reinforce_pp"):
        _, values, _ = token_advantages(b, params)
        if params.get("whiten"):
            values = masked.masked_whiten(values, b["mask"], std_kind=params["whiten"])
        return values
    return row_advantages(b, params)


def policy(b: Batch, params: dict[str, Any], values: Tensor | None = None) -> Out:
    logp, values = b.leaf("policy_logps"), advantages_of(b, params) if values is None else values
    names = ("surrogate", "eps_low", "eps_high", "dual_clip", "cispo_lower", "kl_kind", "kl_is_weight", "norm_constant")
    options = {name: params[name] for name in names if name in params}
    weights = None
    if "mismatch" in params:
        bounds = {name: params[name] for name in ("c_min", "c_max") if name in params}
        weights = mismatch_weights(b["old_logps"], b["sampler_logps"], b["mask"], params["mismatch"], **bounds)
    loss, metrics = policy_loss(
        logp,
        b["old_logps"],
        values,
        b["mask"],
        weights=weights,
        ref_logp=b["ref_logps"],
        kl_coef=params.get("kl_loss_coef", 0.0),
        mode=params["aggregation"],
        **options,
    )
    shown = masked.select(values if values.dim() == 2 else values[:, None].expand_as(logp), b["mask"])
    return {"advantages": shown, "loss": loss, "grad_policy_logps": gradient(loss, logp), "metrics": metrics}


def kl_in_loss(b: Batch, params: dict[str, Any]) -> Out:
    logp = b.leaf("policy_logps")
    penalty = kl.kl_penalty(logp, b["ref_logps"], b["mask"], params["kl_kind"])
    value = masked.reduce(penalty, b["mask"], params["aggregation"], norm_constant=params.get("norm_constant"))
    return {"value": value, "grad_policy_logps": gradient(value, logp)}


def critic(b: Batch, params: dict[str, Any]) -> Out:
    values = b.leaf("values")
    shaped, advantages, returns = token_advantages(b, params)
    options = {"mode": params["aggregation"], "norm_constant": params.get("norm_constant")}
    loss, _ = value_loss(values, b["old_values"], returns, b["mask"], value_clip=params["value_clip"], **options)
    return {"shaped_rewards": shaped, "advantages": advantages, "returns": returns, "loss": loss, "grad_values": gradient(loss, values)}


def bandit_exact(b: Batch, params: dict[str, Any]) -> Out:
    """Everything of the enumerable policy, by differentiating the library's own functions and enumerating samples."""
    z, ref, rewards, beta = b.leaf("logits"), b["ref_logits"].log_softmax(-1), b["rewards"], params["beta"]
    logp = z.log_softmax(-1)
    p, n_actions = logp.exp(), len(rewards)
    fixed = p.detach()
    log_z = (ref + rewards / beta).logsumexp(-1)
    star = ref + rewards / beta - log_z
    expected = (p * rewards).sum()
    divergence = kl_full(z, ref)
    objective = expected - beta * divergence
    out: Out = {
        "policy": p,
        "p_star": star.exp(),
        "log_Z": log_z,
        "J_at_policy": objective,
        "J_star": beta * log_z,
        "gap_beta_kl_policy_pstar": beta * kl_full(z, star),
        "kl_policy_ref": divergence,
        "kl_ref_policy": kl_full(ref, z),
        "kl_pstar_ref": kl_full(star, ref),
        "expected_reward": expected,
        "expected_reward_pstar": (star.exp() * rewards).sum(),
        "grad_expected_reward_wrt_logits": gradient(expected, z),
        "grad_J_wrt_logits": gradient(objective, z),
        "grad_kl_policy_ref_wrt_logits": gradient(divergence, z),
    }
    torch.testing.assert_close(out["J_star"] - objective, out["gap_beta_kl_policy_pstar"], rtol=1e-5, atol=1e-6)
    for kind in kl.KL_ESTIMATORS:  # each action is one row of one token, weighted by its probability
        sampled = kl.kl_penalty(logp, ref, torch.ones(n_actions), kind)
        out[f"E_{kind}"] = (fixed * sampled).sum()
        out[f"E_grad_{kind}_in_loss"] = gradient(out[f"E_{kind}"], z)
    out |= group_expectations(z, rewards, params["group_size"])

    n, order = params["best_of_n"], sorted(range(n_actions), key=lambda k: (float(rewards[k]), -k))  # ties: the lower index wins
    best, below = torch.zeros_like(fixed), torch.zeros((), dtype=fixed.dtype)
    for k in order:
        best[k] = (below + fixed[k]) ** n - below**n
        below = below + fixed[k]
    out |= {
        "best_of_n": n,
        "best_of_n_policy": best,
        "best_of_n_expected_reward": (best * rewards).sum(),
        "best_of_n_kl_from_policy": (best * (best / fixed).log()).sum(),
        "best_of_n_kl_bound": math.log(n) - (n - 1) / n,
    }
    return out


def group_expectations(z: Tensor, rewards: Tensor, size: int) -> Out:
    """Exact mean and total variance over all K^G groups of the gradient that the library's loss gives for one group."""
    n_actions, logp = len(rewards), z.log_softmax(-1)
    groups = torch.tensor(list(itertools.product(range(n_actions), repeat=size)))  # (K^G, G)
    chance = logp.detach()[groups].sum(1).exp()
    score = torch.eye(n_actions, dtype=z.dtype) - logp.detach().exp()  # (K, K): gradient of log p(a)
    names = {
        "mean_baseline": ("group_mean", {}),
        "rloo": ("rloo", {}),
        "std_sample": ("group_norm", {"std_kind": "sample", "std_eps": 1e-6}),
        "std_population": ("group_norm", {"std_kind": "population", "std_eps": 1e-6}),
    }
    out: Out = {"group_size": size, "prob_group_degenerate": (logp.detach().exp() ** size).sum()}
    rows = torch.arange(len(groups)).repeat_interleave(size)
    for name, (rule, options) in names.items():
        values = advantage.ADVANTAGES[rule](rewards[groups].flatten(), rows, **options).view(groups.shape)
        gradients = torch.einsum("ng,ngk->nk", values, score[groups]) / size  # (K^G, K)
        mean = chance @ gradients
        out[f"E_grad_group_{name}"] = mean
        out[f"total_variance_group_{name}"] = chance @ ((gradients - mean) ** 2).sum(1)
    first = groups[1]  # one group through the loss itself: the same gradient
    values = advantage.group_mean(rewards[first], torch.zeros(size))
    loss, _ = policy_loss(logp[first][:, None], None, values, torch.ones(size, 1), surrogate="reinforce", mode="seq-mean-token-sum")
    torch.testing.assert_close(-gradient(loss, z), (values[:, None] * score[first]).mean(0))
    return out


def overlong(b: Batch, params: dict[str, Any]) -> Out:
    return {"value": advantage.overlong_penalty(params["length"], params["max_len"], params["cache"])}


def adaptive_kl(b: Batch, params: dict[str, Any]) -> Out:
    controller = kl.AdaptiveKL(params["init"], params["target"], params["horizon"])
    return {"values": [controller.update(seen, params["n_steps"]) for seen in params["observed"]]}


def pass_at_k(b: Batch, params: dict[str, Any]) -> Out:
    return {"value": stats.pass_at_k(params["n"], params["c"], params["k"])}


COMPUTE: dict[str, Callable[[Batch, dict[str, Any]], Out]] = {
    **{name: pairwise(name) for name in PREFERENCE_LOSSES},
    "kto": kto,
    "sft": sft,
    "sft_accum": sft_accum,
    "reward_model": reward_model,
    "advantage": lambda b, params: {"advantages": row_advantages(b, params)},
    "kl_in_loss": kl_in_loss,
    "value_loss": critic,
    "bandit_exact": bandit_exact,
    "overlong": overlong,
    "adaptive_kl": adaptive_kl,
    "pass_at_k": pass_at_k,
}


def compute(case: dict[str, Any], dtype: torch.dtype, fill: float | None = None) -> Out:
    rule = COMPUTE.get(case["variant"], policy)  # every other variant is a policy loss, described by its params
    return rule(Batch(case["batch"], dtype, fill), case["params"])
