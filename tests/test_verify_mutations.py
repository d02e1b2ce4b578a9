"""`tether verify` against mistakes made on purpose: each is found, with exit code 1, and named by the line that it belongs to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tether import advantage, cli, codec, head, packing, step
from tether.algorithms import dpo, grpo, kto, ppo, reward_model, sft
from tether.engine import Engine
from tether.engines import local
from tether.losses import kl, policy_gradient
from tether.policy import Policy, Reference
from tether.verify import lines

Patch = pytest.MonkeyPatch
SHORT = ["max_completion_length=16", "num_generations=4", "batch_size=16"]
SFT, REWARD, DPO, KTO = ["sft"], ["reward", "heads=2"], ["dpo"], ["dpo", "loss_type=kto"]
GRPO = ["grpo", "preset=grpo", *SHORT]
PPO = ["ppo", "max_completion_length=16", "batch_size=16"]


def opposite(module: Any, name: str) -> Callable[[Patch], None]:
    """The function returns (loss, metrics), or a loss alone, with the sign turned."""

    def patch(monkeypatch: Patch) -> None:
        real = getattr(module, name)

        def turned(*args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            return (-made[0], *made[1:]) if isinstance(made, tuple) else -made

        monkeypatch.setattr(module, name, turned)

    return patch


def advantage_turned(monkeypatch: Patch) -> None:
    real = advantage.ADVANTAGES["group_norm"]
    monkeypatch.setitem(advantage.ADVANTAGES, "group_norm", lambda *args: -real(*args))


def shifted(name: str) -> Callable[[Patch], None]:
    """`predict` or `targets` of every packed stream, one place on."""

    def patch(monkeypatch: Patch) -> None:
        real = packing.pack

        def moved(*args: Any, **kwargs: Any) -> packing.Packed:
            packed = real(*args, **kwargs)
            return dataclasses.replace(packed, **{name: getattr(packed, name).roll(1)})

        for module in (packing, sft, dpo, kto, reward_model):
            monkeypatch.setattr(module, "pack", moved)

    return patch


def mask_shifted(by: int) -> Callable[[Patch], None]:
    """Which tokens of an answer are trained, one place on or back."""

    def patch(monkeypatch: Patch) -> None:
        real = codec.Codec.examples

        def moved(self: Any, rendered: Any) -> Any:
            out = []
            for example in real(self, rendered):
                masks = [[False, *t[:-1]] if by > 0 else [*t[1:], False] for t in example.trained]
                out.append(dataclasses.replace(example, trained=masks))
            return out

        monkeypatch.setattr(codec.Codec, "examples", moved)

    return patch


def bound_dropped(*, upper: bool) -> Callable[[Patch], None]:
    def patch(monkeypatch: Patch) -> None:
        def one_sided(ratio: Any, a: Any, clip: Any) -> Any:
            bounded = ratio.clamp(min=1 - clip.low) if upper else ratio.clamp(max=1 + clip.high)
            return torch.minimum(ratio * a, bounded * a)

        monkeypatch.setattr(policy_gradient, "clipped_objective", one_sided)

    return patch


def value_clip_dropped(monkeypatch: Patch) -> None:
    real = ppo.value_loss
    monkeypatch.setattr(ppo, "value_loss", lambda *args, **kwargs: real(*args, **{**kwargs, "value_clip": None}))


def k2_for_k3(monkeypatch: Patch) -> None:
    monkeypatch.setitem(kl.KL_ESTIMATORS, "k3", kl.k2)


def hot_engine(monkeypatch: Patch) -> None:
    real = Engine.logprobs

    def hot(self: Any, packed: Any, temperature: float = 1.0, stats: bool = False, hidden: Any = None) -> Any:
        return real(self, packed, 2 * temperature, stats, hidden)

    monkeypatch.setattr(Engine, "logprobs", hot)


def hot_sampler(monkeypatch: Patch) -> None:
    real = local.draw

    def hot(logits: Any, settings: Any, history: Any, uniforms: Any) -> Any:
        return real(logits, [dataclasses.replace(s, temperature=2 * s.temperature) for s in settings], history, uniforms)

    monkeypatch.setattr(local, "draw", hot)


def answers_without_their_prompt(monkeypatch: Patch) -> None:
    real = packing._Stream.add_segment

    def blind(self: Any, tokens: list[int], prompt: tuple[int, int]) -> int:
        start = real(self, tokens, prompt)
        if tokens:
            self.segments[-1] = packing.Segment(start, start + len(tokens), 0, 0)
        return start

    monkeypatch.setattr(packing._Stream, "add_segment", blind)


def backward_of_the_head_too_large(monkeypatch: Patch) -> None:
    real = head._LinearHead.backward
    monkeypatch.setattr(head._LinearHead, "backward", staticmethod(lambda ctx, grad: real(ctx, 1.01 * grad)))


def reference_follows_the_policy(monkeypatch: Patch) -> None:
    import contextlib

    @contextlib.contextmanager
    def follows(self: Any) -> Any:
        yield Reference(self.engine)

    monkeypatch.setattr(Policy, "reference", follows)


def every_part_divides_by_its_own_rows(monkeypatch: Patch) -> None:
    real = dpo.preference_loss
    monkeypatch.setattr(dpo, "preference_loss", lambda pairs, **kwargs: real(pairs, **{**kwargs, "total_pairs": len(pairs.chosen)}))


def every_part_divides_by_its_own_tokens(monkeypatch: Patch) -> None:
    real = ppo.policy_loss

    def by_its_own(lp: Any, old: Any, a: Any, mask: Any, **kwargs: Any) -> Any:
        return real(lp, old, a, mask, **{**kwargs, "total_tokens": int(mask.sum())})

    monkeypatch.setattr(ppo, "policy_loss", by_its_own)


def updates_uphill(monkeypatch: Patch) -> None:
    real = step.Update._step

    def uphill(self: Any, norm: float, rate: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.neg_()
        real(self, norm, rate)

    monkeypatch.setattr(step.Update, "_step", uphill)


def loop_turns_the_advantage(monkeypatch: Patch) -> None:
    real = grpo.updates

    def turned(recipe: Any, policy: Any, loop: Any, batch: Any, advantages: Any, *rest: Any, **kwargs: Any) -> Any:
        return real(recipe, policy, loop, batch, -advantages, *rest, **kwargs)

    monkeypatch.setattr(grpo, "updates", turned)


def moments_are_forgotten(monkeypatch: Patch) -> None:
    real = step.Update.load_state_dict

    def forgets(self: Any, state: Any, **kwargs: Any) -> None:
        real(self, {**state, "tensors": {}}, **kwargs)

    monkeypatch.setattr(step.Update, "load_state_dict", forgets)


MUTATIONS: dict[str, tuple[list[str], Callable[[Patch], None], str]] = {
    "sft, sign of the loss": (SFT, opposite(sft, "sft_loss"), "loss = formula"),
    "reward, sign of the loss": (REWARD, opposite(reward_model, "reward_model_loss"), "loss = formula"),
    "dpo, sign of the loss": (DPO, opposite(dpo, "preference_loss"), "loss = formula"),
    "kto, sign of the loss": (KTO, opposite(kto, "kto_loss"), "loss = formula"),
    "grpo, sign of the loss": (GRPO, opposite(grpo, "policy_loss"), "loss = formula"),
    "ppo, sign of the loss": (PPO, opposite(ppo, "policy_loss"), "loss = formula"),
    "grpo, sign of the advantage": (GRPO, advantage_turned, "advantage = formula"),
    "ppo, sign of the advantage": (PPO, opposite(ppo, "gae"), "advantage = formula"),
    "grpo, sign of the advantage in the loop": (GRPO, loop_turns_the_advantage, "a step of the loop"),
    "sft, predict shifted": (SFT, shifted("predict"), "trained tokens"),
    "dpo, targets shifted": (DPO, shifted("targets"), "trained tokens"),
    "sft, trained mask one on": (SFT, mask_shifted(1), "trained tokens"),
    "dpo, trained mask one back": (DPO, mask_shifted(-1), "trained tokens"),
    "grpo, upper clip bound dropped": (GRPO, bound_dropped(upper=True), "loss = formula"),
    "grpo, lower clip bound dropped": (GRPO, bound_dropped(upper=False), "loss = formula"),
    "ppo, upper clip bound dropped": (PPO, bound_dropped(upper=True), "loss = formula"),
    "ppo, lower clip bound dropped": (PPO, bound_dropped(upper=False), "loss = formula"),
    "ppo, clip of values dropped": (PPO, value_clip_dropped, "loss = formula"),
    "grpo, another tie": (GRPO, k2_for_k3, "loss = formula"),
    "grpo, temperature doubled in the sampler": (GRPO, hot_sampler, "sampling = training"),
    "ppo, temperature doubled in the sampler": (PPO, hot_sampler, "sampling = training"),
    "grpo, temperature doubled in the engine": (GRPO, hot_engine, "packed = padded"),
    "dpo, answers do not see their prompt": (DPO, answers_without_their_prompt, "packed = padded"),
    "sft, gradient of the head": (SFT, backward_of_the_head_too_large, "chunked = whole"),
    "dpo, the reference follows the policy": (DPO, reference_follows_the_policy, "reference"),
    "dpo, divided by the rows of a part": (DPO, every_part_divides_by_its_own_rows, "any split = whole"),
    "ppo, divided by the tokens of a part": (PPO, every_part_divides_by_its_own_tokens, "any split = whole"),
    "reward, updates go uphill": (REWARD, updates_uphill, "a step of the loop"),
    "kto, moments forgotten": (KTO, moments_are_forgotten, "checkpoint"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found_and_named_by_its_line(name: str, monkeypatch: Patch, capsys: Any) -> None:
    words, mutate, expected = MUTATIONS[name]
    mutate(monkeypatch)
    signs = "sign" in name and name.split(",")[0] in ("grpo", "ppo")
    if not signs:  # where a method ends says nothing new, and takes half of the time
        monkeypatch.setattr(lines, "LINES", tuple(line for line in lines.LINES if line.name != "exact policy"))
    assert cli.run(["verify", *words, "precision=fp32", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["recipes"][0]["lines"]
    failed = [line["name"] for line in told if line["verdict"] == "fails"]
    assert failed[0] == expected
    if signs and "loop" not in name:
        assert failed[-1] == "exact policy"


def test_the_temperature_of_the_engine_is_told_from_that_of_the_sampler(monkeypatch: Patch, capsys: Any) -> None:
    hot_engine(monkeypatch)
    assert cli.run(["verify", *GRPO, "precision=fp32"]) == 1
    told = capsys.readouterr().out
    assert "packed = padded does not hold" in told.splitlines()[-1]
    assert "sampling = training" in told.splitlines()[-1]
    [detail] = [line for line in told.splitlines() if "against the plain forward pass the sampler is off by" in line]
    sampler, training = detail.split("off by ")[1].split(", training by ")
    assert float(sampler) < 1e-4 < float(training)
