"""Where one DPO batch spends its time inside the engine: forward and backward of 8 pairs, no optimiser.

    python bench/engine_profile.py --model FOLDER --data pairs.jsonl

`pairs.jsonl` has rows {"prompt": [messages], "chosen": [message], "rejected": [message]}. Prints one JSON line of figures:
tokens/s, the share of the measured matmul rate that was used (MFU), peak memory; then a table by operator.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.batch import Example
from tether.engine import Engine
from tether.packing import Packed, pack


def examples_from(path: Path, tokenizer: object, rows: int) -> list[Example]:
    """The first `rows` pairs as examples of two answers, each ended by the end-of-turn token."""
    found = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
            prompt = tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[operator]
            answers = [
                tokenizer(row[side][0]["content"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]  # type: ignore[operator,attr-defined]
                for side in ("chosen", "rejected")
            ]
            found.append(Example(prompt, answers, [[True] * len(a) for a in answers]))
            if len(found) == rows:
                break
    return found


def matmul_rate(dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Best FLOP/s of (m, k) @ (k, n) as a linear layer."""
    m, k, n = shape
    x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return 2 * m * k * n / best


def flops(model: torch.nn.Module, packed: Packed) -> float:
    """Matmul work of one forward and backward: 6 per weight and token, and attention's own; nothing for recomputation."""
    body = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "lm_head" not in name)
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator,union-attr]
    config = model.config
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)  # type: ignore
    pairs = 0.0
    for s in packed.segments:
        own = s.end - s.start
        pairs += own * (s.prompt_end - s.prompt_start) + own * (own + 1) / 2
    return 6.0 * (body * len(packed.tokens) + head * len(packed.targets)) + 12.0 * config.num_hidden_layers * width * pairs  # type: ignore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--top", type=int, default=25, help="rows of the operator table, 0 for none")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    start = time.perf_counter()
    engine = Engine(model, precision=args.precision, gradient_checkpointing=args.checkpointing)
    setup_s = time.perf_counter() - start
    packed = pack(examples_from(args.data, tokenizer, args.batch))
    with torch.no_grad():
        start = time.perf_counter()
        reference = packed.sum_by_answer(engine.logprobs(packed))
        reference_s = time.perf_counter() - start

    def step() -> tuple[float, float, float]:
        model.zero_grad(set_to_none=True)
        t0 = time.perf_counter()
        margin = (packed.sum_by_answer(engine.logprobs(packed)) - reference).view(-1, 2)
        loss = -torch.nn.functional.logsigmoid(0.1 * (margin[:, 0] - margin[:, 1])).mean()
        t1 = time.perf_counter()
        loss.backward()
        return t1 - t0, time.perf_counter() - t1, float(loss)

    step()
    times, cpu = [], time.process_time()
    for _ in range(args.repeats):
        times.append(step())
    cpu = (time.process_time() - cpu) / args.repeats
    rate = matmul_rate(torch.bfloat16 if args.precision == "bf16" else torch.float32, (2048, 576, 1536))
    work = flops(model, packed)
    total = [a + b for a, b, _ in times]
    figures = {
        "notice": engine.notice,
        "setup_s": round(setup_s, 2),
        "reference_s": round(reference_s, 3),
        "forward_s": round(statistics.median(t[0] for t in times), 3),
        "backward_s": round(statistics.median(t[1] for t in times), 3),
        "total_s": round(statistics.median(total), 3),
        "cpu_s": round(cpu, 3),
        "loss": round(times[-1][2], 4),
        "tokens": len(packed.tokens),
        "trained": len(packed.targets),
        "tokens_per_s": round(len(packed.tokens) / statistics.median(total), 1),
        "matmul_gflops": round(rate / 1e9),
        "mfu": round(work / statistics.median(total) / rate, 3),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(figures), flush=True)
    if args.top:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=args.top, max_name_column_width=45))


if __name__ == "__main__":
    main()
