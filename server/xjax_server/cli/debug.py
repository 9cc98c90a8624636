"""`xjax debug`: looking into what a model brings along. No weights are read and nothing is computed.

debug template   where a chat's next turn parts from the pages of the last one
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="debug", help="Look into what a model brings along.")


@app.callback(invoke_without_command=True)
def _debug(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    if context.invoked_subcommand is None:
        raise typer.BadParameter("name what to look into: template")


@app.command("template")
def template(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="folder, file or name; none: the default model")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="branch, tag or commit of a model that is downloaded")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", help="file with a template that replaces the model's own"),
    ] = None,
    template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--template-kwargs", help='variables of the template, as JSON: {"enable_thinking": false}'
        ),
    ] = None,
    thoughts: Annotated[
        str | None,
        typer.Option(
            "--thoughts", help="what the model thinks first; default: a line, if the template knows thoughts"
        ),
    ] = None,
    page_size: Annotated[
        int,
        typer.Option("--page-size", "--block-size", help="tokens in a page; default: 16, as on CPU", min=1),
    ] = 16,
) -> None:
    """Show how much of a chat's first turn the next one finds in pages, and where the template parts from it.

    The template renders a question, then question, answer and another question. The answers are made up.
    """
    from xjax_server.cli.terminal.divergence import show

    show(model, revision, chat_template, template_kwargs, thoughts=thoughts, page_size=page_size)
