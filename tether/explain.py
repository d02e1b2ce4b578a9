"""What a recipe's settings amount to: the objective as one formula with its numbers, and the published method it equals.

Free of torch. The formulas are those of `losses/sheet.py`; this page fills in numbers and says how the recipe departs.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tether.errors import UserError
from tether.losses.sheet import POLICY_PRESETS, SHEET, Preset, Sheet, loss_settings, resolve_loss

KTO_PAPER = "Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8"
CLIP = "min(rho*A, clip(rho, 1-{eps_low}, 1+{eps_high})*A)"

ADVANTAGE_FORMULAS: dict[str, str] = {
    "batch_mean": "A = R - mean of the batch",
    "group_mean": "A = R - mean of the group",
    "group_norm": "A = (R - mean of the group)/(std of the group + 1e-6), exactly 0 where all rewards are equal",
    "batch_std": "A = (R - mean of the group)/(std of the batch + 1e-6)",
    "rloo": "A = R - mean of the group's other rows",
    "gae": "A = generalised advantage estimate of (reward at the last token, KL penalty at every token) against the critic, whitened",
    "reinforce_pp": "A = reward-to-go of (reward at the last token, KL penalty at every token), whitened",
}
SURROGATE_FORMULAS: dict[str, str] = {
    "reinforce": "A*log pi",
    "ppo": CLIP,
    "gspo": CLIP,
    "cispo": "constant(min(rho, 1+{eps_high}))*A*log pi",
}
REDUCTION_WORDS: dict[str, str] = {
    "token-mean": "mean over all tokens of the step",
    "seq-mean-token-mean": "mean over rows of the row's token mean",
    "seq-mean-token-sum": "mean over rows of the row's token sum",
    "seq-mean-token-sum-norm": "sum over tokens / (rows * fixed length)",
}


def explain(recipe: Any) -> str:
    """The objective of a recipe in words and one formula. `recipe` has its settings as attributes or as mapping keys.

    >>> print(explain({"command": "dpo", "loss_type": "dpo", "beta": 0.1}).splitlines()[1])
      minimise  mean over pairs of  -log s(0.1*d)
    """
    command = _get(recipe, "command")
    if command not in COMMANDS:
        raise UserError(f"there is no objective for {command!r}", where="command", remedy=f"Choose one of {', '.join(COMMANDS)}.")
    return "\n".join(COMMANDS[command](recipe))


def _get(recipe: Any, name: str, default: Any = None) -> Any:
    value = recipe.get(name) if isinstance(recipe, Mapping) else getattr(recipe, name, None)
    return default if value is None else value


def _line(label: str, text: str) -> str:
    """One labelled entry; long ones are folded, a formula never."""
    if label == "minimise":
        return f"  {label:<9} {text}"
    return textwrap.fill(text, 118, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12, break_on_hyphens=False)


def _step(recipe: Any, unit: str) -> Iterator[str]:
    rows, rate = _get(recipe, "batch_size"), _get(recipe, "learning_rate")
    if rows and rate:
        yield _line("one step", f"{rows} {unit}, AdamW at learning rate {rate:g}; divided by the whole step's total, however it is split")


# --- sft ---------------------------------------------------------------------------------------------------------------


def _sft(recipe: Any) -> Iterator[str]:
    trained = {
        "assistant": "the tokens of every assistant turn with its end token",
        "last": "the tokens of the last assistant turn with its end token",
        "all": "every token of the text, the prompt too",
    }[_get(recipe, "train_on", "assistant")]
    yield "SFT: maximum likelihood of the given answers"
    yield _line("minimise", "-(1/D) * sum over trained tokens of log pi(token | its past)")
    yield _line("where", f"trained: {trained}; D = their number in the whole optimiser step")
    yield _line("method", "token mean over the step; a mean of micro-batch means would weigh short rows more")
    yield from _step(recipe, "conversations")


# --- reward ------------------------------------------------------------------------------------------------------------


def _reward(recipe: Any) -> Iterator[str]:
    margin, center = _get(recipe, "margin", True), float(_get(recipe, "center_coef", 0.0))
    features, heads = _get(recipe, "features"), int(_get(recipe, "heads", 1))
    yield "Reward model: Bradley-Terry on comparisons, P(a beats b) = s(r_a - r_b)"
    formula = "-log s(r_w - r_l - m)" if margin else "-log s(r_w - r_l)"
    if features:
        l2 = float(_get(recipe, "feature_l2", 0.0))
        yield _line("minimise", f"mean over pairs of  {formula}" + (f"  +  {l2:g}/2*|w|^2" if l2 else ""))
        yield _line("where", "r = bias + " + " + ".join(f"w_{i}*{name}" for i, name in enumerate(features, 1)))
        yield _line("", "the bias is in both scores and cancels: its gradient is exactly 0 and it stays where it starts")
    else:
        formula += f" + {center:g}*(r_w + r_l)^2" if center else ""
        over = f"mean over pairs and over {heads} heads of" if heads > 1 else "mean over pairs of"
        yield _line("minimise", f"{over}  {formula}")
        yield _line("where", "r = the scalar head at the answer's last token; a prompt with k answers counts once (weight 1/its pairs)")
    if margin:
        yield _line("", "m = the row's margin, 0 where it has none")
    yield _line("method", "Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1")
    if margin:
        yield _line("with", "margins as in Llama 2, arXiv:2307.09288, eq. 2")
    if features:
        epochs, rate = _get(recipe, "feature_epochs", 200), float(_get(recipe, "feature_learning_rate", 0.1))
        yield _line("one step", f"{_get(recipe, 'batch_size', 8)} pairs, gradient descent at {rate:g}, {epochs} passes")
        return
    if center:
        yield _line("with", "centred scores, Eisenstein et al. 2023, arXiv:2312.09244: the one term that sees a constant offset")
    else:
        yield _line("note", "a constant added to every score changes nothing: only differences of scores mean anything")
    if heads > 1:
        lcb = float(_get(recipe, "lcb", 1.0))
        yield _line("used as", f"mean of the heads - {lcb:g} * their standard deviation (Coste et al. 2023, arXiv:2310.02743)")
    yield from _step(recipe, "prompts")


# --- dpo and its family ------------------------------------------------------------------------------------------------


def _dpo(recipe: Any) -> Iterator[str]:
    name = _get(recipe, "loss_type", "dpo")
    if name == "kto":
        yield from _kto(recipe)
        return
    name = resolve_loss(name)
    row = SHEET[name]
    values = loss_settings(name, {key: _get(recipe, key) for key in (*row.uses, "label_smoothing")})
    smoothing = values.get("label_smoothing", 0.0)
    yield f"{row.title} (loss_type {name})"
    yield _line("minimise", f"mean over pairs of  {filled(formula_of(row, smoothing), values)}")
    letters = "c, r = summed log-probs of the chosen and rejected answer" + (
        "; c0, r0 = the same under the reference" if "0" in row.where else ""
    )
    sigmoid = "; s = logistic sigmoid" if re.search(r"\bs\(", row.formula) else ""
    yield _line("where", f"{row.where + '; ' if row.where else ''}{letters}{sigmoid}")
    yield _line("method", _published(name, row, values))
    yield from (_line("departs", text) for text in _departures(name, row, values, recipe))
    yield from (_line("note", text) for text in _notes(name, row, values, _get(recipe, "reference", "start")))
    yield from _step(recipe, "pairs")


def formula_of(row: Sheet, label_smoothing: float) -> str:
    """The row's formula with its logistic term smoothed when label_smoothing is above 0."""
    plain = f"-log s({row.logit})"
    if not row.logit or not label_smoothing or plain not in row.formula:
        return row.formula
    minus = f"-{row.logit}" if re.fullmatch(r"\w+\*\w+", row.logit) else f"-({row.logit})"
    return row.formula.replace(plain, f"-(1-e)*log s({row.logit}) - e*log s({minus})")


