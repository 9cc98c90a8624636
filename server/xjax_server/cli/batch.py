"""`xjax generate --input`: a JSONL file of requests to a JSONL file of results, in order.

    1  each input line gives one result line: answers, or the error in their place
    2  a result carries the index and a digest of its input line
    3  lines are appended in order and flushed one by one, so a killed run leaves complete
       lines and at most one cut line at the end
    4  the next run compares digests, drops the cut line and goes on behind the last result

Knows the engine only as `xjax.LLM`.
"""

import fcntl
import hashlib
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, cast

import xjax
from xjax.errors import LoadError, RequestError, XjaxError
from xjax.request import SamplingParams
from xjax_server.cli.results import error_object, result_object
from xjax_server.cli.terminal.console import ProgressBar, note, stats_line, write
from xjax_server.cli.terminal.options import Flags

# Requests handed over at once: enough to keep every row busy, few enough to hold in memory.
WINDOW = 1024
_SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams))
_DIGEST_CHARS = 16
_TOKEN_ID = re.compile(r"-?[0-9]{1,19}")

Message = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One input line: where it stands, what it asks, or why it cannot be asked."""

    index: int
    digest: str
    name: str | int | None = None  # the line's own "id"
    prompt: "str | list[int] | list[Message] | None" = None
    is_chat: bool = False
    params: SamplingParams | None = None
    error: XjaxError | None = None

    def line(self, found: dict[str, Any]) -> str:
        """The result line that holds `found`."""
        head: dict[str, Any] = {"index": self.index, "input": self.digest}
        if self.name is not None:
            head["id"] = self.name
        return json.dumps(head | found, ensure_ascii=False) + "\n"


def _digest(line: bytes) -> str:
    return hashlib.sha256(line.rstrip(b"\r\n")).hexdigest()[:_DIGEST_CHARS]


def _parse(line: bytes) -> dict[str, Any]:
    """The object of a line; raises RequestError for anything else."""
    if not line.strip():
        raise RequestError("the line is empty, expected a JSON object with a prompt or messages")
    try:
        found: object = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError("the line is not a JSON object with a prompt or messages")
    return cast("dict[str, Any]", found)


def _name(value: Any) -> str | int | None:
    """The line's own name, which its result repeats."""
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise RequestError("id: must be a text or a whole number", param="id")
    return value


