"""What the settings of `tether grpo` and `tether ppo` amount to: the objective with its numbers, and the method it equals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tether.errors import UserError
from tether.explain_lines import get, line
from tether.grpo_recipe import PRESETS, preset_settings
from tether.losses.sheet import POLICY_PRESETS

CLIP = "min(rho*A, clip(rho, 1-{eps_low}, 1+{eps_high})*A)"
SEVERAL = "(several rewards: each is compared in its group first, then their weighted sum is whitened over the batch)"

ADVANTAGE_FORMULAS: dict[str, str] = {
    "batch_mean": "A = R - mean of the batch",
    "group_mean": "A = R - mean of the group",
    "group_norm": "A = (R - mean of the group)/(std of the group + 1e-6), exactly 0 where all rewards are equal",
    "batch_std": "A = (R - mean of the group)/(std of the batch + 1e-6)",
    "rloo": "A = R - mean of the group's other rows",
    "reinforce_pp": "A = reward-to-go of (reward at the last token, KL penalty at every token), whitened",
    "reinforce_pp_baseline": "A = R - mean of the group, whitened over the batch",
}
SURROGATE_FORMULAS: dict[str, str] = {
    "reinforce": "A*log pi",
    "ppo": CLIP,
    "seq_ratio": CLIP,
    "gspo": CLIP,
    "gspo_token": CLIP,
    "cispo": "constant(min(rho, 1+{eps_high}))*A*log pi",
}
RATIOS: dict[str, str] = {
    "ppo": "pi/old of the token",
    "cispo": "pi/old of the token",
    "seq_ratio": "pi/old of the whole answer",
    "gspo": "(pi/old of the whole answer) to the power 1/length",
    "gspo_token": "(pi/old of the whole answer) to the power 1/length, with the gradient of the token",
}
REDUCTION_WORDS: dict[str, str] = {
    "token-mean": "mean over all tokens of the step",
    "seq-mean-token-mean": "mean over rows of the row's token mean",
    "seq-mean-token-sum": "mean over rows of the row's token sum",
    "seq-mean-token-sum-norm": "sum over tokens / (rows * {length})",
}
KL_FORMULAS = {"k1": "delta", "k2": "delta^2/2", "k3": "exp(-delta) - 1 + delta"}
DEFAULTS: dict[str, Any] = {
    "advantage": "group_norm",
    "surrogate": "ppo",
    "aggregation": "token-mean",
    "kl_in": "loss",
    "beta": 0.0,
    "eps_low": 0.2,
    "eps_high": 0.2,
    "std": "sample",
    "dynamic_sampling": False,
}


def grpo(recipe: Any) -> Iterator[str]:
    """The lines of a grpo recipe; a preset's choices stand in where the recipe does not say."""
    preset = get(recipe, "preset")
    if preset is not None and preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}", where="preset", remedy=f"Choose one of {', '.join(PRESETS)}.")
    choice = DEFAULTS | (preset_settings(preset) if preset else {})
    choice = {name: get(recipe, name, value) for name, value in choice.items()}
    yield f"Policy gradient: {'the preset ' + preset if preset else 'settings without a preset'}"
    numbers = {name: f"{choice[name]:g}" for name in ("eps_low", "eps_high")}
    objective = SURROGATE_FORMULAS[choice["surrogate"]].format(**numbers)
    beta, kind = float(choice["beta"]), get(recipe, "kl_kind", "k3")
    in_loss = beta > 0 and choice["kl_in"] == "loss"
    over = REDUCTION_WORDS[choice["aggregation"]].format(length=get(recipe, "max_completion_length", "fixed length"))
    weighted = get(recipe, "importance", "none") != "none"
    penalty = f" + {beta:g}*{'rho*' if get(recipe, 'kl_unbiased') else ''}{kind}" if in_loss else ""
    yield line("minimise", f"{over} of  -{'w*' if weighted else ''}{objective}{penalty}")
    yield line("where", ADVANTAGE_FORMULAS[choice["advantage"]])
    if get(recipe, "reward_mixture") == "normalize_then_sum":
        yield line("", SEVERAL)
    if choice["surrogate"] in RATIOS:
        yield line("", f"rho = {RATIOS[choice['surrogate']]}; old = the policy that sampled")
    dual = get(recipe, "dual_clip")
    if dual is not None and choice["surrogate"] in ("ppo", "gspo", "gspo_token", "seq_ratio"):
        yield line("", f"where A < 0 the objective is at least {dual:g}*A (dual clip, Ye et al. 2020, arXiv:1912.09729)")
    yield from _weights(recipe)
    if in_loss:
        yield line("", f"{kind} = {KL_FORMULAS[kind]}, delta = log pi - log ref")
    elif beta > 0:
        yield line("", f"R is lessened by {beta:g}*(log old - log ref), summed over the answer, before it is compared")
    yield from _tie(recipe, beta)
    name, departs = _published(preset, choice)
    yield line("method", f"{name}, {POLICY_PRESETS[name].paper}")
    for text in departs:
        yield line("departs", text)
    yield from _notes(recipe, choice, in_loss)
    yield from _one_step(recipe)


