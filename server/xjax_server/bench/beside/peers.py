"""How each server is started: ours, llama.cpp's own `llama-server`, vLLM; and what peers are tried with.

A peer is given the same weights, streams and threads, and runs with the fastest of its settings. A
file of float32 weights is made with llama.cpp's own `llama-quantize` where that lies beside the server.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xjax.errors import RequestError
from xjax_server.bench.beside.folder import write_folder
from xjax_server.bench.beside.servers import Server, free_port
from xjax_server.bench.programs import llama_build, output_of

SERVED = "bench"  # the model's name at every server


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every server is started for."""

    threads: int
    streams: int
    tokens: int  # of one sequence, prompt and answer


@dataclass(frozen=True)
class Setting:
    """Flags of a peer that are tried, and what to call them."""

    name: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server that can be started.

    program   command that the flags follow
    settings  tried one after the other; the fastest is measured
    build     what is known of how it was built
    """

    name: str
    model: str
    program: tuple[str, ...]
    settings: tuple[Setting, ...] = (Setting("defaults"),)
    ready: str = "/health"
    build: Mapping[str, str] = field(default_factory=dict[str, str])

    def start(self, setting: Setting, sizes: Sizes) -> Server:
        """Start it; the caller waits for it and stops it."""
        port = free_port()
        flags = _FLAGS[self.name.partition(" ")[0]](self.model, sizes, port)
        return Server(self.name, [*self.program, *flags, *setting.flags], port=port, ready=self.ready)


def _our_flags(model: str, sizes: Sizes, port: int) -> list[str]:
    return [
        "serve", "--model", model, "--port", str(port), "--served-model-name", SERVED,
        "--threads", str(sizes.threads), "--max-num-seqs", str(sizes.streams),
        "--max-model-len", str(sizes.tokens), "--dtype", "float32",
    ]  # fmt: skip


def _llama_flags(model: str, sizes: Sizes, port: int) -> list[str]:
    threads, slots = str(sizes.threads), str(sizes.streams)
    return [
        "-m", model, "--port", str(port), "-a", SERVED, "-t", threads, "-tb", threads,
        "-np", slots, "-c", str(sizes.streams * sizes.tokens), "--no-ui",
    ]  # fmt: skip


def _vllm_flags(model: str, sizes: Sizes, port: int) -> list[str]:
    return [
        "--model", model, "--port", str(port), "--served-model-name", SERVED, "--dtype", "float32",
        "--max-num-seqs", str(sizes.streams), "--max-model-len", str(sizes.tokens),
    ]  # fmt: skip


# The package is called otherwise for each kind of processor.
_VLLM_VERSION = """
from importlib.metadata import distributions
print(*(f"{found.name} {found.version}" for found in distributions() if found.name.startswith("vllm")))
"""
_FLAGS = {"xjax": _our_flags, "llama-server": _llama_flags, "vllm": _vllm_flags}

LLAMA_SETTINGS = (
    Setting("defaults"),
    Setting("batch 512, micro-batch 128", ("-b", "512", "-ub", "128")),
    Setting("flash attention", ("-fa", "on")),
    Setting("no flash attention", ("-fa", "off")),
    Setting("one cache for all slots", ("-kvu",)),
    Setting("8-bit cache", ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
)


def ours(model: str) -> Peer:
    """Our server, as `xjax serve` starts it."""
    program = "import sys; from xjax_server.cli import main; sys.exit(main())"
    return Peer(name="xjax", model=model, program=(sys.executable, "-c", program), ready="/ready")


def find(name: str, path: str, model: str, sizes: Sizes, folder: Path) -> list[Peer]:
    """Peers of one name. `folder` is for files made for them. Raises XjaxError where it cannot be had."""
    if name == "llama-server":
        return _llama(path, model, folder)
    check_peer(name)
    return [_vllm(path, model, sizes, folder)]


def check_peer(name: str) -> None:
    """Raise RequestError for a name that no peer has."""
    if name not in ("llama-server", "vllm"):
        raise RequestError(
            f"no peer is called {name!r}; expected llama-server=PATH or vllm=PYTHON", param="peers"
        )


def _llama(path: str, model: str, folder: Path) -> list[Peer]:
    build = llama_build(path)
    found = [
        Peer(name="llama-server", model=model, program=(path,), settings=LLAMA_SETTINGS, build=build),
    ]
    quantize = Path(path).with_name("llama-quantize")
    if quantize.is_file():
        wide = folder / f"{Path(model).stem}-float32.gguf"
        output_of([str(quantize), "--allow-requantize", model, str(wide), "F32"])
        found.append(
            Peer(
                name="llama-server float32",
                model=str(wide),
                program=(path,),
                settings=LLAMA_SETTINGS[:5],
                build=build,
            )
        )
    return found


def _vllm(path: str, model: str, sizes: Sizes, folder: Path) -> Peer:
    version = output_of([path, "-c", _VLLM_VERSION]).splitlines()[-1]
    is_folder = Path(model).is_dir()
    readable = Path(model) if is_folder else write_folder(Path(model), folder / f"{Path(model).stem}-folder")
    cores = "0" if sizes.threads == 1 else f"0-{sizes.threads - 1}"
    program = ("env", "VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_OMP_THREADS_BIND={cores}", path, "-m")
    return Peer(
        name="vllm",
        model=str(readable),
        program=(*program, "vllm.entrypoints.openai.api_server"),
        build={"version": version},
    )
