"""Run directories made by hand, with the curves of a real run in outline: for the report's tests and for looking at the page."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from tether import stats
from tether.recipe import DPORecipe, RewardRecipe
from tether.run import Run


def dpo_run(folder: Path, *, steps: int = 50, chosen_falls: bool = True, finished: bool = True, eval_every: int = 10) -> Path:
    """Preference optimisation in which the margin grows; the chosen answers fall or rise with it."""
    rng = random.Random(0)
    recipe = DPORecipe(model="smollm2", data="pairs.jsonl", eval_data="held_out.jsonl", learning_rate=1e-5, eval_steps=eval_every)
    with Run.create(folder, recipe, "dpo") as run:
        run.record("precision", "bf16")
        for step in range(1, steps + 1):
            t = step / steps
            chosen = (-3 if chosen_falls else 2) * t + rng.gauss(0, 0.5)
            rejected = (-6 if chosen_falls else -2) * t + rng.gauss(0, 0.6)
            margin = chosen - rejected
            run.append(
                "pairs.jsonl",
                step,
                [
                    {
                        "pair": step * 8 + k,
                        "source": f"pairs.jsonl:{step * 8 + k}",
                        "chosen_up": round(chosen + rng.gauss(0, 1.5), 4),
                        "rejected_down": round(-rejected + rng.gauss(0, 1.5), 4),
                        "similarity": round(rng.uniform(0.05, 0.7), 4),
                    }
                    for k in range(8)
                ],
            )
            row = {
                "loss": math.log(2) - 0.08 * margin + rng.gauss(0, 0.03),
                "rewards/chosen": 0.1 * chosen,
                "rewards/rejected": 0.1 * rejected,
                "rewards/margins": 0.1 * margin,
                "rewards/accuracies": min(1.0, max(0.0, 0.5 + 0.3 * t + rng.gauss(0, 0.13))),
                "logps/chosen": -60 + chosen,
                "logps/rejected": -62 + rejected,
                "displacement/chosen": chosen,
                "displacement/rejected": rejected,
                "displacement/frac_chosen_down": min(1.0, max(0.0, 0.5 + (0.4 if chosen_falls else -0.4) * t)),
                "grad_norm": abs(14 - 5 * t + rng.gauss(0, 1.5)),
                "learning_rate": 1e-5 * (1 - (step - 1) / steps),
                "skipped": 0,
                "epoch": t,
                "num_tokens": 900 * step,
                "step_time": 2.5,
                "tokens_per_second": 360 + rng.gauss(0, 25),
            }
            run.log(step, row)
            if step % eval_every == 0:
                run.log(step, {"eval_loss": 0.69 - 0.05 * t, "eval_rewards/accuracies": 0.5 + 0.15 * t})
        run.note("cut", "pairs.jsonl:7: chosen: 1300 tokens, 1024 fit. Raise max_length.", action="truncate")
        for line in range(20):
            run.note("identical", f"pairs.jsonl:{line}: chosen and rejected are the same. Remove the row.", action="drop")
        run.note("startup_check", "start-up check: ratio 1.000000, KL +0.0e+00 nats per token, margin 0.0e+00")
        if finished:
            run.finish({"steps": steps, "pairs": steps * 8, "loss_type": "dpo", "held_out": {"eval_loss": 0.64}})
    return folder


def reward_run(folder: Path, *, right: int = 66, n: int = 100) -> Path:
    """A reward model with a held-out evaluation; it leans on length and is too sure of itself."""
    rng = random.Random(1)
    recipe = RewardRecipe(model="smollm2", data="pairs.jsonl", eval_data="held_out.jsonl")
    with Run.create(folder, recipe, "reward") as run:
        for step in range(1, 41):
            t = step / 40
            run.log(
                step,
                {
                    "loss": 0.69 - 0.2 * t + rng.gauss(0, 0.05),
                    "accuracy": min(1.0, 0.5 + 0.25 * t + rng.gauss(0, 0.1)),
                    "margin": 0.8 * t + rng.gauss(0, 0.1),
                    "mean_reward": 0.1 * t,
                    "reward/chosen": 0.5 * t,
                    "reward/rejected": -0.3 * t,
                    "grad_norm": 3.0 + rng.gauss(0, 0.5),
                    "learning_rate": 1e-5 * (1 - t + 1 / 40),
                    "skipped": 0,
                    "tokens_per_second": 800.0,
                },
            )
        low, high = stats.wilson(right, n)
        predicted = [0.5 + 0.49 * (i + 0.5) / n for i in range(n)]
        happened = [rng.random() < 0.5 + 0.6 * (p - 0.5) for p in predicted]
        held_out = {
            "accuracy": {"value": right / n, "low": low, "high": high, "n": n},
            "calibration": stats.calibration_bins(predicted, happened, low=0.5, bins=5),
            "length_correlation": 0.41,
            "prefers_longer": 0.64,
            "mean_margin": 0.7,
        }
        run.finish({"steps": 40, "prompts": 320, "held_out": held_out})
    return folder


def compared_folder(folder: Path) -> Path:
    """A folder as the demo leaves it: two runs, their comparison and the sampled answers."""
    reward_run(folder / "reward")
    dpo_run(folder / "dpo")
    comparison = {
        "title": "SmolLM2 learns from 400 comparisons",
        "lead": "Simulated people chose between two answers 400 times.",
        "facts": [["Held-out prompts", "128"]],
        "findings": [{"tone": "good", "text": "The answers became more cheerful."}, {"tone": "watch", "text": "They also became longer."}],
        "measures": [
            {
                "name": "Sentiment",
                "unit": "VADER, -1 to 1",
                "before": [0.28, 0.2, 0.36],
                "after": [0.46, 0.38, 0.54],
                "gain": [0.18, 0.11, 0.25],
            },
            {"name": "Length", "unit": "tokens", "before": [33, 31, 35], "after": [59, 57, 61], "gain": [26, 24, 28]},
        ],
        "runs": {"reward": "The reward model", "dpo": "DPO"},
        "seconds": {"reward model": 70.2, "DPO": 130.0},
    }
    (folder / "comparison.json").write_text(json.dumps(comparison), encoding="utf-8")
    answers = [
        {
            "prompt": f"What is it like to keep bees? ({i})",
            "before": {"text": "It is <b>busy</b> & quiet work.", "numbers": {"sentiment": 0.1, "tokens": 14, "true score": 0.1}},
            "after": {"text": "It is a wonderful, rewarding joy!", "numbers": {"sentiment": 0.9, "tokens": 48, "true score": 0.58}},
        }
        for i in range(4)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers), encoding="utf-8")
    return folder