def ppo(recipe: Any) -> Iterator[str]:
    """The lines of a ppo recipe."""
    settings = POLICY_PRESETS["ppo"].settings
    low, high = get(recipe, "eps_low", settings["eps_low"]), get(recipe, "eps_high", settings["eps_high"])
    beta, gamma, lam = (float(get(recipe, name, value)) for name, value in (("beta", 0.05), ("gamma", 1.0), ("lam", 0.95)))
    vf, clip, shared = float(get(recipe, "vf_coef", 0.1)), get(recipe, "value_clip"), get(recipe, "critic", "shared") == "shared"
    yield "Proximal policy optimisation with " + ("a critic on the policy's trunk" if shared else "a critic of its own")
    value = f"max((V-ret)^2, (clip(V, V_old-{clip:g}, V_old+{clip:g})-ret)^2)" if clip else "(V-ret)^2"
    yield line(
        "minimise", f"{REDUCTION_WORDS['token-mean']} of  -{CLIP.format(eps_low=f'{low:g}', eps_high=f'{high:g}')} + {vf:g}*0.5*{value}"
    )
    whiten = ", then whitened over the batch's tokens" if get(recipe, "whiten_advantages", True) else ""
    yield line("where", f"A_t = delta_t + {gamma * lam:g}*A_t+1, delta_t = r_t + {gamma:g}*V_t+1 - V_t, and 0 after the last token{whiten}")
    cost = f"-{beta:g}*(log old - log ref)" if beta else "0"
    yield line("", f"r_t = {cost} at every token, plus the score at the last; ret = A + V_old, before whitening")
    yield line("", f"rho = {RATIOS['ppo']}; old, V_old = policy and critic that sampled")
    yield line("", f"score = {_score(recipe)}")
    dual = get(recipe, "dual_clip")
    if dual is not None:
        yield line("", f"where A < 0 the objective is at least {dual:g}*A (dual clip, Ye et al. 2020, arXiv:1912.09729)")
    yield from _weights(recipe)
    yield from _tie(recipe, beta)
    yield line("method", f"PPO, {POLICY_PRESETS['ppo'].paper}; advantages: Schulman et al. 2015, arXiv:1506.02438, eq. 16")
    yield line("departs", "the score is paid at the last sampled token; a cut answer is taken to end where it was cut")
    if gamma < 1:
        yield line("departs", f"gamma {gamma:g} below 1 makes later rewards worth less: it punishes length")
    if not beta:
        yield line("note", "no tie to the reference: watch the answers themselves, not the reward alone")
    yield from _one_step(recipe)


def _score(recipe: Any) -> str:
    text = "reward" + (" / spread of all rewards so far" if get(recipe, "score_scaling", "none") == "running" else "")
    clip, missing = get(recipe, "score_clip"), float(get(recipe, "missing_end_penalty", 0.0))
    text += f", clipped to +-{clip:g}" if clip else ""
    return text + (f", less {missing:g} where the answer has no end" if missing else "")


def _weights(recipe: Any) -> Iterator[str]:
    kind = get(recipe, "importance", "none")
    if kind != "none":
        low, high = get(recipe, "importance_min", 0.0), get(recipe, "importance_max", 2.0)
        yield line("", f"w = old/sampler, {kind.replace('_', ' ')} to {low:g} .. {high:g}; a constant")


def _tie(recipe: Any, beta: float) -> Iterator[str]:
    if not beta:
        return
    target, every = get(recipe, "kl_target"), get(recipe, "reference_refresh_steps")
    yield line("", f"ref = the policy {f'as it was at the last multiple of {every} steps' if every else 'at the start'}")
    if target is not None:
        yield line(
            "",
            f"{beta:g} is where it starts: after every step it is multiplied by "
            f"1 + clip(KL/{target:g} - 1, -0.2, 0.2)*answers/{get(recipe, 'kl_horizon', 10000.0):g}, KL in nats per answer",
        )


