"""The command line, one command a file; `main` is what the script `xjax` calls."""

from xjax_server.cli.app import main

__all__ = ["main"]
