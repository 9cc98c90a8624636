"""Start-up as a user sees it: `xjax generate` from command to first byte of the answer, and its memory.

A start is cold with an empty XJAX_HOME (nothing compiled, no vocabulary rebuilt) and warm when
another start has filled it. The model file itself is there in both cases.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xjax.errors import EngineError


@dataclass(frozen=True)
class Start:
    """One run of the command: seconds to the first byte and to the end, peak resident bytes.

    The system lets a child begin with the peak of its parent, so a peak below ours cannot be seen.
    """

    first_seconds: float
    total_seconds: float
    peak_bytes: int


def generate_command(
    model: str, prompt: str, *, threads: int, num_tokens: int, kernels: str = "auto"
) -> list[str]:
    """The command that is measured; every option not named here is at its default."""
    program = "import sys; from xjax_server.cli import main; sys.exit(main())"
    flags = ["--threads", str(threads), "--max-tokens", str(num_tokens), "--temperature", "0"]
    if kernels != "auto":
        flags += ["--kernels", kernels]
    return [sys.executable, "-c", program, "generate", "--model", model, *flags, prompt]


def time_start(command: Sequence[str], home: Path) -> Start:
    """Run a command that answers on standard output. Raises EngineError with its last line if it fails."""
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "XJAX_HOME": str(home)}
        )
        assert child.stdout is not None
        first = child.stdout.read(1)
        first_seconds = time.perf_counter() - began
        child.stdout.read()
        # wait4 alone tells the peak of this very child.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        child.stdout.close()
        total = time.perf_counter() - began
        if child.returncode or not first:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            raise EngineError(f"generate ended with code {child.returncode}: {lines[-1]}")
    scale = 1 if sys.platform == "darwin" else 1024
    return Start(first_seconds, total, usage.ru_maxrss * scale)
