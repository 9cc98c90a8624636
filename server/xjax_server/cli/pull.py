"""`xjax pull`: bring a model here, so that later commands need no network."""

from typing import Annotated

import typer

from xjax.checkpoints import hub
from xjax.config import cache_home
from xjax_server.cli.terminal.console import ProgressBar, write


def pull(
    name: Annotated[
        str | None,
        typer.Argument(help="user/repo, user/repo:Q4_K_M or user/repo/file.gguf; none: the default model"),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="branch, tag or commit")] = None,
) -> None:
    """Download a model and print where it lies."""
    with ProgressBar() as progress:
        path = hub.pull(
            name,
            revision=revision,
            cache_dir=cache_home(),
            progress=lambda done, total, label: progress(label, done, total),
        )
    write(f"{path}\n")
