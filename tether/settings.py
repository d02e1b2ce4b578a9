"""`Settings`: a frozen pydantic model whose mistakes are told in words, with the full path of the key.

Everything is checked here, so that a file, the command line and a Python call are refused alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import Self

from tether.keys import SettingError, meant, nearest


class Settings(BaseModel):
    """Base of all recipes and their nested blocks. Raises SettingError (a UserError), never pydantic's own error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)

    command: ClassVar[str] = ""
    _notes: list[str] = PrivateAttr(default_factory=list)
    _given: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def notes(self) -> list[str]:
        """What was read differently from how it was written, such as an alias: to be said and logged."""
        return list(self._notes)

    @property
    def given(self) -> frozenset[str]:
        """Names of the settings that were given; the others hold defaults."""
        return self._given

    def __eq__(self, other: object) -> bool:
        """Equal settings are equal, whichever of them were given and whichever are defaults."""
        return type(self) is type(other) and isinstance(other, Settings) and self.model_dump() == other.model_dump()

    @classmethod
    def paths(cls) -> dict[str, FieldInfo]:
        """Every setting by its dotted path: `learning_rate`, `lora`, `lora.rank`, ..."""
        out: dict[str, FieldInfo] = {}
        for name, info in cls.model_fields.items():
            out[name] = info
            if block := _block(info):
                out |= {f"{name}.{path}": inner for path, inner in block.paths().items()}
        return out

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, checked again in full (pydantic's model_copy would not check)."""
        kept = {name: getattr(self, name) for name in self._given}
        return type(self)(**{**kept, **changes})

    def resolved(self) -> dict[str, Any]:
        """Every setting that acts, defaults filled in, as plain data."""
        unused = self._unused()
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in unused}

    def _unused(self) -> frozenset[str]:
        return frozenset()

    @classmethod
    def _other_commands(cls) -> Mapping[str, list[str]]:
        return {}

    @classmethod
    def _fill(cls, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        """A chance for a recipe to resolve aliases and dependent defaults before the values are checked."""
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return handler(data)
        if not isinstance(data, Mapping):
            raise ValueError(f"a block of settings is wanted ({', '.join(list(cls.model_fields)[:3])}, ...), got {data!r}")
        cls._refuse_unknown(data)
        notes: list[str] = []
        given = frozenset(data)
        ready = cls._fill(_build_blocks(cls, dict(data)), notes)
        try:
            made = handler(ready)
        except ValidationError as error:
            raise _in_sentences(error, cls) from None
        made._notes, made._given = notes, given
        return made

    @classmethod
    def _refuse_unknown(cls, data: Mapping[str, Any]) -> None:
        unknown = list(_unknown(cls, data, ""))
        if not unknown:
            return
        own = cls.paths()
        sentences = [(key, meant(key, own, cls._other_commands())) for key in unknown]
        key, hint = sentences[0]
        rest = "".join(f"\nAlso unknown: {other}. {why}".rstrip() for other, why in sentences[1:])
        name = f" of `tether {cls.command}`" if cls.command else ""
        raise SettingError(f"unknown setting{name}", key=key, remedy=(hint or f"The settings are: {', '.join(own)}.") + rest)


def _block(info: FieldInfo) -> type[Settings] | None:
    """The nested block that a field holds, if it holds one."""
    kinds = [info.annotation, *get_args(info.annotation)]
    return next((k for k in kinds if get_origin(k) is None and isinstance(k, type) and issubclass(k, Settings)), None)


def _unknown(cls: type[Settings], data: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in data.items():
        if name not in cls.model_fields:
            yield f"{prefix}{name}"
        elif (block := _block(cls.model_fields[name])) and isinstance(value, Mapping):
            yield from _unknown(block, value, f"{prefix}{name}.")


def _build_blocks(cls: type[Settings], data: dict[str, Any]) -> dict[str, Any]:
    """Nested blocks are built first, so that their mistakes carry the full path."""
    for name, info in cls.model_fields.items():
        if (block := _block(info)) and isinstance(data.get(name), Mapping):
            try:
                data[name] = block(**data[name])
            except SettingError as error:
                raise SettingError(error.what, key=f"{name}.{error.key}", remedy=error.remedy) from None
    return data


def _in_sentences(error: ValidationError, cls: type[Settings]) -> SettingError:
    # A wrong value is told before a missing one: whoever mistypes a setting wants to hear of that first.
    found = sorted(error.errors(), key=lambda e: e["type"] == "missing")
    told = [(str(e["loc"][0]) if e["loc"] else cls.__name__, *_sentence(e, cls)) for e in found]
    key, what, remedy = told[0]
    rest = "".join(f"\nAlso {other}: {why}. {how or ''}".rstrip() for other, why, how in told[1:])
    return SettingError(what, key=key, remedy=((remedy or "") + rest).strip() or None)


def _sentence(error: ErrorDetails, cls: type[Settings]) -> tuple[str, str | None]:
    kind, given, ctx = error["type"], error.get("input"), error.get("ctx", {})
    bounds = {
        "greater_than_equal": ("must be at least", "ge"),
        "greater_than": ("must be above", "gt"),
        "less_than_equal": ("must be at most", "le"),
        "less_than": ("must be below", "lt"),
    }
    if kind in bounds:
        words, name = bounds[kind]
        return f"{words} {ctx[name]:g}, got {given:g}", None
    if kind == "missing" or (given is None and error["loc"] and cls.model_fields[str(error["loc"][0])].is_required()):
        key = str(error["loc"][0])
        flags = f" or pass --{key}" if key in ("model", "data", "run") else ""
        return "is needed and was not given", f"Add `{key}: ...` to the recipe{flags}."
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", str(ctx.get("expected", "")))
        close = nearest(str(given), names)
        hint = f"Did you mean {close}?" if close else None
        return f"{'null' if given is None else repr(given)} is not one of: {', '.join(names)}", hint
    if kind == "value_error":
        what, _, remedy = str(ctx["error"]).partition("; ")
        return what, f"{remedy[0].upper()}{remedy[1:]}." if remedy else None
    return f"{error['msg'].lower()}, got {given!r}", None
