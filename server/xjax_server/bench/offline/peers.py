"""Engines that can be measured beside ours: by what name, whether they are there, how they are started."""

from collections.abc import Callable, Mapping, Sequence

from xjax.errors import RequestError
from xjax_server.bench.offline import llama_peer, torch_peer

TORCH, LLAMA = "transformers", "llama-bench"
# Says why a peer at a path cannot run, None when it can.
MISSING: Mapping[str, Callable[[str], str | None]] = {
    TORCH: lambda path: torch_peer.missing(),
    LLAMA: llama_peer.missing,
}
TUNED = (LLAMA,)  # try several settings before they are measured


def peers_of(text: str, known: Sequence[str] = tuple(MISSING)) -> dict[str, str]:
    """Paths by name of `transformers,llama-bench=path`; without a path: empty. Raises RequestError."""
    parts = [part.partition("=") for part in text.split(",") if part]
    unknown = next((name for name, _, _ in parts if name not in known), None)
    if unknown is not None:
        raise RequestError(f"no peer is called {unknown!r}; expected {TORCH} or {LLAMA}=PATH", param="peers")
    return {name: path for name, _, path in parts}
