"""`xjax generate`: one prompt, streamed to standard output, or a file of prompts.

The prompt is the argument or standard input. With a chat template it becomes one user message;
without one, or with --raw, it is sent as it is.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

import xjax
from xjax.errors import RequestError
from xjax_server.cli import batch
from xjax_server.cli.results import result_object
from xjax_server.cli.terminal.console import ProgressBar, note, stats_line, write
from xjax_server.cli.terminal.options import Flags, takes_engine_flags

Message = dict[str, Any]


def _decode(argument: str) -> str:
    """An argument as UTF-8, whatever the locale took its bytes for."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError as error:
        raise RequestError("the prompt is not UTF-8 text", param="prompt") from error


def read_prompt(argument: str | None, *, keep_newline: bool) -> str:
    """The prompt argument, or standard input for none and for "-"; raises RequestError.

    `echo` ends its line for the terminal's sake: one final newline of standard input is
    dropped unless `keep_newline`.
    """
    if argument is not None and argument != "-":
        text = _decode(argument)
    else:
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise RequestError("no prompt is given and standard input is closed", param="prompt")
        if sys.stdin.isatty():
            note("xjax: reading the prompt from the terminal; Ctrl-D on an empty line ends it")
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text: {error}", param="prompt") from error
        if not keep_newline:
            text = text.removesuffix("\n")
    if not text:
        raise RequestError("the prompt is empty; give it as an argument or on standard input", param="prompt")
    return text


@dataclass
class Tally:
    """Counts and times of one streamed answer, for its last line."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    num_new: int = 0
    num_prompt: int = 0
    num_cached: int = 0

    def add(self, chunk: "xjax.StreamChunk") -> None:
        """Count one chunk."""
        if chunk.token_ids:
            self.last = time.monotonic()
            if self.first is None:
                self.first = self.last
        self.num_new += len(chunk.token_ids)
        self.num_prompt = chunk.num_prompt_tokens
        self.num_cached = chunk.num_cached_tokens

    def line(self) -> str:
        """The line that `xjax generate` ends with."""
        ttft = self.first - self.started if self.first is not None else None
        speed = None
        if self.first is not None and self.last is not None and self.last > self.first:
            speed = (self.num_new - 1) / (self.last - self.first)
        return stats_line(
            ttft=ttft, speed=speed, prompt=self.num_prompt, cached=self.num_cached, new=self.num_new
        )


def stream_answer(chunks: "Iterator[xjax.StreamChunk]", tally: Tally) -> Iterator[str]:
    """Text of the chunks, each counted."""
    for chunk in chunks:
        tally.add(chunk)
        if chunk.text:
            yield chunk.text


def _check_usage(
    prompt: str | None, source: Path | None, output: Path | None, flags: Flags, as_json: bool
) -> None:
    """Refuse flags that do not go together before a model is loaded."""
    if source is not None and prompt is not None:
        raise typer.BadParameter("give a prompt or --input, not both")
    if output is not None and source is None:
        raise typer.BadParameter("--output needs --input; a single answer goes to standard output")
    if "logprobs" in flags.sampling and not as_json and source is None:
        raise typer.BadParameter("--logprobs are shown with --json or in the results of --input")


def _messages(prompt: str, system: str | None) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def _sends_raw(llm: "xjax.LLM", raw: bool, system: str | None) -> bool:
    """Whether prompts go to the model as they are; raises RequestError for a system text then."""
    is_raw = raw or not llm.has_chat_template
    if is_raw and system is not None:
        reason = "with --raw" if raw else "since this model has no chat template (see --chat-template)"
        raise RequestError(f"--system cannot be used {reason}", param="system")
    return is_raw


def _print_answers(result: "xjax.RequestOutput") -> None:
    for output in result.outputs:
        write(("---\n" if output.index else "") + output.text + ("" if output.text.endswith("\n") else "\n"))


def _note_stats(result: "xjax.RequestOutput") -> None:
    line = stats_line(
        ttft=result.metrics.first_token_seconds,
        speed=result.metrics.tokens_per_second,
        prompt=len(result.prompt_token_ids),
        cached=result.num_cached_tokens,
        new=result.metrics.num_output_tokens,
    )
    note(line)


def _stream_one(
    llm: "xjax.LLM", prompt: "str | list[Message]", params: "xjax.SamplingParams", progress: ProgressBar
) -> None:
    tally, ends_line = Tally(), True
    try:
        for text in stream_answer(llm.stream(prompt, params), tally):
            progress.pause()
            ends_line = text.endswith("\n")
            write(text)
    finally:
        progress.pause()
        if not ends_line:
            write("\n")
    note(tally.line())


def _answer_one(
    llm: "xjax.LLM",
    prompt: str,
    flags: Flags,
    progress: ProgressBar,
    *,
    system: str | None,
    raw: bool,
    as_json: bool,
) -> None:
    is_raw = _sends_raw(llm, raw, system)
    params = flags.params(llm.generation_defaults)
    if not as_json and params.n == 1:
        _stream_one(llm, prompt if is_raw else _messages(prompt, system), params, progress)
        return
    results = llm.generate(prompt, params) if is_raw else llm.chat(_messages(prompt, system), params)
    progress.pause()
    if results[0].error is not None:
        raise results[0].error
    if as_json:
        write(json.dumps({"prompt": prompt, **result_object(results[0])}, ensure_ascii=False) + "\n")
    else:
        _print_answers(results[0])
    _note_stats(results[0])


@takes_engine_flags
def generate(
    prompt: Annotated[str | None, typer.Argument(help="the prompt; none or -: standard input")] = None,
    source: Annotated[Path | None, typer.Option("--input", help="JSONL file, one request a line")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="JSONL file for the results; a started one is continued")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", metavar="", help="send the prompt as it is, without a chat template")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="print one JSON object instead of text")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", help="system message before the prompt")] = None,
    *,
    flags: Flags,
) -> None:
    """Answer one prompt, or every line of a JSONL file.

    The answer goes to standard output, everything else to standard error.
    """
    _check_usage(prompt, source, output, flags, as_json)
    flags.params({})
    if source is None:
        text = read_prompt(prompt, keep_newline=raw)
        with ProgressBar() as progress, flags.running(progress, num_prompts=1) as llm:
            _answer_one(llm, text, flags, progress, system=system, raw=raw, as_json=as_json)
        return
    work = batch.Work(source, output)
    with ProgressBar() as progress:
        if work.is_finished:
            note(f"xjax: {output} already holds all {work.num_inputs} results")
            return
        with flags.running(progress, num_prompts=work.num_inputs) as llm:
            is_raw = _sends_raw(llm, raw, system)
            batch.run(llm, work, flags, system=system, raw=is_raw, progress=progress)
