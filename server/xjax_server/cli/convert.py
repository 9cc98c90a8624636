"""`xjax convert`: save a model in xjax's own form."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import xjax
from xjax_server.cli.terminal.console import ProgressBar, set_up_logging, write
from xjax_server.interrupts import ending_at_once


def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="folder, file, user/repo, user/repo:Q4_K_M, user/repo/file.gguf or a name of `xjax models`"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="folder to write, which is then a model like any other")],
    revision: Annotated[
        str | None, typer.Option("--revision", help="branch, tag or commit of a model that is downloaded")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="of weights that are not codes; auto: float32 on CPU, else bfloat16"),
    ] = "auto",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", "--force", metavar="", help="replace a converted model that is there"),
    ] = False,
) -> None:
    """Save a model in xjax's own form and print where it lies.

    Weights, tokenizer, chat template and sampling defaults, in one folder that every command takes as
    a model.
    """
    set_up_logging(False)
    with ending_at_once():
        make = xjax.convert  # brings JAX
    with ProgressBar() as progress:
        path = make(model, out, revision=revision, dtype=dtype, overwrite=overwrite, progress=progress)
    write(f"{path}\n")
