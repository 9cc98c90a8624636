"""One engine in a child process, asked over pipes: a line of JSON in, a line of JSON out.

    parent: Worker(command) -- {"do": "decode", ...} --> child: serve(subject)
                            <-- {"seconds": [...]} ----

`python -m xjax_server.bench.offline.worker NAME MODEL SETTINGS` starts a subject by its name; SETTINGS is
a JSON object of what its class takes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from xjax.errors import EngineError, XjaxError
from xjax_server.bench.offline.llama_peer import LlamaPeer
from xjax_server.bench.offline.ours import OurEngine
from xjax_server.bench.offline.peers import LLAMA, TORCH
from xjax_server.bench.offline.torch_peer import TorchPeer

Prompts = Sequence[Sequence[int]]


class Subject(Protocol):
    """An engine as the benchmark sees it; token ids in, seconds out."""

    def describe(self) -> dict[str, Any]:
        """Sizes that the floor is computed from, and settings worth printing."""
        ...

    def check(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Greedy `ids` after a prompt, to see that engines compute the same; None: it cannot tell."""
        ...

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` [1] from a prompt to its first token."""
        ...

    def decode(self, prompts: Prompts, num_tokens: int) -> dict[str, Any]:
        """`seconds` of each step in which every row decodes."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def answer(subject: Subject, question: dict[str, Any]) -> dict[str, Any]:
    """Call what a question names."""
    do = question["do"]
    if do == "describe":
        return subject.describe()
    if do == "check":
        return subject.check(question["prompt"], question["num_tokens"])
    if do == "prefill":
        return subject.prefill(question["prompt"])
    if do == "decode":
        return subject.decode(question["prompts"], question["num_tokens"])
    if do == "serve" and isinstance(subject, OurEngine):
        return subject.serve(question["prompts"], question["num_tokens"], question["streams"])
    if do == "tune" and isinstance(subject, LlamaPeer):
        sizes = {name: question[name] for name in ("rows", "tokens", "context", "num_tokens")}
        return subject.tune(**sizes)
    raise EngineError(f"a benchmark worker knows no {do!r}")


def serve(subject: Any, answer: Callable[[Any, dict[str, Any]], dict[str, Any]] = answer) -> None:
    """Answer questions from standard input until it ends; whatever else prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(subject, json.loads(line))
        except XjaxError as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    subject.close()


class Worker:
    """The parent's end. Raises EngineError with the child's last line when it fails."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, encoding="utf-8"
        )

    @property
    def pid(self) -> int:
        """Number of the child."""
        return self._child.pid

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Put one question and wait for its answer."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **question}) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"{self.name} ended: {self._last_error()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self.name}: {reply['error']}")
        return reply

    def _last_error(self) -> str:
        self._child.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._child.returncode}"

    def close(self) -> None:
        """End the child and wait for it."""
        if self._child.stdin is not None:
            try:
                self._child.stdin.close()
            except BrokenPipeError:
                pass  # it ended by itself; `ask` said so
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._errors.close()


def command(name: str, model: str, **settings: Any) -> list[str]:
    """How to start a subject of this package with what its class takes."""
    return [sys.executable, "-m", "xjax_server.bench.offline.worker", name, model, json.dumps(settings)]


def main(arguments: Sequence[str]) -> None:
    """Make the subject that the arguments name and serve it."""
    name, model, settings = arguments
    makers: dict[str, Callable[..., Subject]] = {"xjax": OurEngine, TORCH: TorchPeer, LLAMA: LlamaPeer}
    serve(makers[name](model, **json.loads(settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
