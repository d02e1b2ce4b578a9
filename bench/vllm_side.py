"""One measurement of vLLM's CPU build: the prompts and lengths of sampling_side.py, one JSON line. Runs in an environment of its own.

python bench/vllm_side.py --model FOLDER --data prompts.jsonl [--cores 0-1] [--block 32]

As it comes vLLM leaves one core to its scheduler, so that of two cores one computes, and keeps keys and values in blocks of 128 tokens,
of which prefix caching reuses whole ones only: a prompt shorter than that is computed for each of its completions. `--cores` and
`--block` change either.

`n` completions a prompt with prefix caching, the sampled tokens' log-probs with them (as ours come), end tokens ignored. Starting the
engine takes a minute or two and is not measured. After the measurement it takes the likeliest tokens of a few prompts, to be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

WARMUP_TOKENS = 16
GREEDY = (3, 24)  # prompts, tokens


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--completion", type=int, default=128)
    p.add_argument("--steps", type=int, default=1, help="measured runs")
    p.add_argument("--threads", type=int, help="taken and not used: see --cores")
    p.add_argument("--cores", help="which cores compute, such as 0-1; left out: vLLM's choice")
    p.add_argument("--block", type=int, help="tokens a block of the cache; left out: vLLM's choice")
    return p.parse_args()


def main() -> None:
    a = arguments()
    if a.cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = a.cores
    from prompt_ids import prompt_ids
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        a.model, dtype="bfloat16", max_model_len=1024, max_num_seqs=a.prompts * a.group, enable_prefix_caching=True,
        disable_log_stats=False, **({"block_size": a.block} if a.block else {}),
    )  # fmt: skip
    started = time.perf_counter() - began
    tokenizer = llm.get_tokenizer()

    def sample(first: int, count: int, **settings):
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids(a.data, tokenizer, first, count)]
        began = time.perf_counter()
        out = llm.generate(prompts, SamplingParams(ignore_eos=True, logprobs=0, **settings), use_tqdm=False)
        return out, time.perf_counter() - began

    sample(0, a.prompts, n=a.group, temperature=1.0, max_tokens=min(WARMUP_TOKENS, a.completion))
    seconds, tokens, first_token = [], [], []
    for i in range(a.steps):
        out, took = sample((i + 1) * a.prompts, a.prompts, n=a.group, temperature=1.0, max_tokens=a.completion)
        seconds.append(round(took, 3))
        tokens.append(sum(len(c.token_ids) for r in out for c in r.outputs))
        first_token.append(round(max(r.metrics.first_token_latency for r in out), 3))
    out, _ = sample(0, GREEDY[0], temperature=0.0, max_tokens=GREEDY[1])
    answers = [r.outputs[0] for r in out]
    print(
        json.dumps(
            {
                "side": "vllm", "seconds": seconds, "tokens": tokens,
                "phases": {"first_token": first_token, "rest": [round(s - f, 3) for s, f in zip(seconds, first_token, strict=True)]},
                "greedy": [list(c.token_ids) for c in answers],
                "greedy_logps": [[at[t].logprob for t, at in zip(c.token_ids, c.logprobs, strict=True)] for c in answers],
                "start_s": round(started, 1), "rss_mib": peak_mib(),
            }
        ),
        flush=True,
    )  # fmt: skip


def peak_mib() -> int:
    """Peak resident memory of this process and its engine's, added up."""
    import psutil

    me = psutil.Process()
    peaks = []
    for process in [me, *me.children(recursive=True)]:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peaks += [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]  # KiB
    return sum(peaks) // 1024


if __name__ == "__main__":
    main()
