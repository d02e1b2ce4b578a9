"""YAML as recipes use it: one mapping, the place of every key, no key twice, and numbers that are numbers.

The usual loader follows YAML 1.1, where 1e-5 is a text, `no` is false and 1:30 is ninety. This one follows YAML 1.2's core
schema: 1e-5 is a number; only true and false are truth values.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tether.errors import UserError

Places = dict[str, int]  # dotted key -> line, counted from 1


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (the base class's own attribute)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)  # 010 is ten, not eight


def load_mapping(text: str, name: str) -> tuple[dict[str, Any], Places]:
    """The mapping in `text` and the line of each key. `name` is the file's name, for error messages."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                "a recipe is a list of `key: value` lines", where=f"{name}:{node.start_mark.line + 1}", remedy="See recipes/ for examples."
            )
        places: Places = {}
        _check_keys(node, name, "", places)
        return dict(loader.construct_document(node)), places
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        what = getattr(error, "problem", None) or str(error)
        raise UserError(
            f"not valid YAML: {what}", where=where, remedy="Each line is `key: value`, blocks are indented by spaces."
        ) from None
    finally:
        loader.dispose()


def load_scalar(text: str, name: str) -> Any:
    """One value as it would be read in a file: `1e-5` a number, `[a, b]` a list, `"10"` a text."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError:
        raise UserError(f"not a value: {text}", where=name, remedy="Put quotes around a text with special characters.") from None
    finally:
        loader.dispose()


def _check_keys(node: yaml.MappingNode, name: str, prefix: str, places: Places) -> None:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
            raise UserError("a key must be a name", where=f"{name}:{line}", remedy="Each line is `key: value`.")
        path = f"{prefix}{key_node.value}"
        if path in places:
            raise UserError(f"{path} is given twice, first on line {places[path]}", where=f"{name}:{line}", remedy="Keep one of the two.")
        places[path] = line
        if isinstance(value_node, yaml.MappingNode):
            _check_keys(value_node, name, f"{path}.", places)
