"""Ctrl-C where Python's own way with it fails: in the middle of imports, and beside a busy compiler.

Knows no command. It is imported before anything that takes time, so it imports nothing that does.
"""

import contextlib
import signal
import threading
from collections.abc import Generator

_UNSTOPPABLE = ("xjax-compile", "xjax-kernels")  # names of threads that are inside a compiler


@contextlib.contextmanager
def ending_at_once() -> Generator[None]:
    """Let Ctrl-C end the process while modules are imported; a shell reports 130.

    An exception raised inside the import of an extension module may be lost, or come out as an
    ImportError. Where Ctrl-C is ignored, or somebody else's, nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_compiling() -> bool:
    """Whether a thread is inside a compiler: it cannot be stopped, and the interpreter waits for it."""
    return any(thread.name.startswith(_UNSTOPPABLE) for thread in threading.enumerate())


def was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what an exception began with."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
