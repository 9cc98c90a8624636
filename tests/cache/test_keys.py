"""Keys of pages, against the documented formula worked out by hand."""

import hashlib
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from xjax.cache.keys import KEY_BYTES, KeyChain, namespace, page_tokens

SPACE = bytes(range(32))
FIELDS = {
    "weights": bytes(range(100, 132)), "family": "llama", "layers": 2, "dtype": "bfloat16", "page_size": 16,
    "theta": 10000.0, "window": None, "tied": True, "groups": ["full", "window"],
}  # fmt: skip


def by_hand(parent: bytes | None, tokens: list[int], salt: bytes) -> bytes:
    """tag | namespace | parent or zeros | uint32 tokens | length and bytes of the salt in the first page."""
    data = b"xjax page key 1\0" + SPACE + (bytes(32) if parent is None else parent)
    data += b"".join(token.to_bytes(4, "little") for token in tokens)
    if parent is None:
        data += len(salt).to_bytes(4, "little") + salt
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize("salt", [b"", b"tenant", bytes(256)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_keys_are_the_formula(salt, page_size):
    tokens = np.random.default_rng(page_size).integers(0, 2**31 - 1, 5 * page_size + page_size // 2)
    pages = page_tokens(tokens.astype(np.int32), page_size)
    keys: list[bytes] = []
    chain = KeyChain(SPACE, page_size)
    chain.extend(keys, pages[:2], salt)
    chain.extend(keys, pages, salt)
    expected, parent = [], None
    for start in range(0, 5 * page_size, page_size):
        parent = by_hand(parent, tokens[start : start + page_size].tolist(), salt)
        expected.append(parent)
    assert keys == expected
    assert all(len(key) == KEY_BYTES for key in keys)
    chain.extend(keys, pages, salt)
    assert keys == expected


def test_page_tokens_are_little_endian_and_of_full_pages():
    found = page_tokens(np.array([1, 258, 2**31 - 1, 7, 9], np.int32), 2)
    assert found == [bytes([1, 0, 0, 0, 2, 1, 0, 0]), bytes([255, 255, 255, 127, 7, 0, 0, 0])]
    assert page_tokens(np.arange(3, dtype=np.int32), 4) == []
    assert page_tokens(np.arange(8, dtype=">i4").astype(np.int32)[::2], 4) == [struct.pack("<4I", 0, 2, 4, 6)]


def test_a_salt_is_never_taken_for_tokens():
    chain = KeyChain(SPACE, 2)
    tokens = struct.pack("<2I", 5, 6)
    keys = {
        chain.next(None, tokens),
        chain.next(None, tokens, b"\0"),
        chain.next(None, tokens, bytes(4)),
        chain.next(None, tokens + struct.pack("<I", 0)),
        chain.next(None, tokens[:4], tokens[4:]),
        chain.next(None, tokens, b"a"),
        chain.next(None, tokens + b"a"),
        chain.next(bytes(32), tokens),
    }
    # A page of other length occurs in no chain, whose pages are all of one size.
    assert len(keys) == 8
    assert len({chain.next(chain.next(None, tokens, salt), tokens) for salt in (b"", b"a", b"b")}) == 3


def test_each_token_and_each_place_counts():
    chain, size = KeyChain(SPACE, 4), 4
    base = np.arange(12, dtype=np.int32)

    def last(tokens: np.ndarray) -> bytes:
        keys: list[bytes] = []
        chain.extend(keys, page_tokens(tokens, size))
        return keys[-1]

    found = {last(base)}
    for place in range(12):
        other = base.copy()
        other[place] += 1
        found.add(last(other))
    found.add(last(base[::-1]))
    assert len(found) == 14
    assert KeyChain(bytes(32), 4).next(None, bytes(16)) != chain.next(None, bytes(16))


def test_namespace_is_the_formula_whatever_the_order():
    plain = {
        "weights": {"bytes": bytes(range(100, 132)).hex()}, "family": "llama", "layers": 2,
        "dtype": "bfloat16", "page_size": 16, "theta": {"float": (10000.0).hex()}, "window": None,
        "tied": True, "groups": ["full", "window"],
    }  # fmt: skip
    text = json.dumps(plain, sort_keys=True)
    expected = hashlib.sha256(b"xjax namespace 1\0" + text.encode()).digest()
    assert namespace(FIELDS) == namespace(dict(reversed(FIELDS.items()))) == expected


CHANGES = [
    *({"weights": bytes([*range(100, 100 + i), 0, *range(101 + i, 132)])} for i in range(32)),
    {"weights": FIELDS["weights"].hex()},
    {"dtype": "float32"}, {"page_size": 32}, {"page_size": "16"}, {"page_size": 16.0}, {"theta": 10000},
    {"theta": np.nextafter(10000.0, 2).item()}, {"window": 0}, {"window": False}, {"window": "null"},
    {"window": []}, {"tied": 1}, {"tied": "true"}, {"groups": ["full"]}, {"groups": ["window", "full"]},
    {"groups": [["full"], "window"]}, {"groups": "['full', 'window']"}, {"more": None}, {"family": "Llama"},
]  # fmt: skip


def test_each_field_counts():
    found = [namespace(FIELDS), *(namespace(FIELDS | change) for change in CHANGES)]
    found += [namespace({k: v for k, v in FIELDS.items() if k != name}) for name in FIELDS]
    assert len(set(found)) == len(found)


def test_no_field_runs_into_the_next():
    assert namespace({"a": "b", "c": "d"}) != namespace({"a": 'b","c":"d'})
    assert namespace({"a": ["b", "c"]}) != namespace({"a": ["b,c"]})
    assert namespace({"a": "b"}) != namespace({"ab": ""})


PROGRAM = """
import numpy as np
from xjax.cache.keys import KeyChain, namespace, page_tokens
space = namespace({"weights": b"abc", "b": 1, "a": [True, None, 0.5], "name": "llama"})
keys = []
KeyChain(space, 4).extend(keys, page_tokens(np.arange(64, dtype=np.int32), 4), b"salt")
print(space.hex(), b"".join(keys).hex())
print(hash("salt"))
"""


def test_processes_with_other_hash_seeds_make_the_same_keys():
    lines = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        lines.append(done.stdout.splitlines())
    assert lines[0][0] == lines[1][0]
    assert lines[0][1] != lines[1][1]  # the seeds were really different
