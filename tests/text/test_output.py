import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.text.small import byte_level, from_gguf, gguf_bytes, gguf_pieces
from xjax.text.output import OutputStream, StopMatcher
from xjax.text.tokenizer import Tokenizer

TEXTS = st.text(alphabet="ab é汉👩‍🚀\n\u0301<s>", max_size=30)


def stream(tokenizer: Tokenizer, ids: list[int], **options) -> tuple[str, OutputStream]:
    """Push ids one by one; returns what was emitted and the stream."""
    output = OutputStream(tokenizer, **options)
    return "".join(output.push([i]) for i in ids) + output.flush(), output


@pytest.fixture(scope="module", params=["folder", "gguf bytes", "gguf pieces", "pieces without prefix"])
def tokenizer(request) -> Tokenizer:
    return {
        "folder": byte_level,
        "gguf bytes": lambda: from_gguf(gguf_bytes()),
        "gguf pieces": lambda: from_gguf(gguf_pieces()),
        "pieces without prefix": lambda: from_gguf(gguf_pieces(**{"tokenizer.ggml.add_space_prefix": False})),
    }[request.param]()


@given(data=st.data())
def test_any_split_equals_the_whole_decode(tokenizer, data):
    """Also for ids no text has: cut characters, single bytes, unknown ids."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    output = OutputStream(tokenizer, stop=["\0never"], skip_special_tokens=skip)
    emitted, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        emitted += output.push(rest[:size])
        rest = rest[size:]
    assert emitted + output.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS)
def test_never_a_broken_character(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    output = OutputStream(tokenizer)
    for token_id in ids:
        assert "\ufffd" not in output.push([token_id])
    assert output.flush() == ""


def test_invalid_bytes_become_replacement_characters():
    tokenizer = from_gguf(gguf_pieces())
    byte = {value: 3 + value for value in range(256)}
    for data in (
        b"\xff",
        b"a\xe2\x82",
        b"\xe2\x82\xac\xff",
        b"\xf0\x9f\x91",
        b"\xc3\xc3\xa9",
        b"\xed\xa0\x80",
    ):
        text, _ = stream(tokenizer, [byte[value] for value in data])
        assert text == data.decode("utf-8", "replace")


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """End and stop string of the first one to be completed, the longest where several are."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(
    text=st.text(alphabet="abé", max_size=25),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
@example(text="abababc", stops=["ababc", "b"], include=False)
@example(text="aab", stops=["ab", "aab"], include=True)
def test_stop_strings_at_every_split(text, stops, include):
    tokenizer = from_gguf(gguf_bytes())
    ids = tokenizer.encode(text, add_special_tokens=False)
    emitted, output = stream(tokenizer, ids, stop=stops, include_stop=include)
    expected = first_stop(text, stops)
    if expected is None:
        assert (emitted, output.stopped) == (text, None)
        return
    end, stop = expected
    assert output.stopped == stop
    assert emitted == (text[:end] if include else text[: end - len(stop)])
    counts = [n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n]).rstrip("\ufffd")) >= end]
    assert output.stop_token_count == counts[0]
    assert output.push(ids) == "" and output.flush() == ""


@given(text=st.text(alphabet="ab", max_size=20), stop=st.text(alphabet="ab", min_size=1, max_size=6))
def test_no_part_of_a_stop_string_is_shown_early(text, stop):
    """At each token, exactly what could still be the beginning of a stop string waits."""
    tokenizer = from_gguf(gguf_bytes())
    output, shown, seen = OutputStream(tokenizer, stop=[stop]), "", ""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        shown += output.push([token_id])
        if output.stopped:
            break
        seen += tokenizer.decode([token_id])
        waiting = max(n for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: len(seen) - waiting]


def test_a_stop_string_over_several_pushes_and_tokens():
    tokenizer = byte_level()
    ids = tokenizer.encode("Hello, world! It's over", add_special_tokens=False)
    output = OutputStream(tokenizer, stop=["world! It"])
    assert output.push(ids) == "Hello, "
    assert output.stopped == "world! It"
    assert tokenizer.decode(ids[: output.stop_token_count - 1]).endswith(("world! I", "world! ", "world!"))


def test_special_tokens_are_shown_when_asked_for():
    tokenizer = from_gguf(gguf_bytes())
    assert stream(tokenizer, [1, 2 + 65, 0])[0] == tokenizer.decode([2 + 65])
    text, output = stream(tokenizer, [1, 0], skip_special_tokens=False, stop=["<|end"])
    assert (text, output.stopped) == ("<|start|>", "<|end")


def test_the_space_before_the_first_word_is_left_out_once():
    tokenizer = from_gguf(gguf_pieces())
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    assert [tokenizer.token_string(i) for i in ids] == ["▁ab", "▁ab"]
    assert stream(tokenizer, [1, *ids])[0] == "ab ab"


def test_a_stop_that_only_the_end_completes():
    tokenizer = from_gguf(gguf_pieces())
    text, output = stream(tokenizer, [3 + 0x61, 3 + 0xE2], stop=["\ufffd"])
    assert (text, output.stopped, output.stop_token_count) == ("a", "\ufffd", 2)


def test_work_does_not_grow_with_the_stop_strings():
    """64 long stop strings that nearly match everywhere cost about what one costs."""
    stops = ["a" * 900 + chr(0x100 + i) for i in range(64)]
    matcher = StopMatcher(stops)
    start = time.perf_counter()
    node = 0
    for _ in range(20_000):
        node = matcher.step(node, "a")
    assert matcher.depths[node] == 900
    assert time.perf_counter() - start < 1.0
