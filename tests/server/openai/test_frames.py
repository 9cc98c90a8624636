"""A stream, cut anywhere, folds to the reply: the writers alone, without a server."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.fake_backend import small_front
from xjax.request import FinishReason, TokenLogprobs
from xjax.text.answer import Delta
from xjax_server.openai import chat, completions
from xjax_server.openai.frames import merge
from xjax_server.openai.logprobs import spell
from xjax_server.serving import ServedModel

MODEL = ServedModel(
    names=("small",), backend=None, front=small_front(), max_model_len=99, defaults={}, seed=0, created=0
)
TEXT = "aé😀b ab!"


def deltas(num_samples, *, is_scored, with_prompt=()):
    """Events as an engine sends them: sample after sample, a token each, in lockstep."""
    tokens = MODEL.front.encode_prompt(TEXT)
    texts = ["a", "é", "", "", "", "😀", "b", " ab", "!"]
    assert len(tokens) == len(texts)
    items = []
    for step, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        for sample in range(num_samples):
            is_last = step == len(tokens) - 1
            logprobs = (TokenLogprobs(-float(step), 1, ((token, -0.5), (9, -1.5))),) if is_scored else ()
            items.append(
                Delta(
                    sample_id=sample,
                    text=text,
                    token_ids=(token,),
                    logprobs=logprobs,
                    finish_reason=FinishReason.STOP if is_last else None,
                    stop_reason="!" if is_last and sample else None,
                    num_cached_tokens=2 if step == 0 else None,
                    prompt_logprobs=with_prompt or None if step == sample == 0 else None,
                )
            )
    return items


def writer_of(kind, **fields):
    module, given = {
        "chat": (chat, {"messages": [{"role": "user", "content": "hi"}]}),
        "text": (completions, {"prompt": ["hi", "é"]}),
    }[kind]
    return module.prepare(MODEL, "id", json.dumps({**given, **fields}).encode()).writer


def chunks_of(data):
    frames = data.decode().split("\n\n")
    assert frames.pop() == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def fold(chunks):
    """Choices of a stream by index: every text, list and value put together."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = found.setdefault(choice["index"], {"text": "", "entries": [], "ids": []})
            entry["text"] += choice.get("text", "") + choice.get("delta", {}).get("content", "")
            for name, value in (choice["logprobs"] or {}).items():
                entry.setdefault(name, []).extend(value or [])
            entry["ids"] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                entry["end"] = (choice["finish_reason"], choice["stop_reason"])
    return found


def whole(reply):
    """The same of a reply, read as a stream of one chunk."""
    for choice in reply["choices"]:
        if "message" in choice:
            choice["delta"] = choice.pop("message")
    return fold([reply])


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["chat", "text"]),
    is_scored=st.booleans(),
    has_ids=st.booleans(),
    has_echo=st.booleans(),
    cuts=st.sets(st.integers(1, 35)),
)
def test_a_stream_cut_anywhere_folds_to_the_reply(kind, is_scored, has_ids, has_echo, cuts):
    fields = {"n": 2, "return_token_ids": has_ids, "max_tokens": 50}
    scores = ()
    if kind == "chat":
        fields |= {"logprobs": is_scored, "top_logprobs": 2 if is_scored else None}
        items = [(0, delta) for delta in deltas(2, is_scored=is_scored)]
    else:
        fields |= {"logprobs": 2 if is_scored else None, "echo": has_echo}
        if has_echo and is_scored:
            scores = (None, TokenLogprobs(-3.0, 2))
        first = deltas(2, is_scored=is_scored, with_prompt=scores)
        second = deltas(2, is_scored=is_scored, with_prompt=scores[:1])
        items = [pair for a, b in zip(first, second, strict=True) for pair in ((0, a), (1, b))]
    reply = json.loads(writer_of(kind, **fields).whole(items))
    options = {"include_usage": True, "continuous_usage_stats": len(cuts) % 2 == 0}
    writer = writer_of(kind, **fields, stream=True, stream_options=options)
    data, places = writer.first(), sorted(cut for cut in cuts if cut < len(items))
    for start, end in zip([0, *places], [*places, len(items)], strict=True):
        data += writer.of(items[start:end])
    chunks = chunks_of(data + writer.last())
    assert fold(chunks) == whole(reply)
    assert chunks[-1]["usage"] == reply["usage"]
    assert reply["usage"]["completion_tokens"] == len(items)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * (1 if kind == "chat" else 2)}


def test_echo_waits_for_the_prompts_logprobs():
    writer = writer_of("text", prompt="hi", n=2, echo=True, logprobs=0, stream=True, max_tokens=5)
    first, second, *rest = deltas(2, is_scored=True, with_prompt=(None, TokenLogprobs(-3.0, 2)))
    assert writer.of([(0, second)]) == b""
    chunks = chunks_of(writer.of([(0, first)]))
    assert {chunk["choices"][0]["text"] for chunk in chunks} == {"hia"}
    assert {tuple(chunk["choices"][0]["logprobs"]["token_logprobs"]) for chunk in chunks} == {
        (None, -3.0, -0.0)
    }


def test_a_held_token_makes_no_frame():
    writer = writer_of("chat", stream=True)
    assert writer.of([(0, Delta(sample_id=0, token_ids=(5,)))]) == b""
    writer = writer_of("text", prompt="hi", stream=True)
    assert writer.of([(0, Delta(sample_id=0, token_ids=(5,)))]) == b""


def test_merging_keeps_order_and_ends():
    items = [(0, delta) for delta in deltas(2, is_scored=True)]
    merged = merge(items)
    assert [(i, delta.sample_id) for i, delta in merged] == [(0, 0), (0, 1)]
    assert merged[0][1].text == TEXT and merged[1][1].stop_reason == "!"
    assert merged[0][1].token_ids == tuple(MODEL.front.encode_prompt(TEXT))
    assert merged[0][1].num_cached_tokens == 2
    assert merge(items[:1]) == items[:1]


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a b", "a b"), ("é".encode(), "é"), (b"\xc3", "\\xc3"), (b"a\xf0\x9f", "a\\xf0\\x9f"), (b"", "")],
)
def test_a_tokens_text(data, text):
    assert spell(data) == text
    assert spell(data, "bytes:") == (
        text if data.decode("utf-8", "ignore").encode() == data else "bytes:" + text
    )


def test_minus_infinity_is_a_number():
    writer = writer_of("chat", logprobs=True, top_logprobs=1)
    scored = TokenLogprobs(float("-inf"), 9, ((5, float("-inf")),))
    delta = Delta(sample_id=0, token_ids=(73,), logprobs=(scored,), finish_reason=FinishReason.LENGTH)
    entry = json.loads(writer.whole([(0, delta)]))["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_tokens_frame_costs_microseconds(kind):
    writer = writer_of(kind, stream=True)
    items = [[(0, Delta(sample_id=0, text=" word", token_ids=(i,)))] for i in range(1000)]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for item in items:
            writer.of(item)
        best = min(best, (time.perf_counter() - began) / len(items))
    assert best < 50e-6, f"{best * 1e6:.1f} us a token"
