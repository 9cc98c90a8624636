"""Write the tables in docs/ that are made from the code; the tests compare them with the files.

scripts/write_docs.py          write docs/options.md and docs/commands.md
"""

import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from typer.main import get_command

from xjax.config import EngineOptions
from xjax.request import SamplingParams
from xjax_server.cli.app import app
from xjax_server.cli.options import HIDDEN_ENGINE_OPTIONS, SAMPLING_FLAGS, SAMPLING_HELP, flag

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- made by scripts/write_docs.py; edit the code and run it again -->\n\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return _row(head) + _row("---" for _ in head) + "".join(_row(row) for row in rows)


def _default(item: "Field[Any]") -> str:
    if item.default_factory is not MISSING:
        return "none"
    if item.default in (None, ()):
        return "none"
    return f"`{item.default}`".lower() if isinstance(item.default, bool) else f"`{item.default}`"


def _engine_rows() -> Iterable[list[str]]:
    for item in fields(EngineOptions):
        aliases = ", ".join(f"`{flag(alias)}`" for alias in item.metadata.get("aliases", ()))
        # Where the platform decides, the help says how, behind these words.
        text, _, decided = item.metadata["help"].partition("; default: ")
        if "choices" in item.metadata:
            text += f" ({', '.join(item.metadata['choices'])})"
        is_python = item.name in HIDDEN_ENGINE_OPTIONS
        name = f"`{item.name}` (Python only)" if is_python else f"`{flag(item.name)}`"
        default = decided if item.default is None else f"`{item.default}`"
        yield [name, aliases, default, text]


def _sampling_rows() -> Iterable[list[str]]:
    for item in fields(SamplingParams):
        spelled = f"`{flag(item.name)}`" if item.name in SAMPLING_FLAGS else ""
        yield [f"`{item.name}`", spelled, _default(item), SAMPLING_HELP[item.name]]


def options_page() -> str:
    """Text of docs/options.md: every option with its default."""
    return (
        "# Options\n\n" + NOTE + "## Engine\n\n"
        "Flags of `xjax generate` and `xjax chat`; keyword arguments of `xjax.LLM` under the same names "
        "with underscores, which the command line takes too.\n\n"
        + _table(["option", "also", "default", "meaning"], _engine_rows())
        + "\n## Sampling\n\n"
        "Fields of `xjax.SamplingParams` and of a line of `--input`. On the command line the model's own "
        "`generation_config.json` comes before these defaults, unless `--generation-config none`.\n\n"
        + _table(["field", "flag", "default", "meaning"], _sampling_rows())
        + "\n## Environment\n\n"
        + _table(
            ["variable", "meaning"],
            [
                [
                    "`XJAX_HOME`",
                    "folder of models, compiled programs and tokenizers; default: `xjax` in the cache folder",
                ],
                ["`XDG_CACHE_HOME`", "the cache folder; default: `~/.cache`"],
                ["`XJAX_API_KEY`", "key that `xjax serve` asks for, beside those of `--api-key`"],
                ["`HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_HUB_CACHE`", "read by huggingface_hub, as everywhere"],
            ],
        )
    )


def _commands(group: Any, before: str = "") -> Iterable[tuple[str, Any]]:
    """Commands with their whole names; a command that has commands of its own stands as those."""
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from _commands(command, f"{before}{name} ") if inner else [(before + name, command)]


def commands_page() -> str:
    """Text of docs/commands.md: every command with its own flags."""
    program: Any = get_command(app)
    text = "# Commands\n\n" + NOTE
    rows = [[f"`{', '.join(item.opts)}`", item.help] for item in program.params]
    text += _table(["before the command", "meaning"], rows) + "\n"
    for name, command in _commands(program):
        rows, has_shared = [], False
        for item in command.params:
            # A command may have a flag of its own under a name that others share.
            is_shared = getattr(item, "rich_help_panel", None) in ("Sampling", "Engine")
            has_shared = has_shared or is_shared
            if not is_shared and not getattr(item, "hidden", False):
                spelled = (
                    ", ".join(item.opts)
                    if item.opts[0].startswith("-")
                    else item.metavar or item.name.upper()
                )
                rows.append([f"`{spelled}`", item.help or ""])
        text += f"## xjax {name}\n\n{(command.help or '').strip()}\n\n"
        if rows:
            text += _table(["argument", "meaning"], rows) + "\n"
        if has_shared:
            text += "Sampling and engine flags: [options.md](options.md).\n\n"
    return text.rstrip("\n") + "\n"


PAGES = {"options.md": options_page, "commands.md": commands_page}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
