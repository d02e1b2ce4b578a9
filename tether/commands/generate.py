"""`tether generate`: answers to a file of prompts. `tether chat`: talk to a model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from tether.answers import Speaker
    from tether.engines.sampling import Sampling

Model = Annotated[str, typer.Argument(help="A model folder, hub id, .gguf file, adapter folder, or smollm2.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option(help="Scores are divided by it; 0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that together reach this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens with at least this share of the likeliest one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 makes tokens that were seen less likely.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")]
Precision = Annotated[str, typer.Option(help="auto, bf16 or fp32.")]
Trust = Annotated[bool, typer.Option(help="Run Python code that comes with the model.")]
System = Annotated[str | None, typer.Option(help="A system message.")]


def generate(
    model: Model,
    prompts: Annotated[str | None, typer.Argument(help="A data file with prompts, or a .txt file with one a line.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    out: Annotated[Path | None, typer.Option(help="The JSONL file to write; standard output if left out.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers to each prompt.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue --prompt and .txt lines as plain text, without the chat template.")] = False,
    system: System = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="An answer depends on its prompt, the settings and this, not on its neighbours.")] = 0,
    slots: Annotated[int, typer.Option(help="Answers computed at once.")] = 128,
    on_bad_rows: Annotated[str, typer.Option(help="refuse, or drop rows that hold no usable prompt.")] = "refuse",
    precision: Precision = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Answers to prompts, as JSONL with completion, finish reason and token counts."""
    sampling = _sampling(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
    for name, value in (("n", n), ("slots", slots), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}", where=f"--{name}")
    if on_bad_rows not in ("refuse", "drop"):
        raise UserError(f"there is no {on_bad_rows!r}", where="--on-bad-rows", remedy="Use refuse or drop.")
    if (prompts is None) == (not prompt):
        raise UserError("give either a file of prompts or --prompt", where="command line")
    if out is not None and out.is_dir():
        raise UserError("this is a folder", where=str(out), remedy="Name a file, such as answers.jsonl.")
    from tether.answers import Speaker, read_prompts, write_answers
    from tether.messages import user

    texts: list[Any] = [user(p) for p in prompt or []]
    sources = None
    from_words = prompts is None or prompts.lower().endswith(".txt")
    if prompts is not None:
        texts, sources, left_out = read_prompts(prompts, on_bad_rows=on_bad_rows)
        if left_out:
            say(f"{left_out} rows of {prompts} were left out; `tether data {prompts} --kind prompt` names them")
    texts, sources = texts[:limit], sources[:limit] if sources else None
    if system is not None:
        texts = [t if isinstance(t, str) else [{"role": "system", "content": system}, *t] for t in texts]
    speaker = Speaker(model, precision=precision, slots=slots, trust_remote_code=trust_remote_code)
    if from_words and (raw or not speaker.codec.has_template):
        # A model without a chat template continues text.
        texts = [t[-1]["content"] for t in texts]
    started = time.monotonic()
    answers = speaker.answer(texts, sampling, n=n, seed=seed, sources=sources)
    for notice in speaker.notices:
        say(notice)
    if out is not None:
        write_answers(out, answers)
    else:
        for a in answers:
            print(json.dumps(a.as_row(), ensure_ascii=False))
    tokens, seconds = sum(a.completion_tokens or 0 for a in answers), time.monotonic() - started
    cut = sum(a.finish_reason == "length" for a in answers)
    say(f"{len(answers)} answers, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s{f' -> {out}' if out else ''}")
    if cut > len(answers) / 2:
        say(f"{cut} of {len(answers)} answers were cut at {max_new_tokens} tokens; raise --max-new-tokens to see them end")


def _sampling(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, stop: list[str] | None
) -> Sampling:
    from tether.engines.sampling import Sampling

    return Sampling(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, tuple(stop or ()))


# -- chat --------------------------------------------------------------------------------------------------------------

COMMANDS = "/reset starts over, /save FILE keeps the conversation, /exit leaves; Ctrl-C stops a reply."


def chat(
    model: Model,
    system: System = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="Reply k of a conversation depends on the words so far and this.")] = 0,
    precision: Precision = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Talk to a model. /reset, /save FILE and /exit do what they say; works with piped input too."""
    sampling = _sampling(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
    from tether.answers import Speaker

    speaker = Speaker(model, precision=precision, slots=1, trust_remote_code=trust_remote_code)
    Chat(speaker, sampling, system=system, seed=seed).run(interactive=sys.stdin.isatty())


class Chat:
    """One conversation at a time. `read` gives the next line and raises EOFError at the end; `write` shows text as it comes."""

    def __init__(
        self,
        speaker: Speaker,
        sampling: Sampling,
        *,
        system: str | None = None,
        seed: int = 0,
        read: Callable[[str], str] = input,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self.speaker, self.sampling, self.system, self.seed = speaker, sampling, system, seed
        self.read, self.write = read, write or _to_stdout
        self.messages: list[Any] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def run(self, *, interactive: bool) -> None:
        _ = self.speaker.codec.template  # a model without one gets the built-in one, and its notice
        for notice in self.speaker.notices:
            say(notice)
        if interactive:
            say(COMMANDS)
        while True:
            try:
                line = self.read("> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    self.write("\n")
                return
            if not line:
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
                continue
            self.messages.append({"role": "user", "content": line})
            try:
                self._reply()
            except UserError as error:
                self.messages.pop()
                say(f"error: {error}")

    def _command(self, line: str) -> bool:
        """Do what a line that starts with a slash says; False to leave."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self.reset()
            say("started over")
        elif word == "/save":
            self._save(rest.strip())
        else:
            say(f"there is no command {word}; {COMMANDS} Put a blank before a slash that is meant as text.")
        return True

    def _save(self, name: str) -> None:
        """Add the conversation to a JSONL file that `tether sft` can read."""
        from tether import atomic

        if not name or not any(m["role"] == "assistant" for m in self.messages):
            say("name a file: /save talk.jsonl" if not name else "there is no reply yet")
            return
        path = Path(name).expanduser()
        try:
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            if before and not before.endswith("\n"):
                before += "\n"
            atomic.write_file(path, before + json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except (OSError, UnicodeDecodeError) as error:
            say(f"error: {path} cannot be written: {error}")
            return
        say(f"saved to {path}")

    def _reply(self) -> None:
        """Say the next turn while it is made; Ctrl-C keeps what was said so far."""
        from tether.engines.local import Request

        sampler, codec = self.speaker.sampler, self.speaker.codec
        prompt = codec.prompt_ids(self.messages)
        sampling = self.sampling
        if sampler.positions is not None and len(prompt) + sampling.max_new_tokens > sampler.positions:
            room = sampler.positions - len(prompt)
            if room < 1:
                raise UserError(f"the conversation fills the model's {sampler.positions} positions", remedy="/reset starts over.")
            sampling = replace(sampling, max_new_tokens=room)
        tokens: list[int] = []
        shown = ""

        def on_token(request: int, sample: int, token: int) -> None:
            nonlocal shown
            if token in sampler.end_ids:
                return
            tokens.append(token)
            text = codec.decode(tokens)
            # The bytes of a character may come in several tokens; half of one decodes to the replacement character.
            if text.startswith(shown) and not text.endswith("\ufffd"):
                self.write(text[len(shown) :])
                shown = text

        turn = sum(m["role"] == "user" for m in self.messages)
        try:
            completion = sampler.sample([Request(prompt, sampling, seed=f"{self.seed}/{turn}")], on_token)[0]
            said = completion.text or ""
            if completion.finish_reason != "stop_string" and said.startswith(shown):
                self.write(said[len(shown) :])
            if completion.finish_reason == "length":
                self.write(" [cut at the limit]")
        except KeyboardInterrupt:
            said = shown
            self.write(" [stopped]")
        self.write("\n")
        self.messages.append({"role": "assistant", "content": said})


def _to_stdout(text: str) -> None:
    print(text, end="", flush=True)