def filled(formula: str, values: Mapping[str, float]) -> str:
    """A formula with numbers in place of the settings' names.

    >>> filled("-(1-e)*log s(beta*d)", {"beta": 0.1, "label_smoothing": 0.2})
    '-(1-0.2)*log s(0.1*d)'
    """
    for name, value in values.items():
        formula = re.sub(rf"\b{'e' if name == 'label_smoothing' else name}\b", f"{value:g}", formula)
    return formula


def _published(name: str, row: Sheet, values: Mapping[str, float]) -> str:
    """The paper, or the other method that these numbers amount to."""
    e = values.get("label_smoothing", 0.0)
    if name == "dpo" and e:
        return f"this is cDPO: label smoothing in DPO; {SHEET['cdpo'].paper}"
    if name in ("cdpo", "robust_dpo") and not e:
        return f"with label_smoothing 0 this is DPO; {SHEET['dpo'].paper}"
    if (name == "dpop" and not values["lambda_dpop"]) or (name in ("dpo_nll_seq", "dpo_nll_token") and not values["nll_coef"]):
        return f"with {'lambda_dpop' if name == 'dpop' else 'nll_coef'} 0 this is {'cDPO' if e else 'DPO'}; {SHEET['cdpo' if e else 'dpo'].paper}"
    if name == "cpo" and not values["nll_coef"]:
        return f"with nll_coef 0 this is {SHEET['dpo_reference_free'].title}; {SHEET['dpo_reference_free'].paper}"
    return f"{row.title}, {row.paper}"


