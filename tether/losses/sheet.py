"""The family of losses as one visible sheet: formula, paper, settings and defaults of every name. Free of torch.

`losses/preference.py` computes the rows, `explain.py` fills in their numbers, `docs/losses.md` prints them, and the recipe
checks names and settings against them; tests keep the four in step.

Letters: c, r = summed log-probability of the chosen / rejected answer under the policy, c0, r0 = the same under the reference,
n_c, n_r = trained tokens of the answers, d = (c - c0) - (r - r0), s = logistic sigmoid, e = label_smoothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tether.errors import UserError

DPO_PAPER = "Rafailov et al. 2023, arXiv:2305.18290, eq. 7"


@dataclass(frozen=True)
class Sheet:
    """One loss. `formula` is per pair; `logit` is what stands inside the sigmoid when the loss honours label_smoothing."""

    title: str
    formula: str
    paper: str
    when: str
    where: str = ""  # what the letters of this formula mean beyond c, r, c0, r0
    departs: str = ""  # how the row departs from its paper
    logit: str | None = None
    defaults: Mapping[str, float] = field(default_factory=lambda: {"beta": 0.1})
    needs_reference: bool = True

    @property
    def uses(self) -> frozenset[str]:
        """Settings that reach the formula. A setting outside this set must be left at its neutral value."""
        return frozenset(self.defaults) | ({"label_smoothing"} if self.logit else set())


GAP = "d = (c - c0) - (r - r0)"
GAP_PER_TOKEN = "dn = (c - c0)/n_c - (r - r0)/n_r"
NLL_TOKENS = "NLL_tokens = -(sum of c)/(sum of n_c) over the whole step"

SHEET: dict[str, Sheet] = {
    "dpo": Sheet(
        "DPO",
        "-log s(beta*d)",
        DPO_PAPER,
        "the first thing to try",
        where=GAP,
        logit="beta*d",
    ),
    "dpo_reference_free": Sheet(
        "DPO with a uniform reference",
        "-log s(beta*(c - r))",
        DPO_PAPER + " with ref constant",
        "no memory for a reference; nothing holds the policy",
        departs="no reference: nothing ties the policy to where it started",
        logit="beta*(c - r)",
        needs_reference=False,
    ),
    "cdpo": Sheet(
        "cDPO (conservative)",
        "-(1-e)*log s(beta*d) - e*log s(-beta*d)",
        "Mitchell 2023, A note on DPO with noisy preferences",
        "labels flipped at a rate near e; d stays bounded, its minimum is at s(beta*d) = 1-e",
        where=GAP,
        logit="beta*d",
        defaults={"beta": 0.1, "label_smoothing": 0.1},
    ),
    "robust_dpo": Sheet(
        "robust DPO",
        "[-(1-e)*log s(beta*d) + e*log s(-beta*d)] / (1-2*e)",
        "Chowdhury et al. 2024, arXiv:2403.00409",
        "labels flipped at a known rate e: unbiased, but may be negative and is unbounded below",
        where=GAP,
        defaults={"beta": 0.1, "label_smoothing": 0.1},
    ),
    "hinge": Sheet(
        "hinge",
        "max(0, 1 - beta*d)",
        "Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425; on log-ratios Liu et al. 2023 (RSO), arXiv:2309.06657",
        "stop at a margin: pairs beyond it have zero gradient",
        where=GAP,
    ),
    "slic": Sheet(
        "SLiC-HF",
        "max(0, delta - (c - r)) + nll_coef*(-c/n_c)",
        "Zhao et al. 2023, arXiv:2305.10425",
        "no reference; the likelihood term is the only tie",
        departs="the likelihood term is on the chosen answer, averaged per token",
        defaults={"delta": 1.0, "nll_coef": 0.5},
        needs_reference=False,
    ),
    "ipo_sum": Sheet(
        "IPO on sums",
        "(d - 1/(2*beta))^2",
        "Azar et al. 2023, arXiv:2310.12036, eq. 17 as printed",
        "the printed formula; the target gap 1/(2*beta) is fixed while d grows with length",
        where=GAP + "; beta is the paper's tau",
    ),
    "ipo_avg": Sheet(
        "IPO on per-token averages",
        "(dn - 1/(2*beta))^2",
        "Azar et al. 2023, arXiv:2310.12036, eq. 17 with per-token averages, which its authors report having used",
        "noise-free preferences that DPO overfits; answers of different length",
        where=GAP_PER_TOKEN + "; beta is the paper's tau",
        departs="each log-ratio is divided by its own length, the printed formula has sums",
    ),
    "dpo_norm": Sheet(
        "length-normalised DPO",
        "-log s(beta*dn)",
        "Lambert et al. 2024 (Tulu 3), arXiv:2411.15124",
        "long answers win too easily; needs a much larger beta",
        where=GAP_PER_TOKEN,
        departs="averages in place of sums: another objective than DPO",
        logit="beta*dn",
        defaults={"beta": 5.0},
    ),
    "dpop": Sheet(
        "DPO-positive",
        "-log s(beta*(d - lambda_dpop*max(0, c0 - c)))",
        "Pal et al. 2024 (Smaug), arXiv:2402.13228",
        "chosen answers get less likely, above all when the pairs share most of their tokens",
        where=GAP,
        logit="beta*(d - lambda_dpop*max(0, c0 - c))",
        defaults={"beta": 0.1, "lambda_dpop": 5.0},
    ),
    "dpo_nll_seq": Sheet(
        "DPO + likelihood, per answer",
        "-log s(beta*d) + nll_coef*(-c/n_c)",
        "Pang et al. 2024 (iterative RPO), arXiv:2404.19733, eq. 1",
        "chosen answers get less likely; the usual first remedy",
        where=GAP,
        logit="beta*d",
        defaults={"beta": 0.1, "nll_coef": 1.0},
    ),
    "dpo_nll_token": Sheet(
        "DPO + likelihood, per token",
        "-log s(beta*d) + nll_coef*NLL_tokens",
        "Liu et al. 2024, arXiv:2405.16436 (the likelihood as adversarial regulariser)",
        "as the previous, long answers weigh more",
        where=f"{GAP}; {NLL_TOKENS}",
        departs="the likelihood is the token mean of the step, not a sum per answer",
        logit="beta*d",
        defaults={"beta": 0.1, "nll_coef": 1.0},
    ),
    "simpo": Sheet(
        "SimPO",
        "-log s(beta*(c/n_c - r/n_r) - gamma)",
        "Meng et al. 2024, arXiv:2405.14734, eq. 6",
        "no reference, length normalised; watch logps/chosen and length",
        where="gamma is outside beta (a gamma_beta_ratio of other tools is gamma/beta here)",
        logit="beta*(c/n_c - r/n_r) - gamma",
        defaults={"beta": 2.0, "gamma": 1.0},
        needs_reference=False,
    ),
    "cpo": Sheet(
        "CPO",
        "-log s(beta*(c - r)) + nll_coef*NLL_tokens",
        "Xu et al. 2024, arXiv:2401.08417",
        "no reference, likelihood term as the tie",
        where=NLL_TOKENS,
        logit="beta*(c - r)",
        defaults={"beta": 0.1, "nll_coef": 1.0},
        needs_reference=False,
    ),
    "orpo": Sheet(
        "ORPO",
        "NLL_tokens - lambda_or*log s(logodds(c/n_c) - logodds(r/n_r))",
        "Hong et al. 2024, arXiv:2403.07691, eq. 6",
        "from the base model in one stage, in place of SFT",
        where=f"logodds(a) = a - log(1 - exp(a)); {NLL_TOKENS}",
        departs="NLL over answer tokens only",
        defaults={"lambda_or": 0.1},
        needs_reference=False,
    ),
}

# Names that other tools use. "rpo" is left out on purpose: it names three papers.
LOSS_ALIASES: dict[str, str] = {
    "sigmoid": "dpo",
    "ipo": "ipo_avg",
    "robust": "robust_dpo",
    "conservative": "cdpo",
    "sigmoid_norm": "dpo_norm",
    "reference_free": "dpo_reference_free",
    "dpo_positive": "dpop",
    "smaug": "dpop",
    "iterative_rpo": "dpo_nll_seq",
    "slic_hf": "slic",
}

NEEDS_REFERENCE: frozenset[str] = frozenset(name for name, row in SHEET.items() if row.needs_reference)

# The value at which a setting is off; a setting that the loss has no place for must stand at it.
NEUTRAL: dict[str, float] = {"label_smoothing": 0.0, "gamma": 0.0, "delta": 1.0, "nll_coef": 0.0, "lambda_dpop": 0.0, "lambda_or": 0.0}


def resolve_loss(name: str) -> str:
    """The name in `SHEET` for a name or an alias.

    >>> resolve_loss("sigmoid"), resolve_loss("ipo")
    ('dpo', 'ipo_avg')
    """
    if name in SHEET:
        return name
    if name in LOSS_ALIASES:
        return LOSS_ALIASES[name]
    if name == "rpo":
        remedy = "It names three papers: choose dpo_nll_seq (iterative RPO), dpo_nll_token (likelihood as regulariser) or dpop."
    else:
        close = difflib.get_close_matches(name, [*SHEET, *LOSS_ALIASES], n=3)
        remedy = f"Did you mean {' or '.join(close)}?" if close else f"Choose one of {', '.join(SHEET)}."
    raise UserError(f"unknown loss {name!r}", where="loss_type", remedy=remedy)


def unused_settings(loss_type: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings that are switched on although the loss has no place for them: they would be ignored in silence.

    >>> unused_settings("hinge", {"beta": 0.1, "label_smoothing": 0.1, "delta": 1.0})
    ['label_smoothing']
    """
    uses = SHEET[resolve_loss(loss_type)].uses
    return [name for name, off in NEUTRAL.items() if name not in uses and settings.get(name) not in (None, off)]


