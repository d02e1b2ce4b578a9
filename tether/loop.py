"""What surrounds a step and is the same for every method: data order, micro-batches, the update, the log, checkpoints, Ctrl-C.

The mathematics stays in the algorithm's own file:

    with Loop(recipe, run, model, n_rows=len(examples), title="DPO") as loop:
        for step in loop:
            tally = Tally()
            for part in loop.parts(examples):          # micro-batches by token budget
                loss, metrics = ...
                loss.backward()
                tally.add(loss, metrics)
            loop.end(tally)
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tether import ranks
from tether.batch import DataOrder, Example
from tether.checkpoint import load_checkpoint, save_checkpoint
from tether.interrupt import Interrupt
from tether.packing import own_parts
from tether.progress import Progress
from tether.recipe import TrainRecipe
from tether.run import Run
from tether.step import Diverged, Update, all_finite
from tether.trackers import Trackers


class Interrupted(Exception):
    """Ctrl-C was pressed: the state is saved, and `tether resume` continues it."""


class Tally:
    """Sums what the micro-batches of one optimiser step report, so that a split never shows in the log.

    Per-row values are averaged over the step's rows; totals are added up.
    """

    def __init__(self) -> None:
        self.loss = 0.0
        self._rows: dict[str, list[Tensor]] = defaultdict(list)
        self._ratios: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._extremes: dict[str, float] = {}
        self.tokens = 0

    def add(self, loss: Tensor, rows: Mapping[str, Tensor] | None = None, *, tokens: int = 0) -> None:
        """`loss` is this micro-batch's share (it already divides by the step's total); `rows` holds (B,) values."""
        self.loss += float(loss.detach())
        self.tokens += tokens
        for name, values in (rows or {}).items():
            if not name.startswith("loss/per_"):  # their mean is the loss
                self._rows[name].append(values.detach().reshape(-1).double())

    def add_ratio(self, name: str, numerator: float, denominator: float) -> None:
        """A mean whose denominator is not the number of rows, such as a mean over tokens."""
        pair = self._ratios[name]
        pair[0] += numerator
        pair[1] += denominator

    def add_extremes(self, name: str, values: Tensor, *, low: bool = True) -> None:
        """Smallest and largest of the step, as `name/min` and `name/max`."""
        if values.numel():
            for kind, value in (("max", float(values.max())), ("min", float(values.min()))):
                key = f"{name}/{kind}"
                if kind == "max":
                    self._extremes[key] = max(value, self._extremes.get(key, value))
                elif low:
                    self._extremes[key] = min(value, self._extremes.get(key, value))

    def merged(self) -> Tally:
        """What all ranks have added, on each of them: rows in the order of the ranks. Alone, this tally itself."""
        if ranks.size() == 1:
            return self
        out = Tally()
        mine = (self.loss, self.tokens, {k: torch.cat(v) for k, v in self._rows.items()}, dict(self._ratios), self._extremes)
        for loss, tokens, rows, ratios, extremes in ranks.gather(mine):
            out.loss += loss
            out.tokens += tokens
            for name, values in rows.items():
                out._rows[name].append(values)
            for name, (numerator, denominator) in ratios.items():
                out.add_ratio(name, numerator, denominator)
            for name, value in extremes.items():
                keep = max if name.endswith("/max") else min
                out._extremes[name] = keep(value, out._extremes.get(name, value))
        return out

    def rows(self, name: str) -> Tensor:
        """All values of one per-row metric, in the order in which they were added."""
        return torch.cat(self._rows[name]) if self._rows[name] else torch.empty(0, dtype=torch.float64)

    def means(self) -> dict[str, float]:
        out = {"loss": self.loss}
        out |= {name: float(torch.cat(parts).mean()) for name, parts in self._rows.items() if sum(len(p) for p in parts)}
        out |= {name: top / bottom for name, (top, bottom) in self._ratios.items() if bottom}
        return out | self._extremes


class Loop:
    """Iterates over optimiser steps, from the newest complete checkpoint if the run has one."""

    def __init__(
        self,
        recipe: TrainRecipe,
        run: Run,
        model: Any,
        *,
        n_rows: int,
        title: str,
        rows_per_step: int | None = None,
        updates_per_step: int = 1,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        """`rows_per_step` is batch_size unless a row stands for several answers; `rates` as in `Update`."""
        self.recipe, self.run, self.model, self.title = recipe, run, model, title
        self.order = DataOrder(n_rows, rows_per_step or recipe.batch_size, recipe.seed, recipe.shuffle)
        self.total_steps = recipe.max_steps or max(1, math.ceil(recipe.epochs * self.order.steps_per_epoch - 1e-9))
        self.update = Update(model.parameters(), recipe, self.total_steps * updates_per_step, rates)
        self.state: dict[str, Any] = {"num_tokens": 0}  # what a method wants to find again after a resume
        self.step = 0
        self._applied: list[dict[str, Any]] = []
        self._saved_at: int | None = None

    def __enter__(self) -> Loop:
        found = load_checkpoint(self.run, self.model, self.update)
        if found is None:
            torch.manual_seed(self.recipe.seed)  # dropout draws from the global generator; a checkpoint puts its state back
        else:
            self.step, self.state = found.step, {**self.state, **found.extra}
            self._saved_at = self.step
            self.run.note("resumed", f"continued from step {self.step}")
        self.run.truncate(self.step)
        self.first_step = self.step
        self.progress = Progress(self.total_steps, self.title, start=self.step, every=self.recipe.log_every).__enter__()
        self.trackers = Trackers(self.recipe.trackers if ranks.first() else [], self.run)
        self.interrupt = Interrupt().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.interrupt.__exit__(kind, error, trace)
        self.trackers.close()
        self.progress.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[int]:
        """Yields step numbers (0-based). What is due after a step happens when its body is through, so that a checkpoint holds
        all that the body kept in `state`; after the last step the final state is on disk."""
        while self.step < self.total_steps:
            self._began = time.perf_counter()
            yield self.step
            if self.recipe.keep_checkpoints and (self.step % self.recipe.save_steps == 0 or self.step == self.total_steps):
                self._save()
            # Every rank stops at the same step, whichever of them was told.
            if any(ranks.gather(self.interrupt.requested)) and self.step < self.total_steps:
                self._save()
                raise Interrupted(f"stopped at step {self.step} of {self.total_steps}; continue with: {ranks.again(self.run.folder)}")
        if self.recipe.keep_checkpoints:
            self._save()
        else:
            self._refuse_broken_weights()

    def rows(self) -> list[int]:
        """Indices of the rows that make up this optimiser step."""
        return self.order.batch(self.step)

    def parts(self, examples: Sequence[Example]) -> list[list[int]]:
        """This rank's share of this step's rows, cut into micro-batches by token budget. The cut never changes the update."""
        rows = self.rows()
        cut = own_parts([examples[i] for i in rows], self.recipe.tokens_per_micro_batch)
        return [[rows[j] for j in part] for part in cut]

    def apply(self, loss: float) -> None:
        """One of several updates of this step, in a method that makes more than the one of `end`. `loss` is that of all ranks."""
        self._applied.append(self.update.apply(loss=loss))

    def rest(self) -> None:
        """In place of an update: nothing in this step says which way to go, and nothing is wrong."""
        self._applied.append({"grad_norm": 0.0, "learning_rate": self.update.learning_rate(self.update.applied), "skipped": 0})

    def end(self, tally: Tally, extra: Mapping[str, float] | None = None) -> dict[str, float]:
        """Clip and apply the update, unless the body has done so by `apply`, and log the step. Returns what was logged.

        `tally` holds what all ranks have added (`Tally.merged`).
        """
        applied = _merged(self._applied or [self.update.apply(loss=tally.loss)])
        self._applied = []
        self.state["num_tokens"] += tally.tokens
        seconds = time.perf_counter() - self._began
        self.step += 1
        metrics: dict[str, Any] = {
            **tally.means(),
            **(extra or {}),
            **applied,
            "epoch": round(self.order.epoch(self.step), 6),
            "num_tokens": self.state["num_tokens"],
            "step_time": round(seconds, 4),
            "tokens_per_second": round(tally.tokens / seconds, 1),
        }
        self.run.log(self.step, metrics)
        self.trackers.log(self.step, metrics)
        self.progress.update(self.step, metrics)
        return metrics

    def due(self, every: int | None) -> bool:
        """Whether something that runs every n steps is due after the step that just ended. Not after the last one: what a method
        does at its end would do it a second time."""
        return every is not None and self.step % every == 0 and self.step < self.total_steps

    def _save(self) -> None:
        if self._saved_at != self.step:
            self._refuse_broken_weights()
            save_checkpoint(self.run, self.step, self.model, self.update, self.state, keep=max(1, self.recipe.keep_checkpoints))
            self._saved_at = self.step

    def _refuse_broken_weights(self) -> None:
        """No checkpoint and no result is ever written from weights that are not finite: it would push out the last good one."""
        broken = ranks.union(name for name, p in self.update.parameters.items() if not all_finite(p))
        if broken:
            saved = self.run.checkpoints()
            raise Diverged(
                f"the weights are not finite after step {self.step} ({broken[0]}{f' and {len(broken) - 1} more' if broken[1:] else ''})",
                where=str(self.run.folder),
                remedy=f"Nothing was saved from them; the last good checkpoint is {saved[-1]}."
                if saved
                else "Nothing was saved from them. Lower learning_rate, or set precision: fp32.",
            )


def _merged(applied: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several updates of one step as one row: the mean norm, the last rate, how many were not applied and why first."""
    out: dict[str, Any] = {
        "grad_norm": sum(a["grad_norm"] for a in applied) / len(applied),
        "learning_rate": applied[-1]["learning_rate"],
        "skipped": sum(a["skipped"] for a in applied),
    }
    reasons = [a["skip_reason"] for a in applied if "skip_reason" in a]
    return {**out, "skip_reason": reasons[0]} if reasons else out
