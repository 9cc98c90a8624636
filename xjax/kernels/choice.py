"""What a step computes with where the user leaves it open: kernels and dtype. Knows no kernel."""

import functools
import importlib.util
import logging
import os
import platform as machine

from xjax.errors import LoadError

_log = logging.getLogger(__name__)


def choose_dtype(dtype: str, platform: str) -> str:
    """Name the dtype of weights and activations for an option and a platform."""
    if dtype != "auto":
        return dtype
    return "float32" if platform == "cpu" else "bfloat16"


def choose(kernels: str, platform: str, num_devices: int = 1) -> str:
    """Name the backend for an option, a platform ("cpu", "gpu", "tpu") and how many devices share a model.

    "auto" takes Numba's kernels on a CPU that they are fast on, where it is one device. XLA's own
    operations are "xla" on a CPU and "accelerator" elsewhere, where other forms of them are fast.
    Raises LoadError for kernels that cannot run here.
    """
    if kernels == "xla" or (kernels == "auto" and (platform != "cpu" or num_devices > 1)):
        return "xla" if platform == "cpu" else "accelerator"
    if num_devices > 1:
        raise LoadError(f"--kernels {kernels} is for one device: with --tensor-parallel take --kernels xla")
    if platform != "cpu":
        raise LoadError(f"--kernels {kernels} is for CPUs; this device is a {platform}: take --kernels xla")
    lack = _lack()
    if kernels == "auto":
        if lack:
            _log.info("kernels: xla, since %s", lack)
        return "xla" if lack else "numba"
    if lack.startswith(_MISSING) or os.name != "posix":
        raise LoadError(f"--kernels numba: {lack}; take --kernels xla")
    return "numba"  # slower than it could be, but right


_MISSING = "the package numba is not installed"


@functools.cache
def _lack() -> str:
    """What this machine lacks for Numba's kernels to be fast; nothing: empty."""
    if importlib.util.find_spec("numba") is None:
        return _MISSING
    if os.name != "posix":
        return "the system has no POSIX threads"
    if machine.machine() not in ("x86_64", "AMD64"):
        return f"the processor is {machine.machine()}, not x86-64"
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return "" if features.get("avx2") and features.get("fma") else "the processor has no AVX2"
