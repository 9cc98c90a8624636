"""Conversion as a whole: the folder means what its source meant, and is there whole or not at all."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.engine.tiny_folder import write_folder
from tests.golden.checkpoints import write_gguf
from tests.golden.recipe import CASES
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.checkpoints.digest import weights_digest
from xjax.checkpoints.hub import pinned_sampling
from xjax.checkpoints.metadata import eos_ids, generation_defaults
from xjax.checkpoints.saved import MANIFEST, read_manifest
from xjax.engine.build import load_model
from xjax.engine.llm import LLM
from xjax.errors import LoadError
from xjax.request import SamplingParams
from xjax.text.template import load_template
from xjax.text.tokenizer import load_tokenizer
from xjax.weights.convert import convert
from xjax.weights.saved import orbax as saving

pytestmark = pytest.mark.device
MESSAGES = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Digests of sources are remembered under a home of the test's own."""
    monkeypatch.setenv("XJAX_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


def assert_says_the_same(saved: Path, source: Path):
    """Ids of a text and of a chat, ends and sampling defaults."""
    one, other = open_checkpoint(saved), open_checkpoint(source)
    found, wanted = load_tokenizer(one), load_tokenizer(other)
    for text in ("Hello, world! 123", "<|user|>a</s>", "  two  spaces"):
        assert found.encode(text) == wanted.encode(text)
        assert found.encode(text, parse_special=True) == wanted.encode(text, parse_special=True)
    assert (found.bos_id, found.eos_ids, found.vocab_size) == (
        wanted.bos_id,
        wanted.eos_ids,
        wanted.vocab_size,
    )
    rendered = [load_template(each, override=None).render(MESSAGES) for each in (one, other)]
    assert rendered[0] == rendered[1]
    assert eos_ids(one) == eos_ids(other) != frozenset()
    assert generation_defaults(one) == (generation_defaults(other) or pinned_sampling(source)) != {}


def test_folder_means_the_same(source, tmp_path):
    saved = convert(source, tmp_path / "saved")
    assert_says_the_same(saved, source)
    checkpoint = open_checkpoint(saved)
    assert checkpoint.config == open_checkpoint(source).config
    assert all(file.is_file() for file in checkpoint.files)
    assert read_manifest(saved).source == weights_digest(
        open_checkpoint(source).files, tmp_path / "elsewhere"
    )


def test_every_template_file_comes_along(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "source")
    (folder / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    saved = open_checkpoint(convert(folder, tmp_path / "saved"))
    template = load_template(saved, override=None)
    assert template.render(MESSAGES) == "plain How are you?"
    assert template.render(MESSAGES, tools=[{}]) == "tools How are you?"
    override = tmp_path / "mine.jinja"
    override.write_text("mine")
    assert load_template(saved, override=override).render(MESSAGES) == "mine"


def test_engine_takes_it(source, tmp_path):
    """With the source's sampling defaults and ends, and a template of the user's."""
    template = tmp_path / "mine.jinja"
    template.write_text("<|user|>{{ messages[0].content }}</s><|assistant|>")
    saved, options = convert(source, tmp_path / "saved"), {"max_num_seqs": 1, "max_model_len": 64}
    with LLM(saved, chat_template=template, kernels="xla", prefill_chunk_size=32, **options) as llm:
        assert llm.generation_defaults == generation_defaults(open_checkpoint(source))
        assert llm.front.eos_ids == {1, 3}
        result = llm.chat([MESSAGES], SamplingParams(**{**llm.generation_defaults, "max_tokens": 12}))[0]
    tokenizer = load_tokenizer(open_checkpoint(source))
    prompt = "<|user|>How are you?</s><|assistant|>"
    assert list(result.prompt_token_ids) == tokenizer.encode(
        prompt, add_special_tokens=False, parse_special=True
    )
    assert result.outputs[0].token_ids


@pytest.mark.model
def test_default_model_means_the_same(smollm2_path, tmp_path):
    """A GGUF file: its vocabulary and template, and the sampling that comes with the pinned file."""
    saved = convert(smollm2_path, tmp_path / "saved", dtype="bfloat16")
    try:
        assert_says_the_same(saved, smollm2_path)
        found, wanted = (
            load_model(open_checkpoint(path), dtype="bfloat16") for path in (saved, smollm2_path)
        )
        assert found.config == wanted.config
        for a, b in zip(*map(jax.tree.leaves, (found.params, wanted.params)), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    finally:
        shutil.rmtree(saved)


def test_split_gguf(tmp_path):
    write_gguf(CASES["llama_tied"], tmp_path / "whole.gguf")
    write_gguf(CASES["llama_tied"], tmp_path / "m.gguf", split=8)
    part = next(tmp_path.glob("m-00002-of-*.gguf"))
    saved = convert(part, tmp_path / "saved")
    whole = open_checkpoint(tmp_path / "whole.gguf")
    found = open_checkpoint(saved).config
    assert found.keys() == whole.config.keys()
    assert load_model(open_checkpoint(saved)).config == load_model(whole).config


def test_converted_again(source, tmp_path):
    """In another dtype, from the converted folder itself, onto itself."""
    once = convert(source, tmp_path / "once")
    digest = read_manifest(once).source
    assert convert(once, once, dtype="bfloat16", overwrite=True) == once
    assert read_manifest(once).source == digest
    assert read_manifest(once).dtype == "bfloat16"
    assert_says_the_same(once, source)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_model(open_checkpoint(once)).params)} == {
        "float32"
    }


# ---- what is there already -----------------------------------------------------------------------


def test_nothing_is_replaced_unasked(source, tmp_path):
    saved = convert(source, tmp_path / "saved")
    before = (saved / MANIFEST).stat().st_mtime_ns
    with pytest.raises(LoadError, match="exists already; --overwrite replaces it"):
        convert(source, saved)
    assert (saved / MANIFEST).stat().st_mtime_ns == before
    convert(source, saved, overwrite=True)
    assert (saved / MANIFEST).stat().st_mtime_ns > before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] or _names(tmp_path) == {"home", "saved"}


