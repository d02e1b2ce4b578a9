"""Writes docs/recipes.md from the descriptions of the settings, so that the page cannot say something else than the code."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tether.commands.explain import choices, default_of
from tether.config import configure
from tether.dpo_recipe import LOSS_ALIASES, LOSS_NAMES, settings_of
from tether.keys import FOREIGN
from tether.recipe import RECIPES, TrainRecipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
START = """\
# Recipes

A recipe is a YAML file of `key: value` lines. `command:` says what it is for; blocks such as `lora:` are indented.

```
tether dpo recipes/dpo_pandalm.yaml                       a recipe as it is
tether dpo recipes/dpo_pandalm.yaml beta=0.2 lora.rank=8  with settings that win over it
tether dpo --model smollm2 --data pairs.jsonl             without a file
tether explain recipes/dpo_pandalm.yaml                   its formula and every setting
```

What is not understood is refused before anything starts, with file, line and the name that was probably meant: unknown,
misplaced, doubled or wrongly spelt keys, text where a number belongs, and settings that the chosen loss would ignore. Numbers may
be written as `1e-5`; only `true` and `false` are truth values; `null` is allowed where the default is `null`.
In Python a recipe is a frozen object with the same checks: `DPORecipe(model="smollm2", data="pairs.jsonl", beta=0.2)`.

The complete recipe of a run, defaults filled in, is in its `recipe.yaml`, which is itself a recipe.

## Recipes that come with it

In the folder `recipes/`; the first lines of each say what it needs and what to expect. Data marked * is shipped
([origin and licences](../recipes/data/README.md)); in place of the rest comes yours, with `--data`.
"""
TITLES = {
    "sft": "`tether sft`",
    "reward": "`tether reward`",
    "dpo": "`tether dpo`",
    "grpo": "`tether grpo`",
    "ppo": "`tether ppo`",
}


def page() -> str:
    parts = [START, *shipped(), "\n## Every command\n", *table("sft", list(TrainRecipe.paths()))]
    for command, recipe in RECIPES.items():
        common = TrainRecipe.paths()
        own = [
            key
            for key, info in recipe.paths().items()
            if key not in common or (info.default, info.description) != (common[key].default, common[key].description)
        ]
        parts += [f"\n## {TITLES[command]}\n", *table(command, own)]
        if command == "dpo":
            parts += ["\nEach loss takes these settings; any other is refused:\n", "| `loss_type` | settings and defaults |", "|---|---|"]
            for loss in LOSS_NAMES:
                parts.append(f"| `{loss}` | {', '.join(f'{name} {value:g}' for name, value in settings_of(loss).items())} |")
            aliases = ", ".join(f"`{alias}` = `{name}`" for alias, name in LOSS_ALIASES.items())
            parts.append(f"\nOther names are understood, and said in the run: {aliases}.")
    parts += [
        "\n## Names of other libraries\n",
        "These are refused with the name that the setting has here.\n",
        "| elsewhere | here |",
        "|---|---|",
    ]
    for theirs, (ours, differs) in FOREIGN.items():
        here = f"`{ours}`" if ours else "no such setting"
        parts.append(f"| `{theirs}` | {here}{f': {differs}' if differs else ''} |")
    return "\n".join(parts) + "\n"


def shipped() -> list[str]:
    """A row for each file in recipes/: its command, its data, and the first sentence of its comment."""
    lines = ["| recipe | command | data | what it does |", "|---|---|---|---|"]
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        configured = configure(path)
        data = configured.recipe.data
        names = [data] if isinstance(data, str) else data
        told = ", ".join(f"`{name}`{'*' if (ROOT / name).exists() else ''}" for name in names)
        lines.append(f"| `{path.name}` | {configured.command} | {told} | {first_sentence(path.read_text(encoding='utf-8'))} |")
    return lines


def first_sentence(recipe: str) -> str:
    """Of the comment that a recipe starts with.

    >>> first_sentence("# Sums, by GRPO: right or\\n# wrong. Data: yours.\\ncommand: grpo")
    'Sums, by GRPO: right or wrong.'
    """
    comment = re.match(r"(?:#.*\n)+", recipe)
    text = " ".join(line.lstrip("# ").strip() for line in comment.group().splitlines()) if comment else ""
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


def table(command: str, keys: list[str]) -> list[str]:
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    fields = RECIPES[command].paths()
    for key in keys:
        names = choices(fields[key])
        allowed = f" One of: {', '.join(f'`{name}`' for name in names)}." if names else ""
        lines.append(f"| `{key}` | {default_of(command, key, fields[key])} | {fields[key].description}{allowed} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the page is not current")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is not current; run scripts/recipe_docs.py")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