def _published(preset: str | None, choice: dict[str, Any]) -> tuple[str, list[str]]:
    """The preset, or the row most like the settings; and in words where they part."""
    kin = [n for n in PRESETS if POLICY_PRESETS[n].surrogate == choice["surrogate"].removesuffix("_token")]
    names = [preset] if preset else [n for n in kin if n != "reinforce_pp" or choice["advantage"] == n] or list(PRESETS)
    best, parts = "", None
    for name in names:
        found = _parting(choice, DEFAULTS | preset_settings(name))
        if parts is None or len(found) < len(parts):
            best, parts = name, found
    return best, parts or []


def _parting(choice: dict[str, Any], row: dict[str, Any]) -> list[str]:
    out = []
    if choice["advantage"] != row["advantage"]:
        out.append(f"{ADVANTAGE_FORMULAS[choice['advantage']]}, in place of {ADVANTAGE_FORMULAS[row['advantage']]}")
    if choice["surrogate"] != row["surrogate"]:
        out.append(f"surrogate {choice['surrogate']} in place of {row['surrogate']}")
    if choice["aggregation"] != row["aggregation"]:
        words = [REDUCTION_WORDS[x["aggregation"]].format(length="fixed length") for x in (choice, row)]
        out.append(f"{words[0]} in place of {words[1]}")
    tie, theirs = float(choice["beta"]), float(row["beta"])
    where = "in the " + choice["kl_in"] if tie else "left out"
    if bool(tie) != bool(theirs) or (tie and choice["kl_in"] != row["kl_in"]):
        out.append(f"tie to the reference {where}")
    clips = choice["surrogate"] != "reinforce" and row["surrogate"] == choice["surrogate"]
    if clips and (choice["eps_low"] < choice["eps_high"]) != (row["eps_low"] < row["eps_high"]):
        out.append("equal bounds of the clip" if choice["eps_low"] == choice["eps_high"] else "unequal bounds of the clip")
    if clips and "gspo" in choice["surrogate"] and choice["eps_high"] > 0.05:
        out.append(
            f"bounds of {choice['eps_low']:g} and {choice['eps_high']:g} hardly ever clip a ratio per answer (the paper: 3e-4, 4e-4)"
        )
    if row.get("dynamic_sampling") and not choice["dynamic_sampling"]:
        out.append("prompts whose answers all earn the same are not replaced by others")
    return out


def _notes(recipe: Any, choice: dict[str, Any], in_loss: bool) -> Iterator[str]:
    several = int(get(recipe, "updates_per_batch", 1)) * int(get(recipe, "mini_batches", 1)) > 1
    if not several and choice["surrogate"] in RATIOS:
        zero = "" if in_loss or choice["aggregation"] != "seq-mean-token-mean" else "; the loss shown is 0 with a gradient that is not"
        yield line("note", f"one update for a batch: rho is 1, the clip rests and the gradient is that of REINFORCE{zero}")
    if get(recipe, "dynamic_sampling"):
        rounds = get(recipe, "max_sampling_rounds", 3)
        yield line("note", f"prompts whose answers all earn the same are replaced by others, in at most {rounds} rounds")
    cache = get(recipe, "overlong_cache")
    if cache is not None:
        length = get(recipe, "max_completion_length", 512)
        yield line("note", f"R falls by up to 1 over the last {cache} tokens before {length} (DAPO, arXiv:2503.14476, eq. 13)")
    if get(recipe, "mask_truncated"):
        yield line("note", "answers that are cut off stay out of the loss and its totals; their reward stays in the group")
    if choice["advantage"] == "group_norm":
        yield line("note", "dividing by the spread makes nearly solved and nearly hopeless prompts count most")


def _one_step(recipe: Any) -> Iterator[str]:
    rows, group, rate = get(recipe, "batch_size"), get(recipe, "num_generations"), get(recipe, "learning_rate")
    if not (rows and rate):
        return
    what = f"{rows // group} prompts x {group} completions" if group else f"{rows} completions"
    passes, parts = int(get(recipe, "updates_per_batch", 1)), int(get(recipe, "mini_batches", 1))
    if passes * parts > 1:
        what += f", learnt from in {passes} pass{'es' if passes > 1 else ''} of {parts} update{'s' if parts > 1 else ''}"
    yield line("one step", f"{what}, AdamW at learning rate {rate:g}; divided by the whole update's total, however it is split")
