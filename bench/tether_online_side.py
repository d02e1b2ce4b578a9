"""One measurement of Tether's GRPO or PPO: the real training loop for a few steps, one JSON line (see trl_grpo_side.py).

`--replay FILE` trains on the tokens that the other side has kept in place of sampling any: its log-probs are then compared with ours
as those of sampling always are, and both sides' advantages and first gradients belong to the same tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rule import different_words

PHASES = ("sampling", "reward", "scoring", "update")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("method", choices=["grpo", "ppo"])
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--completion", type=int, default=128)
    p.add_argument("--micro", type=int, default=4096, help="tokens a micro-batch")
    p.add_argument("--beta", type=float, default=0.04)
    p.add_argument("--steps", type=int, default=1)
    p.add_argument("--warmup", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--replay", type=Path)
    return p.parse_args()


def settings(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The other side's settings by our names; both methods make one optimiser step a batch and score the reference."""
    out = {
        "model": a.model, "data": str(folder / "rows.jsonl"), "run": str(folder / "run"), "precision": a.dtype, "shuffle": False,
        "batch_size": a.prompts * a.group, "num_generations": a.group, "max_completion_length": a.completion, "beta": a.beta,
        "max_steps": a.steps + a.warmup, "learning_rate": 1e-6, "lr_scheduler": "constant", "tokens_per_micro_batch": a.micro,
        "threads": a.threads, "save_steps": 1_000_000, "trackers": [], "max_length": 1024, "updates_per_batch": 1, "mini_batches": 1,
    }  # fmt: skip
    return {**out, "kl_unbiased": True} if a.method == "grpo" else out  # TRL's default


def replay(rows: list[dict[str, Any]]) -> None:
    """Let every sampler hand out these completions, a group's in a row, instead of sampling."""
    from tether.engines.local import Completion, LocalSampler, Request

    def given(self: LocalSampler, requests: Sequence[Request], on_token: Any = None, on_done: Any = None) -> list[Completion]:
        left, out = iter(rows), []
        for i, request in enumerate(requests):
            for sample in range(request.n):
                row = next(left)
                if list(request.prompt) != row["prompt_ids"]:
                    raise SystemExit(f"prompt {i + 1} is not the same on both sides: {list(request.prompt)} and {row['prompt_ids']}")
                ended = "stop" if row["tokens"][-1] in self.end_ids else "length"
                out.append(Completion(i, sample, row["tokens"], row["logps"], row["logps"], ended, None))
        return out

    LocalSampler.sample = given  # type: ignore[method-assign]


def main() -> None:
    a = arguments()
    from tether.algorithms import grpo, ppo
    from tether.allocator import keep_freed_memory
    from tether.recipe import RECIPES
    from tether.run import Run

    keep_freed_memory()  # as the command line does
    folder = Path(tempfile.mkdtemp())
    rows = [json.loads(line) for line in Path(a.data).read_text().splitlines()[: a.prompts * (a.steps + a.warmup)]]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    kept = [json.loads(line) for line in a.replay.read_text().splitlines()] if a.replay else []
    if kept:
        replay(kept)
    recipe = RECIPES[a.method](**settings(a, folder))
    run = Run.create(recipe.run, recipe)
    {"grpo": grpo, "ppo": ppo}[a.method].train(recipe, run, rewards=[different_words])
    steps = [m for m in run.metrics() if "step_time" in m]
    measured = steps[a.warmup :]
    advantages = [row["advantage"] for row in run.rows("rollouts.jsonl")]
    print(
        json.dumps(
            {
                "side": "tether", "method": a.method, "seconds": [m["step_time"] for m in measured],
                "tokens": [round(m["completions/mean_length"] * a.prompts * a.group) for m in measured],
                "phases": {name: [m[f"time/{name}"] for m in measured] for name in PHASES},
                "losses": [m["loss"] for m in steps], "grad_norms": [m["grad_norm"] for m in steps], "rewards": [m["reward"] for m in steps],
                "logp_gaps": [m["sampling/sampling_logp_difference/mean"] for m in steps],
                "advantage_gap": max((abs(x - row["advantage"]) for x, row in zip(advantages, kept, strict=False)), default=None),
                "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        ),
        flush=True,
    )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
