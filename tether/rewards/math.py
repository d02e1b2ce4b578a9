"""The math reward: 1 if the completion's final answer equals the gold answer, 0 if not, None where there is no gold answer.

Extraction is by rule (`math_extract`), notation is made one (`math_text`), numbers are compared exactly (`math_exact`), forms member
by member (`math_forms`), expressions by value after Math-Verify's grammar has read them (`math_symbolic`). All of it happens in a
helper process under a time limit, so a hostile answer costs seconds, never the run. Two answers that cannot be shown to be equal
within the limit are not equal; how often that happened is in `counters`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from tether.errors import UserError
from tether.rewards.math_extract import CLOSERS, RULES, Rule
from tether.rewards.texts import answer_texts, gold_column
from tether.rewards.worker import WorkerDied, WorkerLate, Workers

LIMIT_S = 2.5
GOLD = ("answer", "solution", "gold", "ground_truth")  # columns that hold gold answers, first come first taken


@dataclass(frozen=True)
class Verdict:
    """`how`: "compared", "no answer", "no gold", "time" (limit reached) or "memory" (the helper ended)."""

    equal: bool | None
    answer: str | None
    gold: str
    how: str


class MathReward:
    """Callable as a reward; `verify` compares one pair, from any thread.

    `column` names the gold answers (None finds `answer`, `solution`, `gold` or `ground_truth`). `rules` says where an answer may be,
    in order of trust; without "number" a bare last number is no answer. `percent`: "value" reads 45% as 0.45, "unit" as 45.
    `tolerance`: relative, for numbers; None compares exactly. `limit_s`: wall-clock seconds for one pair.
    """

    reward_name = "math"

    def __init__(
        self,
        *,
        column: str | None = None,
        rules: Sequence[Rule] = RULES,
        closers: Sequence[str] = CLOSERS,
        percent: Literal["value", "unit"] = "value",
        tolerance: float | None = None,
        limit_s: float = LIMIT_S,
        workers: int = 1,
    ) -> None:
        if unknown := [r for r in rules if r not in RULES]:
            raise UserError(
                f"there is no rule {unknown[0]!r} for finding an answer", where="rules", remedy=f"There are {', '.join(RULES)}."
            )
        if percent not in ("value", "unit"):
            raise UserError(f"percent is 'value' or 'unit', got {percent!r}", where="percent")
        if not limit_s > 0:
            raise UserError(f"limit_s must be above 0, got {limit_s!r}", where="limit_s")
        self.column, self.limit_s = column, limit_s
        self._settings = {"rules": list(rules), "closers": list(closers), "percent": percent, "tolerance": tolerance}
        self._workers = Workers("tether.rewards.math_worker", workers)
        self.counters: Counter[str] = Counter()

    def verify(self, answer: str, gold: str, *, completion: bool = False) -> Verdict:
        """Compare one answer, or with `completion` the answer found in a whole text, with the gold answer."""
        if not str(gold).strip():
            return self._counted(Verdict(None, None, "", "no gold"))
        question = {**self._settings, ("completion" if completion else "answer"): str(answer), "gold": str(gold)}
        try:
            reply = self._workers.ask(question, self.limit_s)
        except WorkerLate:
            return self._counted(Verdict(False, None, str(gold), "time"))
        except WorkerDied:
            return self._counted(Verdict(False, None, str(gold), "memory"))
        if not reply["gold"]:
            return self._counted(Verdict(None, reply["answer"], "", "no gold"))
        how = "no answer" if reply["answer"] is None else "compared"
        return self._counted(Verdict(bool(reply["equal"]), reply["answer"], reply["gold"], how))

    def verdicts(self, completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        """One verdict for each completion, with the answer that was found in it."""
        golds = gold_column(self.reward_name, self.column, columns, GOLD)
        texts = answer_texts(completions, columns.get("opened"))
        with ThreadPoolExecutor(self._workers.n) as pool:
            return list(pool.map(lambda t, g: self.verify(t, "" if g is None else str(g), completion=True), texts, golds))

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [None if v.equal is None else float(v.equal) for v in self.verdicts(completions, **columns)]

    def close(self) -> None:
        """End the helper processes; the next question starts them again."""
        self._workers.close()

    def _counted(self, verdict: Verdict) -> Verdict:
        with _COUNT:
            self.counters[verdict.how] += 1
        return verdict


_COUNT = threading.Lock()