def _departures(name: str, row: Sheet, values: Mapping[str, float], recipe: Any) -> Iterator[str]:
    if row.departs:
        yield row.departs
    if values.get("label_smoothing") and name not in ("dpo", "cdpo", "robust_dpo"):
        yield f"label_smoothing {values['label_smoothing']:g} is not in the paper"
    if name == "simpo" and values["beta"] < 1:
        yield f"beta {values['beta']:g} is far below the paper's 2 to 2.5: the loss hardly acts"
    if name == "dpo_norm" and values["beta"] < 1:
        yield f"beta {values['beta']:g} is far below the paper's 5: per-token averages are small numbers"
    reference = _get(recipe, "reference", "start")
    if row.needs_reference and reference != "start":
        yield f"tied to {reference}, not to the model the run starts from: the margin is not 0 at step 0"


def _notes(name: str, row: Sheet, values: Mapping[str, float], reference: str) -> Iterator[str]:
    start = _loss_at_start(name, values)
    if start is not None and reference == "start":
        yield f"at step 0 the policy is the reference, d = 0 and the loss is {start:.4f}"
    e = values.get("label_smoothing", 0.0)
    if name in ("ipo_sum", "ipo_avg"):
        yield f"every pair is driven to the gap 1/(2*{values['beta']:g}) = {1 / (2 * values['beta']):g}, per {'answer' if name == 'ipo_sum' else 'token'}"
    if name == "cdpo" or (name == "dpo" and e):
        yield f"the minimum is at s({values['beta']:g}*d) = {1 - e:g}: the gap stays bounded and the loss stays above {_entropy(e):.4f}"
    if name == "robust_dpo" and e:
        yield "the loss may be negative and is unbounded below"
    if name == "simpo":
        ratio = values["gamma"] / values["beta"]
        yield f"gamma {values['gamma']:g} stands outside beta; as gamma_beta_ratio it is {ratio:g} (the paper uses 0.3 to 0.55)"
    if not row.needs_reference:
        yield "no reference: watch logps/chosen and the length of answers"
    elif name in ("dpo", "cdpo", "robust_dpo", "hinge", "ipo_sum", "ipo_avg", "dpo_norm"):
        yield "the loss sees the gap d only: it can fall while chosen answers get less likely (watch displacement/chosen)"


def _loss_at_start(name: str, values: Mapping[str, float]) -> float | None:
    """The loss where policy = reference, for losses that depend on nothing else."""
    if name in ("dpo", "cdpo", "robust_dpo", "dpo_norm", "dpop"):
        return math.log(2)
    return {"hinge": 1.0, "ipo_sum": 1 / (2 * values.get("beta", 1)) ** 2, "ipo_avg": 1 / (2 * values.get("beta", 1)) ** 2}.get(name)


def _entropy(e: float) -> float:
    return 0.0 if e in (0, 1) else -e * math.log(e) - (1 - e) * math.log(1 - e)


def _kto(recipe: Any) -> Iterator[str]:
    beta = float(_get(recipe, "beta", 0.1))
    good, bad = float(_get(recipe, "desirable_weight", 1.0)), float(_get(recipe, "undesirable_weight", 1.0))
    yield "KTO (loss_type kto): answers marked good or bad, without pairs"
    yield _line("minimise", f"mean over rows of  good: {good:g}*(1 - s({beta:g}*(h - z0)))   bad: {bad:g}*(1 - s({beta:g}*(z0 - h)))")
    yield _line("where", "h = log pi(y|x) - log ref(y|x) of the whole answer; s = logistic sigmoid")
    yield _line("", "z0 = max(0, mean over the step of log pi(y'|x) - log ref(y'|x)), y' = another prompt's answer; a constant")
    yield _line("method", f"KTO, {KTO_PAPER}")
    yield _line("departs", "z0 is worked out over the whole optimiser step, not over a micro-batch")
    yield _line("note", f"at step 0 h = z0 = 0: a good row costs {good / 2:g}, a bad one {bad / 2:g}")
    yield _line("note", "keep weight times count of good rows over that of bad rows between 1 and 4/3")
    yield from _step(recipe, "rows")


