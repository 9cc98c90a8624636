"""Load one model and tell on standard output how long it took and what memory: bench_load.py PATH DTYPE

Imports, the start of JAX and opening the files come before the clock; `peak_bytes` is of the whole
process, `before_bytes` what it held when the clock started.
"""

import json
import resource
import sys
import time
from pathlib import Path

import jax

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine.build import load_model


def resident(name: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most; the system's count of the peak elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(path: str, dtype: str) -> None:
    """Load and tell."""
    jax.block_until_ready(jax.numpy.zeros(8))
    checkpoint = open_checkpoint(Path(path))
    before, began, work = resident("VmRSS"), time.perf_counter(), time.process_time()
    leaves = jax.tree.leaves(jax.block_until_ready(load_model(checkpoint, dtype=dtype).params))
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - began,
                "work_seconds": time.process_time() - work,
                "peak_bytes": resident("VmHWM"),
                "before_bytes": before,
                "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
                "largest_bytes": max(leaf.nbytes for leaf in leaves),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
