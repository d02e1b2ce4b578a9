"""Who samples in a run: this process, or servers, as the recipe's `engine` says."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tether import ranks
from tether.adapters import TRAINED, is_adapted
from tether.ahead import Listener, Plan, Remote, Source
from tether.batch import Example
from tether.engines.local import end_ids
from tether.engines.sampling import Sampling
from tether.engines.server import Server
from tether.engines.starting import command, start_servers
from tether.engines.vllm import TRIES, VLLMSampler
from tether.engines.weights import Weights, base_model, served_dtype
from tether.errors import UserError
from tether.http_json import Passing, check_key
from tether.policy import Policy
from tether.rl_recipe import SamplingRecipe
from tether.run import Run
from tether.stopwatch import Stopwatch

FOLDER = "server"  # in the run directory: weights on their way, logs of servers that were started
PAUSE_S = 1.0
OTHER_WEIGHTS = 0.5  # nats on average over the likeliest tokens, which no rounding makes of one model


def remote_source(
    recipe: SamplingRecipe, policy: Policy, data: Sequence[Example], sampling: Sampling, run: Run, watch: Stopwatch
) -> Source | None:
    """Servers that sample for the run, met and found fit; None where this process samples. A meeting of all ranks.

    The first rank starts servers and asks them; the others help to gather the weights.
    """
    if not recipe.engine.remote:
        return None
    check_key(recipe.engine.key_env, "engine.key_env")
    here = Path(run.folder) / FOLDER
    weights = Weights(policy, Path(recipe.engine.weights).expanduser() if recipe.engine.weights else here)
    sampler: Remote = Listener(weights.write)
    positions = None
    if ranks.first():
        servers = _servers(recipe, policy, here, run)
        _meet(servers, policy, data[0].prompt, recipe.temperature, run)
        sampler = asking = VLLMSampler(servers, policy.codec, weights, end_ids(policy.model, policy.codec), pause_s=PAUSE_S)
        positions = asking.positions
        weakref.finalize(asking, _leave, servers, weights)
        words = f"answers are sampled by vLLM at {', '.join(s.url for s in servers if s.alive)}"
        run.note("engine", words)
        run.say(words)

    def tell(text: str) -> None:
        run.note("server", text)
        run.say(f"warning: {text}")

    plan = Plan(recipe, data, sampling)
    return Source(sampler, plan, ahead=recipe.ahead_steps, positions=ranks.share(positions), watch=watch, tell=tell)


def _servers(recipe: SamplingRecipe, policy: Policy, here: Path, run: Run) -> list[Server]:
    config = recipe.engine
    if config.urls is not None:
        return [Server(url, model=config.model, key_env=config.key_env, timeout_s=config.timeout_s) for url in config.urls]
    model = base_model(policy, here)
    own = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)

    def arguments(python: str, port: int) -> list[str]:
        words = command(
            python,
            model,
            port,
            dtype=str(served_dtype(policy)).removeprefix("torch."),
            slots=recipe.sampling_slots,
            positions=min(recipe.max_length, own or recipe.max_length),
            lora=recipe.lora.rank if recipe.lora is not None else _rank_of(policy),
            adapters=recipe.ahead_steps + 1,
            cpu=policy.device.type == "cpu",
        )
        return [*words, "--trust-remote-code"] if policy.trust_remote_code else words

    return start_servers(config, arguments, here, whole=_rank_of(policy) is None, cpu=policy.device.type == "cpu", say=run.say)


def _rank_of(policy: Policy) -> int | None:
    """Rank of the adapter that is trained, if one is."""
    return int(policy.model.peft_config[TRAINED].r) if is_adapted(policy.model) else None


def _meet(servers: Sequence[Server], policy: Policy, prompt: Sequence[int], temperature: float, run: Run) -> None:
    """Every server must be fit. One that does not answer is left aside, if another does."""
    silent = []
    for server in servers:
        for number in range(TRIES):
            try:
                found = server.meet(policy.tokenizer, prompt, temperature)
                _compare(found, policy, prompt, server.url)
                break
            except Passing as error:
                if number == TRIES - 1:
                    server.alive = False
                    silent.append(f"{server.url} ({error})")
                else:
                    time.sleep(PAUSE_S * 2**number)
    if len(silent) == len(servers):
        raise UserError(
            f"no vLLM server answers: {'; '.join(silent)}",
            where="engine.urls",
            remedy="Start one, or leave urls out and the run starts its own.",
        )
    if silent:
        words = f"these vLLM servers do not answer and are left aside: {'; '.join(silent)}"
        run.note("server", words)
        run.say(f"warning: {words}")


def _compare(found: Mapping[int, float], policy: Policy, prompt: Sequence[int], url: str) -> None:
    """An adapter goes on top of the server's own weights: those must be the weights it is trained on, on a resumed run too.

    Over several ranks a forward pass is a meeting of all of them; there the check before the first step says it.
    """
    if not is_adapted(policy.model) or ranks.size() > 1:
        return
    trainable = [(p, p.requires_grad) for p in policy.model.parameters()]
    with torch.no_grad(), policy.model.disable_adapter():
        scores = policy.model(input_ids=torch.tensor([list(prompt)], device=policy.device)).logits[0, -1].float()
    for parameter, value in trainable:  # switching adapters also switches what is trainable
        parameter.requires_grad_(value)
    ours = torch.log_softmax(scores, -1)
    gap = sum(abs(float(ours[token]) - logp) for token, logp in found.items()) / len(found)
    if not gap <= OTHER_WEIGHTS:
        raise UserError(
            f"the server has other weights than the model that the adapter is trained on: log-probs differ by {gap:.1f} nats",
            where=url,
            remedy="Start it with the model that the recipe names, as it was before training.",
        )


def _leave(servers: Sequence[Server], weights: Weights) -> None:
    """What a run that is over leaves behind: servers of others without its adapters, no weights on their way."""
    for server in servers:
        if server.alive and server.log is None:
            with contextlib.suppress(Exception):  # the run is through; nobody is left to tell
                server.forget(())
    weights.forget(())
