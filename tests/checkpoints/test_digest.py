"""The weights' digest, and when a remembered one may be used."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from xjax.checkpoints import digest
from xjax.checkpoints.digest import file_digest, weights_digest
from xjax.errors import LoadError


def _old_file(path: Path, data: bytes, age: float = 100.0) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(0, int((time.time() - age) * 1e9)))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes were really read, in order."""
    calls: list[Path] = []
    read = digest._hash
    monkeypatch.setattr(digest, "_hash", lambda path: calls.append(path) or read(path))
    return calls


def test_a_digest_is_remembered_while_nothing_changed(tmp_path: Path, hashed: list[Path]) -> None:
    path = _old_file(tmp_path / "w", b"weights" * 1000)
    expected = hashlib.sha256(b"weights" * 1000).hexdigest()
    for _ in range(3):
        assert file_digest(path, tmp_path / "cache") == expected
    assert len(hashed) == 1


def test_a_change_of_size_time_or_inode_is_hashed_again(tmp_path: Path, hashed: list[Path]) -> None:
    path, cache = _old_file(tmp_path / "w", b"aaaa"), tmp_path / "cache"
    file_digest(path, cache)
    _old_file(path, b"bbbb", age=50)  # same size, another time
    assert file_digest(path, cache) == hashlib.sha256(b"bbbb").hexdigest()
    status = path.stat()
    other = _old_file(tmp_path / "other", b"cccc")
    os.replace(other, path)  # same size, same time, another inode
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_digest(path, cache) == hashlib.sha256(b"cccc").hexdigest()
    path.write_bytes(b"longer")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # same time, another size
    assert file_digest(path, cache) == hashlib.sha256(b"longer").hexdigest()
    assert len(hashed) == 4


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path, hashed: list[Path]) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"new")
    file_digest(path, tmp_path / "cache")
    file_digest(path, tmp_path / "cache")
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"identity": 1}', '{"sha256": "x"}'])
def test_a_damaged_manifest_is_only_a_miss(tmp_path: Path, hashed: list[Path], damage: str) -> None:
    path, cache = _old_file(tmp_path / "w", b"data"), tmp_path / "cache"
    file_digest(path, cache)
    (entry,) = (cache / "digests").iterdir()
    entry.write_text(damage)
    assert file_digest(path, cache) == hashlib.sha256(b"data").hexdigest()
    assert len(hashed) == 2
    assert json.loads(entry.read_text())["sha256"] == hashlib.sha256(b"data").hexdigest()
    assert [item.name for item in (cache / "digests").iterdir()] == [entry.name]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    path = _old_file(tmp_path / "w", b"data")
    assert file_digest(path, tmp_path / "cache") == hashlib.sha256(b"data").hexdigest()


def test_the_digest_of_a_model_is_its_bytes_in_order_not_its_names(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one, two = _old_file(tmp_path / "1", b"one"), _old_file(tmp_path / "2", b"two")
    digest_12 = weights_digest([one, two], cache)
    assert digest_12 != weights_digest([two, one], cache)
    assert digest_12 != weights_digest([one], cache)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copies = [_old_file(elsewhere / "x", b"one"), _old_file(elsewhere / "a", b"two")]
    assert digest_12 == weights_digest(copies, cache)
    with pytest.raises(LoadError, match="cannot be read"):
        weights_digest([tmp_path / "none"], cache)


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _old_file(tmp_path / "w", b"data")
    read = digest._hash

    def hash_and_change(target: Path) -> str:
        result = read(target)
        target.write_bytes(b"other")
        return result

    monkeypatch.setattr(digest, "_hash", hash_and_change)
    with pytest.raises(LoadError, match="changed while it was read"):
        file_digest(path, tmp_path / "cache")
