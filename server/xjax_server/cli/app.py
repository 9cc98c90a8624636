"""The program `xjax`: its commands, and the one place where an error becomes a line and an exit code.

    0     done
    1     a defect of ours; --debug shows its trace
    2     wrong usage, or an error that the line explains
    130   Ctrl-C
    141   the reader of our output went away

Knows no model and no engine; the commands reach them through the lazy names of `xjax`.
"""

import contextlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.main import get_command

import xjax
from xjax.errors import XjaxError
from xjax_server.cli import bench, chat, convert, debug, generate, models, pull, serve
from xjax_server.cli.terminal.console import PIPE_CLOSED, drop, flush, print_error, set_up_streams, write
from xjax_server.interrupts import is_compiling, was_interrupted

INTERRUPTED = 130  # as a shell reports a program that SIGINT ended

app = typer.Typer(
    name="xjax",
    help="LLM inference compiled by JAX and XLA.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("pull")(pull.pull)
app.command("models")(models.models)
app.command("convert")(convert.convert)
app.add_typer(bench.app, name="bench")
app.add_typer(debug.app, name="debug")


@app.callback(invoke_without_command=True)
def _program(  # pyright: ignore[reportUnusedFunction]
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the trace of an error.")] = False,
) -> None:
    if version:
        write(f"xjax {xjax.__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


def _known_flags() -> set[str]:
    found: list[Any] = [get_command(app)]
    for command in found:  # grows while it is gone through: commands may have commands
        found += getattr(command, "commands", {}).values()
    return {flag for command in found for param in command.params for flag in param.opts}


def normalize(arguments: list[str]) -> list[str]:
    """Spell known flags with dashes: `--max_model_len=8` becomes `--max-model-len=8`."""
    known = _known_flags()
    out: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return out + arguments[position:]
        name, equals, value = argument.partition("=")
        dashed = name.replace("_", "-")
        out.append(dashed + equals + value if name.startswith("--") and dashed in known else argument)
    return out


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Take `--debug` out, wherever it stands before a lone `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    front = [argument for argument in arguments[:end] if argument != "--debug"]
    return front + arguments[end:], len(front) < end


def _usage_line(error: typer.TyperException) -> str:
    """What is wrong with the arguments, and where the right ones are listed."""
    context: typer.Context | None = getattr(error, "ctx", None)
    text = error.format_message().removeprefix("Invalid value: ").removesuffix(".")
    return f"{text} (see `{context.command_path} --help`)" if context is not None else text


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = get_command(app).main(arguments, prog_name="xjax", standalone_mode=False)
        flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:  # while help was printed
        drop(sys.stdout)
        return PIPE_CLOSED
    except typer.TyperException as error:
        print_error(_usage_line(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except XjaxError as error:
        if debug:
            traceback.print_exc()
        print_error(str(error))
        return 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; prints one line for an error, never a trace.

    Without arguments those of the program are taken, and Ctrl-C does not wait for the compiler.
    """
    try:
        code = _checked(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if arguments is None and code == INTERRUPTED and is_compiling():
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]
                with contextlib.suppress(OSError):
                    stream.flush()
        os._exit(INTERRUPTED)
    return code


def _checked(arguments: list[str]) -> int:
    set_up_streams()
    given, debug = _take_debug(arguments)
    try:
        return _run(normalize(given), debug)
    except Exception as error:  # noqa: BLE001
        if was_interrupted(error):
            return INTERRUPTED
        if debug:
            traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        hint = "" if debug else " (--debug shows the trace)"
        print_error(f"unexpected {type(error).__name__}: {first}{hint}")
        return 1
