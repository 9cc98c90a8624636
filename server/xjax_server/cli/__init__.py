"""The command line, one command a file; `main` is what the script `xjax` calls."""

from xjax_server.interrupts import ending_at_once

with ending_at_once():
    from xjax_server.cli.app import main

__all__ = ["main"]