def _names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link"])
def test_what_is_no_converted_model_is_never_replaced(kind, source, tmp_path):
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("precious")
    elif kind == "link":
        target.symlink_to(convert(source, tmp_path / "saved"))
    else:
        target.mkdir()
        if kind == "folder":
            (target / "thesis.tex").write_text("precious")
    with pytest.raises(LoadError, match="exists and is no converted model; choose another folder"):
        convert(source, target, overwrite=True)
    assert os.path.lexists(target)
    assert kind != "folder" or (target / "thesis.tex").exists()


def test_the_name_is_looked_at_before_anything_is_loaded(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(LoadError, match="no converted model"):
        convert(tmp_path / "nowhere", tmp_path / "target")


def test_a_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="cannot be written: (Not a directory|File exists)"):
        convert(source, tmp_path / "file" / "out")


# ---- whole or not at all -------------------------------------------------------------------------


def _spoil(monkeypatch, error):
    def fail(part, folder, where):
        folder.mkdir(parents=True)
        (folder / "half").write_text("half")
        raise error

    monkeypatch.setattr(saving, "_save_part", fail)


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(errno.EIO, os.strerror(errno.EIO)), LoadError, "cannot be written: Input/output error"),
        (RuntimeError("a defect"), RuntimeError, "a defect"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_broken_off_run_leaves_nothing(error, raised, words, is_there, source, tmp_path, monkeypatch):
    target = tmp_path / "models" / "saved"
    if is_there:
        convert(source, target)
    before = _names(target.parent) if is_there else set()
    _spoil(monkeypatch, error)
    with pytest.raises(raised, match=words):
        convert(source, target, overwrite=True)
    assert _names(target.parent) == before
    if is_there:
        load_model(open_checkpoint(target))


def test_interrupts_wait_for_what_is_being_written(source, tmp_path, monkeypatch):
    """Ctrl-C twice while orbax writes: nobody else could clean up behind it."""
    original, ended = saving._save_part, []

    def slow(part, folder, where):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        original(part, folder, where)
        ended.append(folder.exists())

    monkeypatch.setattr(saving, "_save_part", slow)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out" / "saved")
    assert ended == [True]
    assert _names(tmp_path / "out") == set()


def test_no_room(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(LoadError, match=r"saved: the model takes 0\.0 GB, 0\.0 GB are free there"):
        convert(source, tmp_path / "out" / "saved")
    assert _names(tmp_path / "out") == set()


def test_room_that_goes_meanwhile(source, tmp_path, monkeypatch):
    usage, asked = shutil.disk_usage(tmp_path), []

    def shrinking(path):
        asked.append(path)
        return usage._replace(free=10**9 if len(asked) < 3 else 0)

    monkeypatch.setattr(saving, "_PART_BYTES", 10_000)
    monkeypatch.setattr(shutil, "disk_usage", shrinking)
    with pytest.raises(LoadError, match="saved: cannot be written: No space left on device"):
        convert(source, tmp_path / "out" / "saved")
    assert _names(tmp_path / "out") == set()


def test_a_write_that_fails_in_orbax(source, tmp_path):
    """Files of 8 KB at most, as a quota would have it: one line, nothing left, exit code 2."""
    code = """
import resource, sys
from xjax_server.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.exit(main(sys.argv[1:]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    out = tmp_path / "out" / "saved"
    result = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(out)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 2, result.stderr
    assert f"xjax: error: {out}: cannot be written: File too large" in result.stderr.splitlines()
    assert not {"absl", "asyncio", "Traceback"}.intersection(result.stderr.replace(":", " ").split())
    assert _names(tmp_path / "out") == set()


def test_what_a_killed_run_left_is_taken_away(source, tmp_path):
    left = tmp_path / ".saved.partial" / "new" / "params"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    (tmp_path / ".saved.partial" / "new" / "file").write_text("half")
    saved = convert(source, tmp_path / "saved")
    assert _names(tmp_path) == {"home", "saved"}
    assert "params/half" not in json.loads((saved / MANIFEST).read_text())["files"]


def test_a_model_that_a_killed_run_was_replacing_comes_back(source, tmp_path):
    target = convert(source, tmp_path / "saved")
    (tmp_path / ".saved.partial").mkdir()
    target.rename(tmp_path / ".saved.partial" / "old")
    with pytest.raises(LoadError, match="exists already; --overwrite replaces it"):
        convert(source, target)
    load_model(open_checkpoint(target))
    assert _names(tmp_path) == {"home", "saved"}


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_others_have_of_the_hidden_name_is_left_alone(kind, source, tmp_path):
    hidden, folder = tmp_path / ".saved.partial", tmp_path / "folder"
    place = hidden if kind == "folder" else folder
    place.mkdir()
    (place / "thesis.tex").write_text("precious")
    if kind == "link":
        hidden.symlink_to(folder)
    elif kind == "file":
        hidden.write_text("precious")
    before = _names(tmp_path)
    with pytest.raises(LoadError, match=r"\.saved\.partial"):
        convert(source, tmp_path / "saved")
    assert (place / "thesis.tex").read_text() == "precious"
    assert _names(tmp_path) == before


def test_a_hidden_folder_that_was_renewed_behind_our_back(source, tmp_path, monkeypatch):
    """Between its opening and its lock another run ended and a third began."""
    original, hidden = fcntl.flock, tmp_path / ".saved.partial"

    def late(descriptor, how):
        hidden.rename(tmp_path / "elsewhere")
        (hidden / "new").mkdir(parents=True)
        (hidden / "new" / "theirs").write_text("")
        original(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(LoadError, match="another program is writing it"):
        convert(source, tmp_path / "saved")
    assert (hidden / "new" / "theirs").exists()


def test_orbax_that_goes_on_writing_behind_its_error(source, tmp_path, monkeypatch):
    original, removed = shutil.rmtree, []

    def remove(path, **options):
        original(path, **options)
        if len(removed) < 3:
            path.mkdir()
            (path / "late").write_text("late")
        removed.append(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    _spoil(monkeypatch, OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(LoadError, match="Input/output error"):
        convert(source, tmp_path / "out" / "saved")
    assert removed == [tmp_path / "out" / ".saved.partial"] * 4
    assert _names(tmp_path / "out") == set()


def test_two_at_once(source, tmp_path, monkeypatch):
    """The second says so and leaves the first alone."""
    original, refused = saving._save_part, []

    def save(part, folder, where):
        with pytest.raises(LoadError, match="another program is writing it") as caught:
            convert(source, tmp_path / "saved")
        refused.append(caught.value)
        original(part, folder, where)

    monkeypatch.setattr(saving, "_save_part", save)
    load_model(open_checkpoint(convert(source, tmp_path / "saved")))
    assert len(refused) == 1


def test_wrong_dtype(source, tmp_path):
    with pytest.raises(LoadError, match="dtype must be one of auto, float32, bfloat16, float16, not 'int8'"):
        convert(source, tmp_path / "saved", dtype="int8")
