"""One measurement of TRL: trains a few steps and prints one JSON line. Runs in an environment that has TRL, without Tether.

python bench/trl_side.py dpo --model FOLDER --data mixed.jsonl --dtype bf16 --steps 3 --warmup 1 [--precompute] [--packing]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# The reference scores of a run before would be found again by their hash, and would cost nothing.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()


def arguments() -> argparse.Namespace:
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
    p.add_argument("--precompute", action="store_true")
    p.add_argument("--packing", action="store_true")
    p.add_argument("--zero-head", action="store_true", help="reward: start from a zero head, so that the first loss is comparable")
    return p.parse_args()


def main() -> None:
    a = arguments()
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(a.threads)
    rows = load_dataset("json", data_files=a.data, split="train")
    rows = rows.select(range(min(len(rows), a.rows or a.batch * (a.steps + a.warmup))))
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    common = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": a.batch, "max_steps": a.steps + a.warmup, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": a.dtype == "bf16",
        "gradient_checkpointing": False, "seed": 0, "disable_tqdm": True, "dataloader_num_workers": 0, "max_length": 1024,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    if a.method == "dpo":
        config = trl.DPOConfig(**common, beta=0.1, precompute_ref_log_probs=a.precompute)
        trainer = trl.DPOTrainer(model=a.model, args=config, train_dataset=rows, processing_class=tokenizer)
    elif a.method == "reward":
        config = trl.RewardConfig(**common)
        trainer = trl.RewardTrainer(model=a.model, args=config, train_dataset=rows, processing_class=tokenizer)
        if a.zero_head:
            torch.nn.init.zeros_(trainer.model.score.weight)
    else:
        rows = rows.map(lambda r: {"messages": r["prompt"] + r["chosen"]}, remove_columns=rows.column_names)
        if a.packing:
            common["per_device_train_batch_size"] = max(1, a.batch * 280 // 1024)
        config = trl.SFTConfig(**common, packing=a.packing)
        trainer = trl.SFTTrainer(model=a.model, args=config, train_dataset=rows, processing_class=tokenizer)

    marks: list[float] = []
    tokens: list[int] = []
    inner = trainer.training_step

    def training_step(model, inputs, *args, **kwargs):
        mask = inputs.get("attention_mask")
        tokens.append(int(mask.sum()) if mask is not None else inputs["input_ids"].numel())
        return inner(model, inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            marks.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            marks.append(time.perf_counter())

    trainer.training_step = training_step
    trainer.add_callback(Clock())
    trainer.train()
    seconds = [b - a_ for a_, b in itertools.pairwise(marks)]
    print(
        json.dumps(
            {
                "side": "trl", "method": a.method, "seconds": [round(s, 3) for s in seconds[a.warmup :]], "tokens": tokens[a.warmup :],
                "losses": [h["loss"] for h in trainer.state.log_history if "loss" in h], "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "trl": trl.__version__, "torch": torch.__version__,
            }
        ),
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