# --- policy gradient ---------------------------------------------------------------------------------------------------


def _policy(recipe: Any) -> Iterator[str]:
    preset = _get(recipe, "preset")
    if preset is not None and preset not in POLICY_PRESETS:
        raise UserError(f"unknown preset {preset!r}", where="preset", remedy=f"Choose one of {', '.join(POLICY_PRESETS)}.")
    if preset is None and _get(recipe, "command") == "grpo":
        choices, note = _grpo_choices(recipe)
    else:
        preset = preset or _get(recipe, "command")
        choices, note = POLICY_PRESETS[preset], f"the preset {preset}"
    numbers = {"eps_low": "0.2", "eps_high": "0.2"} | {name: f"{value:g}" for name, value in choices.settings.items()}
    for name in ("eps_low", "eps_high"):
        if _get(recipe, name) is not None:
            numbers[name] = f"{_get(recipe, name):g}"
    coef = _get(recipe, "beta", choices.settings.get("kl_coef", 0.0))
    in_loss = choices.kl.startswith("in loss") and coef
    yield f"Policy gradient: {note}"
    objective = SURROGATE_FORMULAS[choices.surrogate].format(**numbers)
    yield _line("minimise", f"{REDUCTION_WORDS[choices.reduction]} of  -{objective}" + (f" + {coef:g}*k3" if in_loss else ""))
    yield _line("where", ADVANTAGE_FORMULAS[choices.advantage])
    if choices.surrogate != "reinforce":
        level = "(pi/old) of the whole answer to the power 1/length" if choices.surrogate == "gspo" else "pi/old of the token"
        yield _line("", f"rho = {level}; old = the policy that sampled")
    if in_loss:
        yield _line("", "k3 = exp(-delta) - 1 + delta, delta = log pi - log ref")
    elif choices.kl.startswith("in reward") and coef:
        yield _line("", f"the reward is lessened by {coef:g}*(log old - log ref)")
    yield _line("method", choices.paper)
    yield from _step(recipe, "completions")


def _grpo_choices(recipe: Any) -> tuple[Preset, str]:
    """The row of choices that a grpo recipe without a preset amounts to, and which published row it is."""
    scale = _get(recipe, "scale_rewards", "group")
    advantage = {"group": "group_norm", "batch": "batch_std", "none": "group_mean"}[scale]
    reduction = _get(recipe, "aggregation", "token-mean")
    low, high = float(_get(recipe, "eps_low", 0.2)), float(_get(recipe, "eps_high", 0.2))
    coef = float(_get(recipe, "beta", 0.0))
    settings = {"eps_low": low, "eps_high": high, "kl_coef": coef}
    made = Preset(advantage, "ppo", reduction, "in loss (k3)" if coef else "none", POLICY_PRESETS["grpo"].paper, settings)
    for name in ("grpo", "dapo", "dr_grpo"):
        row = POLICY_PRESETS[name]
        same = (row.advantage, row.surrogate, row.reduction, bool(row.settings["kl_coef"])) == (advantage, "ppo", reduction, bool(coef))
        if same and (low < high) == (row.settings["eps_low"] < row.settings["eps_high"]):
            extra = ", without its resampling of groups whose rewards agree" if name == "dapo" else ""
            return Preset(row.advantage, row.surrogate, row.reduction, row.kl, row.paper + extra, settings), f"the loss of {name}"
    departs = [] if reduction == "seq-mean-token-mean" else [REDUCTION_WORDS[reduction] + " in place of per-row means"]
    departs += {"group": [], "batch": ["the batch's std in place of the group's"], "none": ["no division by a std"]}[scale]
    departs += [] if low == high else ["a higher upper bound"]
    departs += [] if coef else ["no KL term"]
    return made, "grpo, departing from its paper by " + ", ".join(departs)


COMMANDS: dict[str, Callable[[Any], Iterator[str]]] = {"sft": _sft, "reward": _reward, "dpo": _dpo, "grpo": _policy, "ppo": _policy}
