"""Answers to tasks: greedy and sampled, kept as they end, never made twice, and read from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark_rows import folder, jsonl, some_tasks
from tether.answers import Speaker
from tether.attempts import Attempt, Folder, complete, read_attempts, sample
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.tasks import Task

__all__ = ["folder"]  # fixtures


def test_greedy_and_samples_of_a_model(folder: str) -> None:
    """The samples are those of `tether generate` with the same seed; the greedy answer is the likeliest one."""
    speaker = Speaker(folder, precision="fp32")
    tasks = [Task(f"w{i} w{i + 1}", {}, some_tasks(1)[0].source) for i in range(10, 13)]
    kept: list[Attempt] = []
    made = sample(speaker, tasks, Sampling(max_new_tokens=5), n=3, seed=4, keep=kept.append)
    assert [(a.task, a.greedy, a.sample) for a in made] == [
        (j, g, s) for j in range(3) for g, s in ((False, 0), (False, 1), (False, 2), (True, 0))
    ]
    assert sorted(kept, key=lambda a: (a.task, a.greedy, a.sample)) == made
    wanted = speaker.answer([t.prompt for t in tasks], Sampling(max_new_tokens=5), n=3, seed=4)
    assert [a.text.split() for a in made if not a.greedy] == [a.text.split() for a in wanted]
    greedy = speaker.answer([t.prompt for t in tasks], Sampling(max_new_tokens=5, temperature=0.0))
    assert [a.text.split() for a in made if a.greedy] == [a.text.split() for a in greedy]


def test_a_stop_string_is_not_part_of_the_answer(folder: str) -> None:
    speaker = Speaker(folder, precision="fp32")
    made = sample(
        speaker, [Task("w10", {}, some_tasks(1)[0].source)], Sampling(max_new_tokens=40, stop=("w1", "w2", "w3")), n=4, greedy=False
    )
    stopped = [a for a in made if a.finish_reason == "stop_string"]
    assert stopped
    assert not any(s in a.text for a in stopped for s in ("w1", "w2", "w3"))


def test_what_was_made_is_not_made_again(folder: str, tmp_path: Path) -> None:
    """Stopped in the middle: answers are on disk, questions with all of theirs are skipped, and the end is the same."""
    speaker = Speaker(folder, precision="fp32", slots=2)
    tasks = [Task(f"w{i}", {}, some_tasks(1)[0].source) for i in range(10, 16)]
    whole = sample(speaker, tasks, Sampling(max_new_tokens=4), n=2)
    place = Folder(tmp_path / "e", {"seed": 0})

    def keep(a: Attempt) -> None:
        place.add(a, tasks[a.task])
        if len((tmp_path / "e/samples.jsonl").read_text().splitlines()) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(speaker, tasks, Sampling(max_new_tokens=4), n=2, keep=keep)
    with open(tmp_path / "e/samples.jsonl", "a") as file:
        file.write('{"task": 5, "sam')  # and the power went
    again = Folder(tmp_path / "e", {"seed": 0})
    made = again.made(tasks, speaker.codec, 2, True)
    assert 0 < len(made) < 8
    assert complete(made, 2, True) == {a.task for a in made}
    asked: list[Attempt] = []
    assert sample(speaker, tasks, Sampling(max_new_tokens=4), n=2, made=made, keep=asked.append) == whole
    assert len(asked) == len(whole) - len(made)
    with pytest.raises(UserError, match="another seed: 0, not 1"):
        Folder(tmp_path / "e", {"seed": 1})


def test_answers_of_a_file_find_their_tasks(tmp_path: Path) -> None:
    tasks = some_tasks(3)
    rows = [{"prompt": f"question {i}", "completion": f"{i}", "sample": s} for i in (0, 1) for s in range(2)]
    path = jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": "question 2", "completion": "x"}, {"prompt": "other", "completion": "y"}])
    made, notices = read_attempts(path, tasks)
    assert [(a.task, a.sample) for a in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "1 answers are to no task" in notices[0]
    assert "1 of 3 tasks have fewer than 2 answers" in notices[1]
    with pytest.raises(UserError, match="none of the answers"):
        read_attempts(jsonl(tmp_path / "b.jsonl", [{"prompt": "other", "completion": "y"}]), tasks)
