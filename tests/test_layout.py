"""The house keeps its order: a file imports from its own level or below, and what must start fast stays free of torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tether"


def levels() -> dict[str, int]:
    """Module -> level, read from the table in docs/architecture.md: the page and the code cannot drift apart."""
    found: dict[str, int] = {}
    for line in (ROOT / "docs/architecture.md").read_text().splitlines():
        row = re.match(r"\| (\d) \| (.*) \|$", line)
        if row:
            for name in re.findall(r"`([\w/]+(?:\.py|/))`", row.group(2)):
                found[name] = int(row.group(1))
    return found


def level_of(module: str, table: dict[str, int]) -> int | None:
    path = module.removeprefix("tether.").replace(".", "/")
    for name in (path + ".py", path + "/"):
        if name in table:
            return table[name]
    while "/" in path:
        path = path.rsplit("/", 1)[0]
        if path + "/" in table:
            return table[path + "/"]
    return None


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module of tether, whether at the top level) for every import in a file."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    guarded = {id(n) for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for n in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tether":
            for alias in node.names:
                deeper = PACKAGE / "/".join([*node.module.split(".")[1:], alias.name])
                is_module = deeper.with_suffix(".py").exists() or deeper.is_dir()
                found.append((f"{node.module}.{alias.name}" if is_module else node.module, id(node) in top))
        elif isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names if alias.name.split(".")[0] == "tether"]
    return found


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py"]


def test_every_file_is_on_the_architecture_page() -> None:
    table = levels()
    missing = [
        str(p.relative_to(PACKAGE)) for p in FILES if level_of(str(p.relative_to(ROOT).with_suffix("")).replace("/", "."), table) is None
    ]
    assert not missing, f"not in the levels table of docs/architecture.md: {missing}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_from_its_own_level_or_below(path: Path) -> None:
    table = levels()
    mine = level_of(str(path.relative_to(ROOT).with_suffix("")).replace("/", "."), table)
    for module, _ in imports(path):
        if module == "tether":
            continue
        theirs = level_of(module, table)
        assert theirs is not None, f"{path.name} imports {module}, which is not on the architecture page"
        assert mine is not None
        assert theirs <= mine, f"{path.name} (level {mine}) imports {module} (level {theirs})"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
