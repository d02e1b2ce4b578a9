"""Rewards by name: a ready one, a function in a Python file, or one in an installed module.

    reward("math")                         a ready reward with its defaults; settings as keyword arguments
    reward("my_rewards.py:brevity")        the function `brevity` of that file
    reward("my_package.rewards:brevity")   of a module that can be imported
    reward(lambda prompts, completions: [...])

A function is used as it is. A class is made with the settings; a function that is given settings gets them as keyword arguments.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.keys import nearest
from tether.reward import Reward

READY: dict[str, tuple[str, str]] = {
    "math": ("tether.rewards.math", "MathReward"),
    "code": ("tether.rewards.code", "CodeReward"),
    "pattern": ("tether.rewards.format", "PatternReward"),
    "format": ("tether.rewards.format", "TagsReward"),
    "json": ("tether.rewards.format", "JsonReward"),
    "overlong": ("tether.rewards.length", "OverlongPenalty"),
    "length": ("tether.rewards.length", "LengthPenalty"),
    "cosine": ("tether.rewards.length", "CosineReward"),
    "repetition": ("tether.rewards.length", "RepetitionPenalty"),
    "model": ("tether.rewards.model", "ModelReward"),
    "judge": ("tether.rewards.judge", "PairJudge"),
    "principles": ("tether.rewards.judge", "PrincipleJudge"),
    "vader": ("tether.rewards.vader", "VaderReward"),
}
ASKS = {"judge", "principles"}
ASKERS = {"endpoint": "Endpoint", "local": "local_model"}  # whom these ask: a block of settings of that name
TIMEOUT_S = 600.0
OWN_CLOCK_S = 86_400.0  # for a whole step of a reward that limits each answer itself: a hard end for what hangs all the same


def reward(
    spec: str | Callable[..., Any] | Reward, *, weight: float = 1.0, name: str = "", timeout_s: float | None = None, **settings: Any
) -> Reward:
    """The reward that `spec` names. UserError says what was meant, what a file lacks or which setting is unknown.

    `timeout_s` is for one call with the whole step's answers; a class that has a setting of this name (`code`: seconds for one
    program) gets it, and the call as a whole may take as long as its answers need.

    >>> reward("repetition", n=2, weight=0.1).name
    'repetition'
    """
    if isinstance(spec, Reward):
        return spec
    whole_s = TIMEOUT_S if timeout_s is None else timeout_s
    if not isinstance(spec, str):
        return Reward(functools.partial(spec, **settings) if settings else spec, name, weight, whole_s)
    if ":" in spec:
        found = _from_file(spec) if ".py:" in spec else _from_module(spec)
        if inspect.isclass(found):
            whole_s = _clock(found, timeout_s, settings)
        function = _made(found, spec, settings) if inspect.isclass(found) else functools.partial(found, **settings) if settings else found
        return Reward(function, name, weight, whole_s)
    if spec not in READY:
        near = nearest(spec, list(READY))
        raise UserError(
            f"there is no reward named {spec!r}",
            where="rewards",
            remedy=f"{f'Did you mean {near}? ' if near else ''}Ready ones: {', '.join(READY)}; your own: file.py:function.",
        )
    module, owner = READY[spec]
    made = getattr(importlib.import_module(module), owner)
    if spec == "cosine" and not callable(settings.get("correct")):
        inner = settings.get("correct", "math")
        settings["correct"] = reward(inner if isinstance(inner, str) else "math").function
    if spec in ASKS:
        settings["ask"] = _asker(spec, settings)
    whole_s = _clock(made, timeout_s, settings)
    return Reward(_made(made, spec, settings), name or spec, weight, whole_s)


def _asker(spec: str, settings: dict[str, Any]) -> Any:
    """Whom a judge asks: the one block of `ASKERS` among its settings, which is taken out of them."""
    blocks = {name: settings.pop(name) for name in ASKERS if name in settings}
    if len(blocks) + ("ask" in settings) != 1:
        raise UserError(
            f"reward {spec!r} asks one judge, and {'none' if not blocks else 'several'} {'is' if not blocks else 'are'} given",
            where="rewards",
            remedy="Give endpoint: {url: ..., model: ...} for a server, or local: {model: ...} for a frozen model in this process.",
        )
    if "ask" in settings:
        return settings["ask"]
    kind, block = next(iter(blocks.items()))
    if not isinstance(block, Mapping):
        raise UserError(
            f"{kind} of reward {spec!r} is a block of settings, got {block!r}", where="rewards", remedy=f"{kind}: {{model: ...}}"
        )
    return _made(getattr(importlib.import_module("tether.rewards.asking"), ASKERS[kind]), f"{spec}: {kind}", dict(block))


def _clock(kind: Callable[..., Any], timeout_s: float | None, settings: dict[str, Any]) -> float:
    """Seconds for a whole call. Hands `timeout_s` on to a class that has a setting of this name."""
    if "timeout_s" not in inspect.signature(kind).parameters:
        return TIMEOUT_S if timeout_s is None else timeout_s
    if timeout_s is not None:
        settings["timeout_s"] = timeout_s
    return OWN_CLOCK_S


def _made(kind: Callable[..., Any], spec: str, settings: dict[str, Any]) -> Any:
    """An instance with these settings; unknown and missing ones are named before anything is made."""
    parameters = inspect.signature(kind).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for setting in settings:
            if setting not in parameters:
                near = nearest(setting, list(parameters))
                remedy = f"{f'Did you mean {near}? ' if near else ''}It has: {', '.join(parameters) or 'none'}."
                raise UserError(f"reward {spec!r} has no setting {setting!r}", where="rewards", remedy=remedy)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [m for m in missing if m not in settings]
    if missing:
        raise UserError(f"reward {spec!r} needs the setting {missing[0]!r}", where="rewards", remedy="Give it in the recipe.")
    return kind(**settings)


def _from_file(spec: str) -> Any:
    path_text, _, function = spec.rpartition(":")
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {path}", where=spec, remedy="The path is relative to where the command runs.")
    # Under a name of its own, so that a file called math.py hides nothing; its folder can be imported from while it loads.
    module_spec = importlib.util.spec_from_file_location(f"tether_rewards_from_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    sys.path.append(str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"the file cannot be run: {type(error).__name__}: {error}", where=str(path)) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return _attribute(module, function, spec)


def _from_module(spec: str) -> Any:
    name, _, function = spec.rpartition(":")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the module {name} cannot be imported: {error}", where=spec, remedy="A file is given as file.py:function."
        ) from error
    return _attribute(module, function, spec)


def _attribute(module: Any, function: str, spec: str) -> Any:
    found = getattr(module, function, None)
    if found is None or not callable(found):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
        near = nearest(function, own) or ", ".join(own)
        what = "is not there" if found is None else f"is a {type(found).__name__}, not a function"
        raise UserError(f"{function!r} {what}", where=spec, remedy=f"The file has: {near or 'no functions'}.")
    return found
