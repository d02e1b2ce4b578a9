"""What a recipe's settings amount to: the objective as one formula with its numbers, and the published method it equals.

Free of torch. The formulas are those of `losses/sheet.py`; this page fills in numbers and says how the recipe departs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tether.errors import UserError
from tether.explain_lines import get, line, step
from tether.explain_policy import grpo, ppo
from tether.losses.sheet import SHEET, Sheet, loss_settings, resolve_loss

KTO_PAPER = "Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8"


def explain(recipe: Any) -> str:
    """The objective of a recipe in words and one formula. `recipe` has its settings as attributes or as mapping keys.

    >>> print(explain({"command": "dpo", "loss_type": "dpo", "beta": 0.1}).splitlines()[1])
      minimise  mean over pairs of  -log s(0.1*d)
    """
    command = get(recipe, "command")
    if command not in COMMANDS:
        raise UserError(f"there is no objective for {command!r}", where="command", remedy=f"Choose one of {', '.join(COMMANDS)}.")
    return "\n".join(COMMANDS[command](recipe))


# --- sft ---------------------------------------------------------------------------------------------------------------


def _sft(recipe: Any) -> Iterator[str]:
    trained = {
        "assistant": "the tokens of every assistant turn with its end token",
        "last": "the tokens of the last assistant turn with its end token",
        "all": "every token of the text, the prompt too",
    }[get(recipe, "train_on", "assistant")]
    yield "SFT: maximum likelihood of the given answers"
    yield line("minimise", "-(1/D) * sum over trained tokens of log pi(token | its past)")
    yield line("where", f"trained: {trained}; D = their number in the whole optimiser step")
    yield line("method", "token mean over the step; a mean of micro-batch means would weigh short rows more")
    yield from step(recipe, "conversations")


# --- reward ------------------------------------------------------------------------------------------------------------


def _reward(recipe: Any) -> Iterator[str]:
    margin, center = get(recipe, "margin", True), float(get(recipe, "center_coef", 0.0))
    features, heads = get(recipe, "features"), int(get(recipe, "heads", 1))
    yield "Reward model: Bradley-Terry on comparisons, P(a beats b) = s(r_a - r_b)"
    formula = "-log s(r_w - r_l - m)" if margin else "-log s(r_w - r_l)"
    if features:
        l2 = float(get(recipe, "feature_l2", 0.0))
        yield line("minimise", f"mean over pairs of  {formula}" + (f"  +  {l2:g}/2*|w|^2" if l2 else ""))
        yield line("where", "r = bias + " + " + ".join(f"w_{i}*{name}" for i, name in enumerate(features, 1)))
        yield line("", "the bias is in both scores and cancels: its gradient is exactly 0 and it stays where it starts")
    else:
        formula += f" + {center:g}*(r_w + r_l)^2" if center else ""
        over = f"mean over pairs and over {heads} heads of" if heads > 1 else "mean over pairs of"
        yield line("minimise", f"{over}  {formula}")
        yield line("where", "r = the scalar head at the answer's last token; a prompt with k answers counts once (weight 1/its pairs)")
    if margin:
        yield line("", "m = the row's margin, 0 where it has none")
    yield line("method", "Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1")
    if margin:
        yield line("with", "margins as in Llama 2, arXiv:2307.09288, eq. 2")
    if features:
        epochs, rate = get(recipe, "feature_epochs", 200), float(get(recipe, "feature_learning_rate", 0.1))
        yield line("one step", f"{get(recipe, 'batch_size', 8)} pairs, gradient descent at {rate:g}, {epochs} passes")
        return
    if center:
        yield line("with", "centred scores, Eisenstein et al. 2023, arXiv:2312.09244: the one term that sees a constant offset")
    else:
        yield line("note", "a constant added to every score changes nothing: only differences of scores mean anything")
    if heads > 1:
        lcb = float(get(recipe, "lcb", 1.0))
        yield line("used as", f"mean of the heads - {lcb:g} * their standard deviation (Coste et al. 2023, arXiv:2310.02743)")
    yield from step(recipe, "prompts")


# --- dpo and its family ------------------------------------------------------------------------------------------------


def _dpo(recipe: Any) -> Iterator[str]:
    name = get(recipe, "loss_type", "dpo")
    if name == "kto":
        yield from _kto(recipe)
        return
    name = resolve_loss(name)
    row = SHEET[name]
    values = loss_settings(name, {key: get(recipe, key) for key in (*row.uses, "label_smoothing")})
    smoothing = values.get("label_smoothing", 0.0)
    yield f"{row.title} (loss_type {name})"
    yield line("minimise", f"mean over pairs of  {filled(formula_of(row, smoothing), values)}")
    letters = "c, r = summed log-probs of the chosen and rejected answer" + (
        "; c0, r0 = the same under the reference" if "0" in row.where else ""
    )
    sigmoid = "; s = logistic sigmoid" if re.search(r"\bs\(", row.formula) else ""
    yield line("where", f"{row.where + '; ' if row.where else ''}{letters}{sigmoid}")
    yield line("method", _published(name, row, values))
    yield from (line("departs", text) for text in _departures(name, row, values, recipe))
    yield from (line("note", text) for text in _notes(name, row, values, get(recipe, "reference", "start")))
    yield from step(recipe, "pairs")


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
    reference = get(recipe, "reference", "start")
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
    beta = float(get(recipe, "beta", 0.1))
    good, bad = float(get(recipe, "desirable_weight", 1.0)), float(get(recipe, "undesirable_weight", 1.0))
    yield "KTO (loss_type kto): answers marked good or bad, without pairs"
    yield line("minimise", f"mean over rows of  good: {good:g}*(1 - s({beta:g}*(h - z0)))   bad: {bad:g}*(1 - s({beta:g}*(z0 - h)))")
    yield line("where", "h = log pi(y|x) - log ref(y|x) of the whole answer; s = logistic sigmoid")
    yield line("", "z0 = max(0, mean over the step of log pi(y'|x) - log ref(y'|x)), y' = another prompt's answer; a constant")
    yield line("method", f"KTO, {KTO_PAPER}")
    yield line("departs", "z0 is worked out over the whole optimiser step, not over a micro-batch")
    yield line("note", f"at step 0 h = z0 = 0: a good row costs {good / 2:g}, a bad one {bad / 2:g}")
    yield line("note", "keep weight times count of good rows over that of bad rows between 1 and 4/3")
    yield from step(recipe, "rows")


COMMANDS: dict[str, Callable[[Any], Iterator[str]]] = {"sft": _sft, "reward": _reward, "dpo": _dpo, "grpo": grpo, "ppo": ppo}
