"""Keys of pages: what a page's bytes depend on, hashed, chained from the first page of a sequence on.

    key_i = SHA-256(tag | namespace | key_{i-1} | token ids as little-endian uint32 | salt, where i = 0)

Two pages with one key hold the same bytes, in any process on any machine. Only full pages have keys.
Knows no pool and no tier.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32

_TAG = b"xjax page key 1\0"
_NAMESPACE_TAG = b"xjax namespace 1\0"
_NO_PARENT = bytes(KEY_BYTES)
_UINT32 = np.dtype("<u4")

Value = str | int | float | bool | None | bytes | Sequence["Value"]


def namespace(fields: Mapping[str, Value]) -> bytes:
    """Hash everything but the tokens that the bytes of a page depend on, 32 bytes.

    fields   by name, in any order: digest of the weights, cache dtype, page size, ...; never a path
             or the name of a model
    """
    text = json.dumps(
        {name: _plain(value) for name, value in fields.items()}, sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(_NAMESPACE_TAG + text.encode()).digest()


def _plain(value: Value) -> object:
    """The value with its kind, so that no two of different kinds look alike."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float):
        return {"float": value.hex()}
    if value is None or isinstance(value, str | int):
        return value
    return [_plain(item) for item in value]


def page_tokens(tokens: npt.NDArray[np.int32], page_size: int) -> list[bytes]:
    """Token ids of each full page as little-endian uint32.

    tokens   [n]  int32
    """
    if len(tokens) == page_size:  # one more page of a sequence that decodes: the usual case
        return [tokens.astype(_UINT32).tobytes()]
    count, width = len(tokens) // page_size, 4 * page_size
    data = tokens[: count * page_size].astype(_UINT32).tobytes()
    return [data[start : start + width] for start in range(0, count * width, width)]


class KeyChain:
    """Makes the keys of one namespace."""

    def __init__(self, namespace: bytes, page_size: int) -> None:
        assert len(namespace) == KEY_BYTES
        self.page_size = page_size
        self._start = hashlib.sha256(_TAG + namespace)

    def next(self, parent: bytes | None, tokens: bytes, salt: bytes = b"") -> bytes:
        """Key of one page, 32 bytes.

        parent   key of the page before, None for the first
        tokens   of the page, as `page_tokens` has them
        salt     separates tenants; counts in the first page alone, and through it in all
        """
        hasher = self._start.copy()
        if parent is None:
            hasher.update(_NO_PARENT + tokens + struct.pack("<I", len(salt)) + salt)
        else:
            hasher.update(parent + tokens)
        return hasher.digest()

    def extend(self, keys: list[bytes], pages: Sequence[bytes], salt: bytes = b"") -> None:
        """Append the keys of the pages that have none yet.

        keys    of the first pages, extended
        pages   tokens of all pages
        """
        parent = keys[-1] if keys else None
        for place in range(len(keys), len(pages)):
            parent = self.next(parent, pages[place], salt)
            keys.append(parent)
