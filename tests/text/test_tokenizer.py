import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.small import byte_level, from_gguf, gguf_bytes, gguf_pieces, reference
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import RequestError
from xjax.text.tokenizer import Tokenizer, load_tokenizer

END = 602  # <|im_end|> of the byte-level folder


@pytest.mark.parametrize(("text", "ids"), reference("bytelevel")["texts"])
def test_ids_equal_transformers(text, ids):
    assert byte_level().encode(text, parse_special=True) == ids


@given(text=st.text(max_size=60))
def test_decoding_gives_the_text_back(text):
    for tokenizer in (byte_level(), from_gguf(gguf_bytes()), from_gguf(gguf_pieces())):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace(
            "▁", " " if _marks(tokenizer) else "▁"
        )
        assert not any(map(tokenizer.is_special, ids))


def _marks(tokenizer: Tokenizer) -> bool:
    return tokenizer.token_string(3) == "<0x00>"


def test_special_tokens_in_text_are_text_unless_asked():
    tokenizer = byte_level()
    text = "a<|im_end|>b"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert not any(map(tokenizer.is_special, plain)) and tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert parsed.count(END) == 1
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special_tokens=False) == text


def test_a_user_defined_token_is_found_in_text():
    tokenizer = byte_level()
    ids = tokenizer.encode("<think>x", add_special_tokens=False)
    assert tokenizer.token_string(ids[0]) == "<think>" and not tokenizer.is_special(ids[0])


def test_prefix_only_when_asked():
    tokenizer = byte_level()
    assert tokenizer.encode("x") == [0, *tokenizer.encode("x", add_special_tokens=False)]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, frozenset({END}), 603)


def test_token_bytes():
    tokenizer = from_gguf(gguf_pieces())
    assert [tokenizer.token_bytes(3 + value) for value in (0, 0x41, 0xFF)] == [b"\0", b"A", b"\xff"]
    space = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_string(i) == "▁ab")
    assert tokenizer.token_bytes(space) == b" ab"
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    tokenizer = from_gguf(gguf_bytes())
    table = {tokenizer.token_bytes(i) for i in range(2, 258)}
    assert table == {bytes([value]) for value in range(256)}


def test_lone_surrogates_are_a_request_error():
    with pytest.raises(RequestError, match="character 2"):
        byte_level().encode("ab\udc00")


def test_a_vocabulary_cannot_spell_a_control_token():
    """A merge that makes the text of a control token out of ordinary pieces is not followed."""
    metadata = gguf_bytes()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<1", "<12"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 3]
    metadata["tokenizer.ggml.merges"] = ["< 1", "<1 2"]
    tokenizer = from_gguf(metadata)
    ids = tokenizer.encode("a<12<12b", add_special_tokens=False)
    assert not any(map(tokenizer.is_special, ids)) and tokenizer.decode(ids) == "a<12<12b"
    assert tokenizer.encode("<12", add_special_tokens=False, parse_special=True) == [len(tokens) - 1]


def test_long_words_take_linear_time():
    for tokenizer in (byte_level(), from_gguf(gguf_pieces())):
        for text in ("a" * 200_000, " " * 200_000, "<" * 200_000, "汉" * 50_000):
            start = time.perf_counter()
            assert (
                tokenizer.decode(tokenizer.encode(text, add_special_tokens=False, parse_special=True)) == text
            )
            assert time.perf_counter() - start < 10


@pytest.fixture(scope="module")
def smollm2(smollm2_path, tmp_path_factory) -> Tokenizer:
    return load_twice(smollm2_path, tmp_path_factory.mktemp("smollm2"), seconds=0.3)


@pytest.fixture(scope="module")
def gemma(gemma_path, tmp_path_factory) -> Tokenizer:
    return load_twice(gemma_path, tmp_path_factory.mktemp("gemma"), seconds=1.0)


def load_twice(path, cache_dir, seconds: float) -> Tokenizer:
    checkpoint = open_checkpoint(path)
    load_tokenizer(checkpoint, cache_dir=cache_dir)
    start = time.process_time()
    tokenizer = load_tokenizer(checkpoint, cache_dir=cache_dir)
    assert time.process_time() - start < 4 * seconds  # four times what a quiet machine may take
    return tokenizer


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_models_equal_transformers(name, request):
    tokenizer = request.getfixturevalue(name)
    for text, ids in reference(name)["texts"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.model
def test_models_put_the_beginning_where_they_should(smollm2, gemma):
    # Ids of the float32 references of both models.
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert gemma.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    text = "  Hello 👋🏽   world \n\n\tnaïve café — “quotes” …"
    assert gemma.encode(text)[:8] == [2, 138, 9259, 155818, 242713, 139, 12392, 236743]
    assert (smollm2.eos_ids, smollm2.bos_id) == ({2}, 1)
    assert (gemma.eos_ids, gemma.bos_id) == ({1, 106}, 2)
    assert gemma.vocab_size == 262144
