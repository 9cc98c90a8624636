import functools
import io
import json
import random
import shutil

import pytest
import sentencepiece
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from tests.text.small import DATA, reference
from xjax.errors import LoadError
from xjax.text.folder import load_folder
from xjax.text.tokenizer import Tokenizer

CORPUS = [text for text, _ in reference("bytelevel")["texts"] if text.strip() and "\0" not in text]


@functools.cache
def train(**options) -> bytes:
    """A small SentencePiece model, shaped as those of Llama and Gemma."""
    out = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 700,
        "hard_vocab_limit": False,
        "character_coverage": 0.98,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, **(settings | options)
    )
    return out.getvalue()


def random_texts(count: int) -> list[str]:
    draw = random.Random(1)
    return [
        "".join(draw.choice("abe  Hliow\n\té0123▁") for _ in range(draw.randint(1, 30))) for _ in range(count)
    ]


def load(tmp_path, model: bytes, config: dict | None = None) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config or {"bos_token": "<s>", "eos_token": "</s>"})
    )
    return Tokenizer(*load_folder(tmp_path, tmp_path / "cache"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"user_defined_symbols": ["<sep>", "▁▁", "▁▁▁"]},
        {"byte_fallback": False},
    ],
    ids=str,
)
def test_ids_and_text_equal_sentencepiece(tmp_path, options):
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    model = train(**frozen)
    ours, theirs = load(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in CORPUS + random_texts(300):
        ids = theirs.encode(text)
        assert ours.encode(text) == [1, *ids], text
        if options.get("byte_fallback", True):
            assert ours.decode(ids) == theirs.decode(ids), text


def test_unigram_equals_sentencepiece(tmp_path):
    """Where ids differ, both ways to cut the text score the same and either is right."""
    model = train(model_type="unigram")
    ours, theirs = load(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    # Where letters are unknown, tokenizers takes "<0x0A>" in text for the byte; so does transformers.
    texts = [text for text in CORPUS if "<0x" not in text] + random_texts(300)
    num_equal = 0
    for text in texts:
        ids, expected = ours.encode(text, add_special_tokens=False), theirs.encode(text)
        num_equal += ids == expected
        assert sum(map(theirs.get_score, ids)) == pytest.approx(
            sum(map(theirs.get_score, expected)), abs=1e-3
        )
        assert ours.decode(ids) == theirs.decode(expected)
    assert num_equal > 0.9 * len(texts)


def test_configured_ends(tmp_path):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "add_bos_token": False,
        "add_eos_token": True,
    }
    tokenizer = load(tmp_path, train(), config)
    assert (tokenizer.prefix, tokenizer.suffix) == ((), (2,))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def copy(tmp_path, **config):
    shutil.copytree(DATA / "bytelevel", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return tmp_path / "model"


def test_a_configured_beginning_overrides_tokenizer_json(tmp_path):
    assert Tokenizer(*load_folder(copy(tmp_path, add_bos_token=False), None)).prefix == ()


def test_a_space_before_the_first_stretch_only(tmp_path):
    """The Metaspace rule "first": a stretch after a special token gets no space."""
    inner = Inner(models.BPE(vocab={"<s>": 0, "▁": 1, "a": 2, "▁a": 3}, merges=[("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(*load_folder(tmp_path, None))
    reference_inner = Inner.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a", " a", "a a", "<s>a", "a<s>a", " <s> a", "aa"):
        assert tokenizer.encode(text, parse_special=True) == reference_inner.encode(text).ids, text
    for ids in ([3, 3], [1, 1, 3], [2, 3], [0, 3]):
        assert tokenizer.decode(ids) == reference_inner.decode(ids), ids


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json and no tokenizer.model"),
        ({"tokenizer.json": b"{"}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer.model": b"nonsense"}, "tokenizer.model: not a SentencePiece model"),
        ({"tokenizer.model": b""}, "tokenizer.model: 0 tokens"),
        (
            {"tokenizer.model": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"},
            "not a SentencePiece model",
        ),
        ({"tokenizer_config.json": b"[]", "tokenizer.json": b"{}"}, "expected a JSON object"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, files, message):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(LoadError, match=message):
        load_folder(tmp_path, None)


def test_every_damage_to_a_model_file_is_a_load_error(tmp_path):
    model, draw, refused = train(), random.Random(3), 0
    for _ in range(60):
        damaged = bytearray(model[: draw.randrange(len(model))])
        if damaged:
            damaged[draw.randrange(min(len(damaged), 200))] = draw.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        try:
            load_folder(tmp_path, None)
        except LoadError as error:
            refused += 1
            assert "tokenizer.model" in str(error) and "\n" not in str(error)
    assert refused > 20


@pytest.mark.parametrize(
    "added",
    [{"x": {"content": "y"}}, {"700": {}}, {"9": {"content": "<other>"}}, [], {"9": "y"},
     {"9": {"content": "\ud800"}}],
)  # fmt: skip
def test_bad_added_tokens_are_named(tmp_path, added):
    folder = copy(tmp_path, added_tokens_decoder=added)
    if added == []:
        assert load_folder(folder, None)
        return
    with pytest.raises(LoadError, match="tokenizer_config.json"):
        load_folder(folder, None)
