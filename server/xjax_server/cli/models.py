"""`xjax models`: what is on this machine."""

from rich.console import Console
from rich.table import Table

from xjax.checkpoints import hub
from xjax.config import cache_home
from xjax_server.cli.terminal.console import note, write


def models() -> None:
    """List the models that were pulled."""
    entries = hub.list_models(cache_home())
    if not entries:
        note("xjax: no models here yet; `xjax pull NAME` brings one")
        return
    table = Table("name", "kind", "size", "path", box=None, pad_edge=False)
    for entry in entries:
        table.add_row(entry.name, entry.kind, f"{entry.size / 1e6:.0f} MB", str(entry.path))
    # A path is for copying: it is never cut or wrapped.
    console = Console(width=10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
