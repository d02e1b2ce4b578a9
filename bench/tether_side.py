"""One measurement of Tether: runs the real training loop for a few steps and prints one JSON line (see trl_side.py)."""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
from pathlib import Path


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("method", choices=["dpo", "reward", "sft"])
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--warmup", type=int, default=1)
    p.add_argument("--rows", type=int, default=0)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--micro", type=int, default=4096)
    p.add_argument("--zero-head", action="store_true")
    a = p.parse_args()

    from tether.allocator import keep_freed_memory
    from tether.recipe import RECIPES
    from tether.run import Run

    keep_freed_memory()  # as the command line does

    folder = Path(tempfile.mkdtemp())
    rows = Path(a.data).read_text().splitlines()[: a.rows or a.batch * (a.steps + a.warmup)]
    if a.method == "sft":  # the demonstration of a pair is its prompt with the chosen answer, as on the other side
        pairs = [json.loads(row) for row in rows]
        rows = [json.dumps({"messages": pair["prompt"] + pair["chosen"]}) for pair in pairs]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    settings = {
        "model": a.model, "data": str(folder / "rows.jsonl"), "run": str(folder / "run"), "precision": a.dtype, "batch_size": a.batch,
        "max_steps": a.steps + a.warmup, "learning_rate": 1e-6, "lr_scheduler": "constant", "tokens_per_micro_batch": a.micro,
        "threads": a.threads, "save_steps": 1_000_000, "trackers": [], "max_length": 1024,
    }  # fmt: skip
    if a.method == "sft":
        settings["train_on"] = "all"
    recipe = RECIPES[a.method](**settings)
    run = Run.create(recipe.run, recipe)
    from tether.algorithms import dpo, reward_model, sft

    if a.method == "reward" and a.zero_head:
        import torch

        from tether.scalar import ScalarModel

        fresh = ScalarModel.from_recipe

        def zero_head(*args, **kwargs):
            model = fresh(*args, **kwargs)
            for name, parameter in model.parameters().items():
                if "score" in name:
                    torch.nn.init.zeros_(parameter)
            return model

        ScalarModel.from_recipe = zero_head
    {"dpo": dpo, "reward": reward_model, "sft": sft}[a.method].train(recipe, run)
    steps = [m for m in run.metrics() if "step_time" in m]
    print(
        json.dumps(
            {
                "side": "tether", "method": a.method, "seconds": [m["step_time"] for m in steps[a.warmup :]],
                "tokens": [round(m["step_time"] * m["tokens_per_second"]) for m in steps[a.warmup :]], "losses": [m["loss"] for m in steps],
                "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        ),
        flush=True,
    )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
