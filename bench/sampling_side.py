"""One measurement of sampling, or the check that both ways of sampling are the same: prints one JSON line.

    python bench/sampling_side.py tether --model FOLDER --data prompts.jsonl
    python bench/sampling_side.py transformers --model FOLDER --data prompts.jsonl
    python bench/sampling_side.py greedy --model FOLDER --data prompts.jsonl

The first two sample exactly `--completion` tokens for each of `--prompts` x `--group` completions at temperature 1 in bfloat16 (weights
of transformers' model in bfloat16 as well), end tokens ignored; every run has prompts of its own. `greedy` takes the likeliest tokens
of a few prompts in float32 both ways.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from prompt_ids import prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

WARMUP_TOKENS = 16
GREEDY = (3, 24)  # prompts, tokens


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("side", choices=["tether", "transformers", "greedy"])
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--completion", type=int, default=128)
    p.add_argument("--steps", type=int, default=1, help="measured runs")
    p.add_argument("--threads", type=int, default=2)
    return p.parse_args()


class Split:
    """Seconds of a run until its first token, in the model's passes after that, and in all the rest (drawing, bookkeeping)."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.began, self.passes = time.perf_counter(), 0.0
        self.first: float | None = None

    def timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            out = forward(*args, **kwargs)
            if self.first is not None:
                self.passes += time.perf_counter() - began
            return out

        return run

    def token(self, *_: Any) -> None:
        if self.first is None:
            self.first = time.perf_counter() - self.began

    def end(self) -> tuple[float, dict[str, float]]:
        total = time.perf_counter() - self.began
        first = self.first or 0.0
        return total, {"first_token": first, "passes": self.passes, "drawing": total - first - self.passes}


def tether_sampler(a: argparse.Namespace, split: Split) -> Callable[[list[list[int]], int], int]:
    """(prompts, completion length) -> tokens sampled."""
    from tether.allocator import keep_freed_memory
    from tether.engines import local
    from tether.engines.local import LocalSampler, Request
    from tether.engines.sampling import Sampling
    from tether.models import load_model

    keep_freed_memory()  # as the command line does
    model, tokenizer = load_model(a.model)
    sampler = LocalSampler(model, tokenizer, precision="bf16", slots=a.prompts * a.group)
    local._forward = split.timed(local._forward)

    def sample(prompts: list[list[int]], length: int) -> int:
        sampling = Sampling(max_new_tokens=length, temperature=1.0, ignore_end=True)
        made = sampler.sample([Request(p, sampling, a.group, seed=i) for i, p in enumerate(prompts)], on_token=split.token)
        return sum(len(c.tokens) for c in made)

    return sample


def transformers_sampler(a: argparse.Namespace, split: Split) -> Callable[[list[list[int]], int], int]:
    from transformers import StoppingCriteria, StoppingCriteriaList

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = without_end(AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16).eval())
    model.model.forward = split.timed(model.model.forward)
    model.lm_head.forward = split.timed(model.lm_head.forward)

    class Clock(StoppingCriteria):
        """Stops nothing, and is called after every token."""

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            split.token()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def sample(prompts: list[list[int]], length: int) -> int:
        ids, mask = padded([p for p in prompts for _ in range(a.group)], tokenizer.pad_token_id)
        made = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length,
            pad_token_id=tokenizer.pad_token_id, stopping_criteria=StoppingCriteriaList([Clock()]),
        )  # fmt: skip
        return made[:, ids.shape[1] :].numel()

    return sample


def without_end(model: Any) -> Any:
    """No end token: every completion has its full length."""
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def padded(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with padding at their left, (B, T), and the mask of what is real."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


def measured(a: argparse.Namespace) -> dict[str, Any]:
    split = Split()
    sample = {"tether": tether_sampler, "transformers": transformers_sampler}[a.side](a, split)
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    sample(prompt_ids(a.data, tokenizer, 0, a.prompts), min(WARMUP_TOKENS, a.completion))
    seconds, tokens, phases = [], [], []
    for i in range(a.steps):
        prompts = prompt_ids(a.data, tokenizer, (i + 1) * a.prompts, a.prompts)
        split.begin()
        tokens.append(sample(prompts, a.completion))
        total, parts = split.end()
        seconds.append(round(total, 3))
        phases.append(parts)
    return {"seconds": seconds, "tokens": tokens, "phases": {name: [round(p[name], 3) for p in phases] for name in phases[0]}}


def greedy(a: argparse.Namespace) -> dict[str, Any]:
    """Tokens, and our log-probs of them, of the same float32 weights both ways."""
    from tether.engines.local import LocalSampler, Request
    from tether.engines.sampling import Sampling

    n, length = GREEDY
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    prompts = prompt_ids(a.data, tokenizer, 0, n)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).eval()
    sampling = Sampling(max_new_tokens=length, temperature=0.0, ignore_end=True)
    ours = LocalSampler(model, tokenizer, precision="fp32").sample([Request(p, sampling) for p in prompts])
    without_end(model)
    theirs = [
        model.generate(
            input_ids=torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), do_sample=False, max_new_tokens=length,
            pad_token_id=tokenizer.pad_token_id,
        )[0, len(p) :].tolist()
        for p in prompts
    ]  # fmt: skip
    return {"tether": [c.tokens for c in ours], "tether_logps": [c.logps for c in ours], "transformers": theirs}


def main() -> None:
    a = arguments()
    torch.set_num_threads(a.threads)
    found = greedy(a) if a.side == "greedy" else measured(a)
    print(json.dumps({"side": a.side, **found, "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}), flush=True)


if __name__ == "__main__":
    main()
