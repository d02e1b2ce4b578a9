"""Make the data that `tether demo` ships: pairs of SmolLM2-135M-Instruct's own answers, chosen between by simulated people.

    python scripts/make_demo_pairs.py --model FOLDER [--out tether/demo/data] [--seed 0]

FOLDER holds SmolLM2-135M-Instruct as float32 safetensors with its tokenizer. Needs the demo extra. Takes about ten minutes on two cores.
The same seed on the same machine and library versions gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from demo_prompts import all_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.demo.world import choice_probability, sentiment

ROUNDS = 6  # at most so many answers are sampled per prompt; the first two that qualify make the pair
MIN_TOKENS, MAX_TOKENS = 10, 48
N_TRAIN_PAIRS, N_TEST_PAIRS, N_TEST_PROMPTS = 400, 100, 128
BATCH = 32
# Small models say odd things at temperature 1. Answers with any of these are left out: the data are read by everybody.
UNWANTED = re.compile(
    r"\b(kill\w*|murder\w*|suicid\w*|rap(e|ed|ist)|sex\w*|nud(e|ity)|porn\w*|drug\w*|cocaine|heroin|terror\w*|bomb\w*|gun\w*|shoot\w*|weapon\w*"
    r"|nazi\w*|hitler|jew\w*|muslim\w*|islam\w*|christian\w*|god|jesus|allah|racis\w*|slave\w*|black (man|men|woman|women|people)|whites?\b people"
    r"|gay|lesbian|abus\w*|tortur\w*|hell|damn\w*|shit\w*|fuck\w*|bitch\w*|bastard\w*|ass|crap|stupid|idiot\w*|dead|death|die[sd]?|dying|corpse\w*"
    r"|blood\w*|cancer|abortion|trump|biden|obama|putin|drunk\w*|alcohol\w*|hate[sd]?|hatred|whore|slut|knife|stab\w*|war|wars|violen\w*"
    r"|palestin\w*|israel\w*|satan\w*|cleric\w*|preacher\w*|biblical|crusade\w*|lord|prayers?|handicapped|disabilit\w*|human head|carnage"
    r"|dumb|shut up|cops?|poop|trauma\w*|curvy|sickly)\b",
    re.IGNORECASE,
)
READABLE = re.compile(r"^[\x20-\x7e\n“”‘’–—…é°]+$")


def sample(model: Any, tokenizer: Any, prompts: list[str], seed: int) -> list[list[int]]:
    """One answer per prompt as token ids, the end token included where the answer ended by itself."""
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True) for p in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(texts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    started = time.monotonic()
    for start in range(0, len(prompts), BATCH):
        rows = by_length[start : start + BATCH]
        torch.manual_seed(seed * 1_000_003 + start)
        batch = tokenizer([texts[i] for i in rows], return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS, pad_token_id=tokenizer.pad_token_id
        )
        for i, ids in zip(rows, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            answers[i] = ids[:end]
        done = start + len(rows)
        left = (time.monotonic() - started) / done * (len(prompts) - done)
        print(f"{done}/{len(prompts)} answers of this round, {left:.0f} s left in it", file=sys.stderr, flush=True)
    return answers


def sample_two(model: Any, tokenizer: Any, prompts: list[str], seed: int) -> tuple[list[list[tuple[str, int]]], int, int]:
    """Two different usable answers per prompt as (text, tokens), in rounds; also how many answers were sampled and how many were cut."""
    found: list[list[tuple[str, int]]] = [[] for _ in prompts]
    n_sampled = n_cut = 0
    for round_ in range(ROUNDS):
        wanting = [i for i, answers in enumerate(found) if len(answers) < 2]
        for i, ids in zip(wanting, sample(model, tokenizer, [prompts[i] for i in wanting], seed * ROUNDS + round_), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True).strip()
            n_sampled += 1
            n_cut += ids[-1] != tokenizer.eos_token_id
            if usable(ids, text) and text not in [t for t, _ in found[i]]:
                found[i].append((text, len(ids)))
    return found, n_sampled, n_cut


def usable(ids: list[int], text: str) -> bool:
    """Long enough to differ in something, and fit to print; whether the answer ended by itself or was cut at the limit."""
    words = text.split()
    return MIN_TOKENS <= len(ids) <= MAX_TOKENS and len(words) >= 5 and not UNWANTED.search(text) and bool(READABLE.match(text))


def make_pair(prompt: str, texts: list[tuple[str, int]], rng: random.Random) -> dict[str, Any]:
    (a, n_a), (b, n_b) = texts
    s_a, s_b = sentiment(a), sentiment(b)
    p_a = choice_probability(s_a, n_a, s_b, n_b)
    a_wins = rng.random() < p_a
    (chosen, n_c, s_c), (rejected, n_r, s_r) = ((a, n_a, s_a), (b, n_b, s_b)) if a_wins else ((b, n_b, s_b), (a, n_a, s_a))
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "chosen_tokens": n_c,
        "rejected_tokens": n_r,
        "chosen_sentiment": s_c,
        "rejected_sentiment": s_r,
        "choice_probability": round(p_a if a_wins else 1 - p_a, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("tether/demo/data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only the first prompts, to try the script")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    # 1. Prompts in a seeded order: the last ones are held out for everything that measures.
    prompts = all_prompts()
    random.Random(args.seed).shuffle(prompts)
    prompts = prompts[: args.limit]
    held_out = set(prompts[-N_TEST_PROMPTS:])

    # 2. The model's own answers, at temperature 1.
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        answers, n_sampled, n_cut = sample_two(model, tokenizer, prompts, args.seed)

    # 3. Two different answers that qualify make a pair; the people choose.
    rng = random.Random(args.seed)
    pairs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for prompt, two in zip(prompts, answers, strict=True):
        if len(two) == 2:
            pairs[prompt in held_out].append(make_pair(prompt, two, rng))
    train, test = pairs[False][:N_TRAIN_PAIRS], pairs[True][:N_TEST_PAIRS]
    ask = [{"prompt": [{"role": "user", "content": p}]} for p in prompts[-N_TEST_PROMPTS:]]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in [("pairs_train", train), ("pairs_test", test), ("prompts_test", ask)]:
        beside = args.out / f"{name}.jsonl.new"
        beside.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        beside.replace(args.out / f"{name}.jsonl")

    lengths = [r[k] for r in train for k in ("chosen_tokens", "rejected_tokens")]
    chance = sum(max(r["choice_probability"], 1 - r["choice_probability"]) for r in train) / len(train)
    print(
        f"{len(train)} training pairs, {len(test)} test pairs, {len(ask)} prompts; {n_cut / n_sampled:.0%} of {n_sampled} answers were cut "
        f"at {MAX_TOKENS} tokens; mean length of the pairs {sum(lengths) / len(lengths):.1f}; best possible agreement with the people {chance:.3f}"
    )


if __name__ == "__main__":
    main()