def users_of(setting: str) -> list[str]:
    """Losses that have a place for a setting.

    >>> users_of("gamma")
    ['simpo']
    """
    return [name for name, row in SHEET.items() if setting in row.uses]


def loss_settings(loss_type: str, given: Mapping[str, Any]) -> dict[str, float]:
    """The settings that the loss uses: yours where given (not None), its own defaults elsewhere, nothing it has no place for.

    >>> loss_settings("simpo", {"beta": 2.5, "gamma": None, "lambda_or": 0.1})
    {'beta': 2.5, 'gamma': 1.0, 'label_smoothing': 0.0}
    """
    row = SHEET[resolve_loss(loss_type)]
    defaults = {**row.defaults, **({"label_smoothing": row.defaults.get("label_smoothing", 0.0)} if "label_smoothing" in row.uses else {})}
    return {name: float(default if given.get(name) is None else given[name]) for name, default in defaults.items()}


@dataclass(frozen=True)
class Preset:
    """One policy-gradient method as its choices on independent axes."""

    advantage: str
    surrogate: str
    reduction: str
    kl: str
    paper: str
    settings: Mapping[str, float] = field(default_factory=dict)


POLICY_PRESETS: dict[str, Preset] = {
    "reinforce": Preset("batch_mean", "reinforce", "seq-mean-token-sum", "in reward (k1)", "Williams 1992"),
    "rloo": Preset(
        "rloo", "reinforce", "seq-mean-token-sum", "in reward (k1)", "Ahmadian et al. 2024, arXiv:2402.14740", {"kl_coef": 0.05}
    ),
    "grpo": Preset(
        "group_norm",
        "ppo",
        "seq-mean-token-mean",
        "in loss (k3)",
        "Shao et al. 2024, arXiv:2402.03300, eq. 3",
        {"eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.04},
    ),
    "dr_grpo": Preset(
        "group_mean",
        "ppo",
        "seq-mean-token-sum-norm",
        "none",
        "Liu et al. 2025, arXiv:2503.20783",
        {"eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.0},
    ),
    "dapo": Preset(
        "group_norm",
        "ppo",
        "token-mean",
        "none",
        "Yu et al. 2025, arXiv:2503.14476, eq. 8",
        {"eps_low": 0.2, "eps_high": 0.28, "kl_coef": 0.0},
    ),
    "gspo": Preset(
        "group_norm",
        "gspo",
        "seq-mean-token-mean",
        "none",
        "Zheng et al. 2025, arXiv:2507.18071, eq. 5",
        {"eps_low": 3e-4, "eps_high": 4e-4, "kl_coef": 0.0},
    ),
    "cispo": Preset("group_norm", "cispo", "token-mean", "none", "MiniMax 2025 (M1), arXiv:2506.13585", {"eps_high": 0.2, "kl_coef": 0.0}),
    "ppo": Preset(
        "gae",
        "ppo",
        "token-mean",
        "in reward (k1)",
        "Schulman et al. 2017, arXiv:1707.06347, eq. 7; Ziegler et al. 2019, arXiv:1909.08593",
        {"eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.05, "lam": 0.95},
    ),
    "reinforce_pp": Preset(
        "reinforce_pp",
        "ppo",
        "token-mean",
        "in reward (k1)",
        "Hu 2025, arXiv:2501.03262",
        {"eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.01},
    ),
}
