"""`xjax chat`: a conversation in the terminal; each turn sends the whole history.

Ctrl-C stops the answer and keeps the chat, with what was said so far; Ctrl-D leaves.
"""

import contextlib
import signal
import sys
from collections.abc import Generator
from typing import Annotated, Any

import typer

import xjax
from xjax.errors import EngineError, RequestError, XjaxError
from xjax_server.cli.generate import Tally, stream_answer
from xjax_server.cli.terminal.console import ProgressBar, note, print_error, write
from xjax_server.cli.terminal.options import Flags, takes_engine_flags

with contextlib.suppress(ImportError):  # gives input() line editing and history, where it exists
    import readline as _  # noqa: F401

HELP = """/system TEXT   set the system message; without TEXT: show it
/clear         forget the conversation
/exit          leave, as Ctrl-D does
Ctrl-C         stop the answer"""

Message = dict[str, Any]


@contextlib.contextmanager
def _uninterrupted() -> Generator[None]:
    """Ignore Ctrl-C while something is put in order."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages so far and how to continue them."""

    def __init__(
        self, llm: "xjax.LLM", params: "xjax.SamplingParams", system: str | None, progress: ProgressBar
    ) -> None:
        self._llm = llm
        self._progress = progress
        self._params = params
        self.system = system
        self.messages: list[Message] = []

    def ask(self, text: str) -> None:
        """Send one user message and print the answer as it comes.

        The turn enters the history with what was said until it ended or was stopped; one that
        failed or said nothing does not.
        """
        front: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        tally, pieces, is_stopped = Tally(), list[str](), False
        failure: EngineError | None = None
        chunks = self._llm.stream(front + turn, self._params)
        self._progress.resume()  # the first answer may wait for a program to be compiled
        try:
            for piece in stream_answer(chunks, tally):
                self._progress.pause()
                pieces.append(piece)
                write(piece)
        except KeyboardInterrupt:
            is_stopped = True
        except EngineError as error:  # this answer's step failed; a dead engine refuses the next turn
            failure = error
        finally:
            with _uninterrupted():
                self._progress.pause()
                chunks.close()
                if pieces:
                    write("\n")
        if failure is not None:
            print_error(str(failure))
            return
        answer = "".join(pieces)
        if answer:
            self.messages = [*turn, {"role": "assistant", "content": answer}]
        note("xjax: stopped" if is_stopped else tally.line())


def _command(conversation: Conversation, line: str) -> bool:
    """Carry out a line that starts with a slash; False when it ends the chat."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/clear":
        conversation.messages = []
        note("xjax: conversation forgotten")
    elif word == "/system":
        if rest.strip():
            conversation.system = rest.strip()
        note(f"xjax: system message: {conversation.system or 'none'}")
    else:
        note(HELP)
    return True


def _read_line() -> str | None:
    """One line from the user, None at the end; Ctrl-C gives an empty line."""
    try:
        return input(">>> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            write("\n")
        return None
    except KeyboardInterrupt:
        write("\n")
        return ""
    except UnicodeDecodeError as error:
        raise RequestError(f"the input is not text: {error}") from error


def _converse(conversation: Conversation) -> None:
    while (line := _read_line()) is not None:
        if line.startswith("/"):
            if not _command(conversation, line):
                return
        elif line.strip():
            try:
                conversation.ask(line)
            except EngineError:
                raise
            except XjaxError as error:
                print_error(str(error))


@takes_engine_flags
def chat(
    system: Annotated[str | None, typer.Option("--system", help="system message of the conversation")] = None,
    *,
    flags: Flags,
) -> None:
    """Talk with a model in the terminal: Ctrl-C stops an answer, Ctrl-D leaves."""
    for name in ("n", "logprobs"):
        if name in flags.sampling:
            raise typer.BadParameter(f"--{name} cannot be used in a chat")
    flags.params({})
    with ProgressBar() as progress, flags.running(progress, num_prompts=1) as llm:
        progress.pause()
        if not llm.has_chat_template:
            raise RequestError(
                "this model has no chat template: use `xjax generate --raw`, "
                "or name a template with --chat-template FILE"
            )
        note("xjax: /help lists the commands")
        _converse(Conversation(llm, flags.params(llm.generation_defaults), system, progress))
