"""The wire format of vLLM's `/v1/completions`: requests of token ids out, completions of token ids in.

What is asked of a server, and why: `prompt` as ids and `return_token_ids`, so that nothing is decoded and encoded again; `logprobs: 0`,
the sampled token's alone; every setting of sampling, because a server fills what is missing from the model's generation settings;
`cache_salt`, so that no key or value computed with other weights is ever reused. The log-probs are those of the distribution drawn
from only where the server runs with `--logprobs-mode processed_logprobs`, which `check_probe` finds out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tether.engines.local import Completion, Request
from tether.engines.sampling import Sampling
from tether.errors import UserError

NEEDED = "--logprobs-mode processed_logprobs"
LOWEST = -9999.0  # what vLLM writes for a log-probability below it
PROBE_TOP = 5
Decode = Callable[[Sequence[int]], str]


class Unfinished(Exception):
    """The server gave an answer up (it was paused, or is shutting down): it may be asked again."""


def seed_of(seed: int | str) -> int:
    """The number that a server is given for a request's seed, with room below 2^63 for the n that it adds."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big") >> 2


def check_sampling(sampling: Sampling, where: str) -> None:
    """Refuse what a server cannot say the log-probs of: it reports one distribution, the one after all filters."""
    if sampling.filters or sampling.repetition_penalty != 1:
        raise UserError(
            "top_k, top_p, min_p and repetition_penalty are not used with the vllm engine: a server does not say what the model itself "
            "thinks of a token that they let through",
            where=where,
            remedy="Leave them out, or sample with engine: local.",
        )


def question(request: Request, model: str, end_ids: Collection[int], salt: str) -> dict[str, Any]:
    """The body of a request for all `n` completions of a prompt; the prompt is computed once for them."""
    s = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "n": request.n,
        "seed": seed_of(request.seed),
        "max_tokens": s.max_new_tokens,
        "temperature": s.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(s.stop),
        "stop_token_ids": [] if s.ignore_end else sorted(end_ids),
        "ignore_eos": s.ignore_end,
        "skip_special_tokens": False,  # a stop string may be, or hold, a special token
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def answers(
    reply: Mapping[str, Any], request: Request, index: int, end_ids: Collection[int], decode: Decode | None, url: str
) -> list[Completion]:
    """The completions of request number `index`, in the order of their samples.

    UserError for a reply that a server without a needed feature gives; Unfinished for one that was given up.
    """
    choices = sorted(reply["choices"], key=lambda c: int(c["index"]))
    if len(choices) != request.n:
        raise UserError(f"the server answered {len(choices)} times where {request.n} were asked for", where=url)
    return [_completion(choice, request, index, i, end_ids, decode, url) for i, choice in enumerate(choices)]


def _completion(
    choice: Mapping[str, Any], request: Request, index: int, sample: int, end_ids: Collection[int], decode: Decode | None, url: str
) -> Completion:
    finish, why = choice["finish_reason"], choice.get("stop_reason")
    if finish not in ("stop", "length"):
        raise Unfinished(f"it gave an answer up ({finish})")
    tokens = choice.get("token_ids")
    if not tokens:
        raise UserError(
            "the server does not return the ids of the tokens that it samples",
            where=url,
            remedy="Use vLLM 0.10.2 or newer (return_token_ids).",
        )
    logps = _logps(choice, len(tokens), url)
    if isinstance(why, str):
        finish = "stop_string"
    elif finish == "stop" and tokens[-1] not in end_ids:
        raise UserError(
            f"the server ended an answer at token {tokens[-1]}, which ends nothing for the model that is trained",
            where=url,
            remedy="Start it with the model that is trained, and with --generation-config vllm.",
        )
    text: str | None = None
    if decode is not None:
        text = str(choice["text"]) if finish == "stop_string" else decode(tokens[:-1] if finish == "stop" else tokens)
    greedy = request.sampling.greedy
    return Completion(index, sample, list(tokens), logps, [0.0] * len(logps) if greedy else list(logps), finish, text)


def _logps(choice: Mapping[str, Any], n: int, url: str) -> list[float]:
    found = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(found, list) or len(found) != n:
        raise UserError("the server does not return the log-probs of the tokens that it samples", where=url, remedy="Use vLLM's server.")
    if any(value is None or not math.isfinite(value) or value <= LOWEST for value in found):
        raise UserError(
            "the server returned a log-probability that is no number",
            where=url,
            remedy="The weights it was given are broken (look for NaN in the run), or its arithmetic overflows.",
        )
    return [float(value) for value in found]


# -- what a server reports ---------------------------------------------------------------------------------------------


def probe(prompt: Sequence[int], model: str, temperature: float) -> dict[str, Any]:
    """One token, with the log-probs of the likeliest few at this temperature."""
    body = question(Request(prompt, Sampling(max_new_tokens=1, temperature=temperature)), model, (), "probe")
    return {**body, "logprobs": PROBE_TOP, "ignore_eos": True, "return_tokens_as_token_ids": True}


def check_probe(warm: Mapping[str, Any], plain: Mapping[str, Any], prompt: Sequence[int], temperature: float, url: str) -> None:
    """Whether log-probs are reported at the temperature that is sampled at; replies to `probe` at `temperature` and at 1.

    Dividing scores by T divides the distance between two tokens' log-probs by T, whatever the rest of the vocabulary does.
    """
    tops = [sorted(likeliest(reply, prompt, url).values(), reverse=True)[:PROBE_TOP] for reply in (warm, plain)]
    spread, wanted = tops[0][0] - tops[0][-1], (tops[1][0] - tops[1][-1]) / temperature
    if temperature != 1 and abs(spread - wanted) > 0.05 * max(spread, wanted) + 1e-3:
        raise UserError(
            f"the server reports log-probs before temperature, and the run samples at temperature {temperature:g}",
            where=url,
            remedy=f"Start it with {NEEDED}.",
        )


def likeliest(reply: Mapping[str, Any], prompt: Sequence[int], url: str) -> dict[int, float]:
    """Log-probs of the likeliest tokens after the prompt, by token id, out of a reply to `probe`."""
    choice = reply["choices"][0]
    if choice.get("prompt_token_ids") not in (None, list(prompt)):
        raise UserError("the server puts other tokens in front of the prompts it is given", where=url, remedy="Use vLLM's own server.")
    if not choice.get("token_ids"):
        _completion({**choice, "finish_reason": "length"}, Request([0]), 0, 0, (), None, url)
    tops = (choice.get("logprobs") or {}).get("top_logprobs")
    if not tops or not tops[0]:
        raise UserError("the server does not return log-probs", where=url, remedy="Start it without --max-logprobs 0.")
    return {int(name.removeprefix("token_id:")): float(value) for name, value in tops[0].items()}
