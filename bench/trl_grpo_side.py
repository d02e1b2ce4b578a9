"""One measurement of TRL's GRPO: trains a few steps and prints one JSON line. Runs in an environment that has TRL, without Tether.

python bench/trl_grpo_side.py --model FOLDER --data prompts.jsonl --steps 1 --warmup 1

Stock TRL with transformers' `generate`; weights float32, arithmetic bf16 by autocast. `--keep FILE` writes the first step's prompts,
tokens, log-probs and advantages, so that the other side can be asked about the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from rule import different_words

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--completion", type=int, default=128)
    p.add_argument("--micro", type=int, default=16, help="completions a micro-batch")
    p.add_argument("--beta", type=float, default=0.04)
    p.add_argument("--steps", type=int, default=1)
    p.add_argument("--warmup", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--keep", type=Path)
    return p.parse_args()


class Phases:
    """Seconds and completion tokens by step, from the trainer's own methods: what `_generate_and_score_completions` does beside
    sampling and rewards is scoring; what a step does beside that is the update."""

    def __init__(self, trainer: object, keep: Path | None) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.tokens: list[int] = []
        self.marks: list[float] = []
        for method, phase in (("_generate", "sampling"), ("_calculate_rewards", "reward"), ("_generate_and_score_completions", "before")):
            setattr(trainer, method, self._timed(getattr(trainer, method), phase))
        inner = trainer._generate_and_score_completions

        def counted(inputs):
            batch = inner(inputs)
            self.tokens.append(int(batch["completion_mask"].sum()))
            if keep is not None and len(self.tokens) == 1:
                keep.write_text("".join(json.dumps(row) + "\n" for row in kept_rows(batch)))
            return batch

        trainer._generate_and_score_completions = counted

    def _timed(self, function, phase: str):
        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase].append(time.perf_counter() - began)

        return timed

    def steps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.marks)]

    def split(self) -> dict[str, list[float]]:
        sampling, reward, before = (self.seconds[phase] for phase in ("sampling", "reward", "before"))
        scoring = [b - s - r for b, s, r in zip(before, sampling, reward, strict=True)]
        update = [total - b for total, b in zip(self.steps(), before, strict=True)]
        return {"sampling": sampling, "reward": reward, "scoring": scoring, "update": update}


def kept_rows(batch: dict) -> list[dict]:
    """The batch before it is shuffled: a group's completions in a row. The reference's log-probs are the policy's in the first step."""
    out = []
    for i in range(len(batch["prompt_ids"])):
        prompt, real = batch["prompt_mask"][i].bool(), batch["completion_mask"][i].bool()
        out.append(
            {
                "prompt_ids": batch["prompt_ids"][i][prompt].tolist(),
                "tokens": batch["completion_ids"][i][real].tolist(),
                "logps": batch["ref_per_token_logps"][i][real].tolist(),
                "advantage": float(batch["advantages"][i]),
            }
        )
    return out


def main() -> None:
    a = arguments()
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(a.threads)
    total = a.prompts * a.group
    micro = min(a.micro, total)
    rows = load_dataset("json", data_files=a.data, split="train").select_columns(["prompt"])
    rows = rows.select(range(a.prompts * (a.steps + a.warmup)))
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=total // micro,
        num_generations=a.group, max_completion_length=a.completion, beta=a.beta, temperature=1.0, shuffle_dataset=False,
        max_steps=a.steps + a.warmup, learning_rate=1e-6, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=a.dtype == "bf16", gradient_checkpointing=False, seed=0, disable_tqdm=True, dataloader_num_workers=0,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    trainer = trl.GRPOTrainer(model=a.model, args=config, reward_funcs=different_words, train_dataset=rows, processing_class=tokenizer)
    phases = Phases(trainer, a.keep)

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            phases.marks.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            phases.marks.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.train()
    history = [h for h in trainer.state.log_history if "grad_norm" in h]
    print(
        json.dumps(
            {
                "side": "trl", "seconds": [round(s, 3) for s in phases.steps()[a.warmup :]], "tokens": phases.tokens[a.warmup :],
                "phases": {name: [round(s, 3) for s in seconds[a.warmup :]] for name, seconds in phases.split().items()},
                "losses": [h["loss"] for h in history], "grad_norms": [float(h["grad_norm"]) for h in history],
                "rewards": [h["reward"] for h in history], "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "trl": trl.__version__, "torch": torch.__version__,
            }
        ),
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
