"""Every exception that xjax raises on purpose.

    XjaxError
      RequestError      the caller's fault; carries `code` and `param`
      CapacityError     right but not now; carries `retry_after`
      LoadError         start-up; the process prints one line and exits 2
      EngineError       our fault; the batch fails, the engine lives

Foreign errors are translated into one of these where the library is called, with
`raise ... from`. `assert` guards our own invariants and is not part of this tree.
This module knows no HTTP: the table that maps a class to a status lives in the server.
"""


class XjaxError(Exception):
    """Root of the tree; its text is one line that a user can act on, whatever a file put into it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_as_line(message))


def _as_line(text: str) -> str:
    """Escape what would end the line or drive a terminal: names in a file may hold any character."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class RequestError(XjaxError):
    """A request that cannot be served as it is.

    code    machine-readable reason, e.g. "context_length_exceeded"
    param   name of the field at fault, or None
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


class CapacityError(XjaxError):
    """A request that is right but cannot be taken now; `retry_after` in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class LoadError(XjaxError):
    """A model, file or setting with which the engine cannot start."""


class EngineError(XjaxError):
    """A failure of the engine itself while it served a request."""
