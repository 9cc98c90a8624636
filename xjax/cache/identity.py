"""What the bytes of a page depend on beside its tokens, and the namespace of pages that outlive a process.

    PageIdentity  every setting, known at the start ----+
    WeightFiles   digest of their bytes, known later ---+--> namespace, 32 bytes

The device's and the host's pages are forgotten with the process and live under a namespace of its own, so
that nothing waits for the digest. What keeps pages elsewhere asks a `LateNamespace` for theirs. Names and
paths count nowhere. Knows no device.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xjax.cache.keys import Value, namespace
from xjax.checkpoints.digest import WeightFiles
from xjax.config import CacheSpec
from xjax.errors import XjaxError


@dataclass(frozen=True, kw_only=True)
class PageIdentity:
    """Everything but weights and tokens that a page's bytes depend on; what is not sure to be equal, is not.

    family        that the model belongs to
    config        all its settings, those of positions too, settled for the longest sequence
    coding        what the model's files say of how its weights are coded
    layers        what each layer keeps: kind, kv heads, head dim, window
    page_dtype    of the numbers in a page
    scale_form    how they are scaled
    page_size     tokens
    layout        version of how a page's numbers lie
    sharding      names and sizes of the axes that devices are laid out in
    adapter       what was added to the weights
    dtype         of activations
    kernels       family of kernels
    arithmetic    what else numbers come from: sources, compiler, processor
    """

    family: str
    config: Any
    coding: Mapping[str, Any]
    layers: CacheSpec
    page_dtype: str
    scale_form: str = "none"
    page_size: int
    layout: int
    sharding: tuple[tuple[str, int], ...] = ()
    adapter: str = ""
    dtype: str
    kernels: str
    arithmetic: tuple[str, ...]

    def namespace(self, weights: str) -> bytes:
        """The namespace with weights of this digest, 32 bytes."""
        fields = {item.name: canonical(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return namespace({**fields, "weights": weights})


def canonical(value: Any) -> Value:
    """Turn a value of frozen settings into plain ones that are the same in any process.

    Records become their kind and their fields by name, sets and mappings are sorted.
    Raises TypeError for what has no such form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return [type(value).__name__, canonical(fields)]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        pairs: list[Value] = [[canonical(key), canonical(item)] for key, item in value.items()]  # type: ignore[reportUnknownVariableType]
        return sorted(pairs, key=repr)
    if isinstance(value, AbstractSet):
        return sorted((canonical(item) for item in value), key=repr)  # type: ignore[reportUnknownVariableType]
    if isinstance(value, Sequence):
        return [canonical(item) for item in value]  # type: ignore[reportUnknownVariableType]
    raise TypeError(f"{type(value).__name__} cannot be part of a page's identity")


class LateNamespace:
    """The namespace of pages that outlive the process, once somebody wants it; any thread.

    identify    gives the identity of the pages
    files       of the weights, as they were when they were opened to be read
    cache_dir   folder where digests of files are remembered
    """

    def __init__(self, identify: Callable[[], PageIdentity], files: WeightFiles, cache_dir: Path) -> None:
        self._identify = identify
        self._files, self._cache_dir = files, cache_dir
        self._guard = threading.Lock()
        self._found: Future[bytes] | None = None

    def start(self) -> "Future[bytes]":
        """Begin to find it out on a thread of its own, if nobody has; the same future each time.

        Its exception is a LoadError where the files cannot be read or are no longer what was opened: then
        pages of this process must not be kept under any name.
        """
        with self._guard:
            if self._found is None:
                self._found = Future()
                # A daemon: a process that ends need not wait for the rest of a large file.
                work = threading.Thread(
                    target=self._find, args=(self._found,), name="xjax-digest", daemon=True
                )
                work.start()
            return self._found

    def get(self) -> bytes:
        """Wait for it. Raises LoadError, see `start`."""
        return self.start().result()

    def _find(self, found: "Future[bytes]") -> None:
        try:
            found.set_result(self._identify().namespace(self._files.digest(self._cache_dir)))
        except XjaxError as error:
            found.set_exception(error)
        finally:
            found.cancel()  # nobody waits for ever, whatever else went wrong