def _sampling(fields_given: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(fields_given.keys() - _SAMPLING_FIELDS)
    if unknown:
        known = ", ".join(sorted(_SAMPLING_FIELDS | {"id", "messages", "prompt"}))
        raise RequestError(f"unknown field {unknown[0]!r}; known: {known}", param=unknown[0])
    bias = fields_given.get("logit_bias")
    if isinstance(bias, dict):  # JSON has text keys only
        pairs = cast("dict[str, Any]", bias).items()
        numbers = {int(key): value for key, value in pairs if _TOKEN_ID.fullmatch(key)}
        return fields_given | {"logit_bias": numbers if len(numbers) == len(pairs) else bias}
    return fields_given


def _wrap(
    body: dict[str, Any], system: str | None, raw: bool
) -> "tuple[str | list[int] | list[Message], bool]":
    """(prompt or messages, whether it is a chat) of a line."""
    prompt, messages = body.pop("prompt", None), body.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise RequestError('expected either "prompt" or "messages"', param="prompt")
    if messages is not None:
        if not isinstance(messages, list):
            raise RequestError("messages: must be a list of messages", param="messages")
        return cast("list[Message]", messages), True
    is_ids = isinstance(prompt, list) and all(type(item) is int for item in cast("list[Any]", prompt))
    if not isinstance(prompt, str) and not is_ids:
        raise RequestError('"prompt" must be a text or a list of token ids', param="prompt")
    if raw or is_ids:
        return cast("str | list[int]", prompt), False
    front: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    return [*front, {"role": "user", "content": prompt}], True


def make_job(
    index: int, line: bytes, flags: Flags, *, defaults: dict[str, Any], system: str | None, raw: bool
) -> Job:
    """Read one input line; a bad one gives a job with an error."""
    digest, name = _digest(line), None
    try:
        body = _parse(line)
        name = _name(body.pop("id", None))
        prompt, is_chat = _wrap(body, system, raw)
        params = flags.params(defaults, **_sampling(body))
    except RequestError as error:
        return Job(index, digest, name, error=error)
    return Job(index, digest, name, prompt, is_chat, params)


def _read_lines(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as file:
            yield from file
    except OSError as error:
        raise LoadError(f"cannot read {source}: {error.strerror}") from error


def count_results(source: Path, output: Path) -> tuple[int, int]:
    """(results, bytes) that a started output holds in complete lines; raises LoadError.

    Every result is compared with its input line, so that results of another file are never
    continued, nor is a file that holds something else cut.
    """
    if not output.exists():
        return 0, 0
    num_results = num_bytes = 0
    inputs = _read_lines(source)
    for line in _read_lines(output):
        if not line.endswith(b"\n"):
            if not line.startswith(b'{"index": '[: len(line)]):
                raise LoadError(f"{output} is no file of results; choose another --output")
            break
        expected = next(inputs, None)
        try:
            found: Any = json.loads(line)
            is_ours = (
                found["index"] == num_results and expected is not None and found["input"] == _digest(expected)
            )
        except (ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            raise LoadError(
                f"line {num_results + 1} of {output} is no result of that line of {source}; "
                "choose another --output or remove it"
            )
        num_results, num_bytes = num_results + 1, num_bytes + len(line)
    return num_results, num_bytes


class Work:
    """An input file and what is done of it; raises LoadError when they do not fit."""

    def __init__(self, source: Path, output: Path | None) -> None:
        # It is read twice, so that progress has a total and a killed run can go on.
        if source.exists() and not (source.is_file() or source.is_dir()):
            raise LoadError(
                f"{source} is no regular file; --input is read more than once, so save it to a file"
            )
        if output is not None and output.exists() and not (output.is_file() or output.is_dir()):
            raise LoadError(f"{output} is no regular file; without --output results go to standard output")
        if output is not None and output.exists() and source.exists() and output.samefile(source):
            raise LoadError("--output is the file of --input; choose another one")
        self.source, self.output = source, output
        self.num_inputs = sum(1 for _ in _read_lines(source))
        self.num_done, self._num_bytes = (0, 0) if output is None else count_results(source, output)

    @property
    def is_finished(self) -> bool:
        """Whether every input has its result already."""
        return self.num_done == self.num_inputs and (self.output is not None or not self.num_inputs)

    def windows(self) -> Iterator[list[tuple[int, bytes]]]:
        """Lines still to do, with their indexes, WINDOW at a time."""
        lines = islice(enumerate(_read_lines(self.source)), self.num_done, None)
        while window := list(islice(lines, WINDOW)):
            yield window

    def open_results(self) -> "ResultWriter":
        """Open the output behind its last complete line; raises LoadError when another run writes it."""
        if self.output is None:
            return ResultWriter(None, self.num_done)
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            file = self.output.open("ab")
        except OSError as error:
            raise LoadError(f"cannot write {self.output}: {error.strerror}") from error
        try:
            self._claim(file)
        except BaseException:
            file.close()
            raise
        return ResultWriter(file, self.num_done)

    def _claim(self, file: IO[bytes]) -> None:
        assert self.output is not None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It was read before the model was loaded.
            if count_results(self.source, self.output) != (self.num_done, self._num_bytes):
                raise LoadError(f"{self.output} has changed since this run began; start it again")
            file.truncate(self._num_bytes)
        except BlockingIOError as error:
            raise LoadError(f"{self.output} is being written by another run") from error
        except OSError as error:
            raise LoadError(f"cannot write {self.output}: {error.strerror}") from error


class ResultWriter:
    """Takes result lines in any order and appends them in theirs, each flushed."""

    def __init__(self, file: IO[bytes] | None, next_index: int) -> None:
        self._file = file
        self._waiting: dict[int, str] = {}
        self._began = time.monotonic()
        self._usage: Counter[str] = Counter()
        self._first_tokens: list[float] = []
        self.next_index = next_index
        self.num_errors = 0

    def __enter__(self) -> "ResultWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as failure:  # what could not be written is tried once more, and may be known already
            if error is None:
                raise LoadError(f"cannot write the results: {failure.strerror}") from failure

    def put(self, job: Job, found: dict[str, Any]) -> None:
        """Take the result of a job."""
        self.num_errors += "error" in found
        self._usage.update(found.get("usage", {}))
        first = found.get("metrics", {}).get("first_token_seconds")
        self._first_tokens += [] if first is None else [first]
        self._waiting[job.index] = job.line(found)
        while (line := self._waiting.pop(self.next_index, None)) is not None:
            self._append(line)
            self.next_index += 1

    def stats_line(self) -> str:
        """What this run came to: the median TTFT, and all new tokens over all of its time."""
        new = self._usage["completion_tokens"]
        return stats_line(
            ttft=statistics.median(self._first_tokens) if self._first_tokens else None,
            speed=new / (time.monotonic() - self._began) if new else None,
            prompt=self._usage["prompt_tokens"],
            cached=self._usage["cached_tokens"],
            new=new,
        )

    def _append(self, line: str) -> None:
        if self._file is None:
            write(line)
            return
        try:
            self._file.write(line.encode("utf-8", errors="replace"))
            self._file.flush()
        except OSError as error:
            raise LoadError(f"cannot write the results: {error.strerror}") from error


def _ask(llm: "xjax.LLM", jobs: list[Job], results: ResultWriter, progress: ProgressBar, total: int) -> None:
    """Run jobs of one kind through the engine; results are written on this thread.

    The engine's output thread only hands them over: a full disk or a closed pipe must end
    this program, not that thread.
    """
    done: SimpleQueue[tuple[int, xjax.RequestOutput] | None] = SimpleQueue()

    def hand_over(position: int, result: "xjax.RequestOutput") -> None:
        done.put((position, result))

    prompts: Any = [job.prompt for job in jobs]
    params = [job.params for job in jobs if job.params is not None]
    ask: Callable[..., list[xjax.RequestOutput]] = llm.chat if jobs[0].is_chat else llm.generate
    pool = ThreadPoolExecutor(1)
    future = pool.submit(ask, prompts, params, on_result=hand_over)
    future.add_done_callback(lambda _: done.put(None))
    pool.shutdown(wait=False)
    try:
        while (item := done.get()) is not None:
            results.put(jobs[item[0]], result_object(item[1]))
            progress("answering requests", results.next_index, total)
    except KeyboardInterrupt:
        while not done.empty() and (item := done.get()) is not None:  # answers that were there already
            results.put(jobs[item[0]], result_object(item[1]))
        raise
    future.result()  # raises what the call raised


def run(
    llm: "xjax.LLM", work: Work, flags: Flags, *, system: str | None, raw: bool, progress: ProgressBar
) -> None:
    """Answer every line that has no result yet."""
    defaults = dict(llm.generation_defaults)
    if work.num_done:
        note(f"xjax: going on behind {work.num_done} results")
    with work.open_results() as results:
        for window in work.windows():
            jobs = [
                make_job(index, line, flags, defaults=defaults, system=system, raw=raw)
                for index, line in window
            ]
            for job in jobs:
                if job.error is not None:
                    results.put(job, {"error": error_object(job.error)})
            for is_chat in (True, False):
                same = [job for job in jobs if job.error is None and job.is_chat == is_chat]
                if same:
                    _ask(llm, same, results, progress, work.num_inputs)
        if results.num_errors:
            note(f"xjax: {results.num_errors} of {work.num_inputs} requests failed; see their results")
        note(results.stats_line())
