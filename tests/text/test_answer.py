"""Events of a made-up backend to deltas: what is shown, what counts, and where a sample is ended."""

import pytest

from tests.text.small import from_gguf, gguf_bytes
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from xjax.text.answer import Answer

EOS = 0


class Recorder:
    """Stands in for the backend and for whoever asked."""

    def __init__(self, *, eos_ids=(EOS,), has_tokenizer=True, **sampling):
        self.tokenizer = from_gguf(gguf_bytes())
        self.finished, self.deltas = [], []
        request = Request(
            request_id="r",
            prompt_ids=(5,),
            sampling=SamplingParams(**sampling),
            eos_ids=frozenset(eos_ids),
        )
        self.answer = Answer(request, self.tokenizer if has_tokenizer else None, self, self.deltas.append)

    def finish(self, request_id, sample_id, num_tokens):
        self.finished.append((request_id, sample_id, num_tokens))

    def feed(self, *events):
        for event in events:
            self.answer(event)
        return self

    def ids(self, text):
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self):
        return tuple(i for delta in self.deltas for i in delta.token_ids)


def event(*token_ids, sample_id=0, **more):
    return TokenEvent(request_id="r", sample_id=sample_id, token_ids=token_ids, **more)


def test_an_end_token_counts_and_is_not_shown():
    seen = Recorder(skip_special_tokens=False)
    seen.feed(event(*seen.ids("xy")), event(EOS, finish_reason=FinishReason.STOP, stop_token_id=EOS))
    assert (seen.text, seen.token_ids) == ("xy", (*seen.ids("xy"), EOS))
    assert (seen.deltas[-1].finish_reason, seen.deltas[-1].stop_reason) == (FinishReason.STOP, None)
    assert seen.answer.is_done and seen.finished == []


@pytest.mark.parametrize(("ignore_eos", "eos_ids", "reason"), [
    (False, (EOS,), None), (True, (EOS,), EOS), (False, (), EOS),
])  # fmt: skip
def test_a_stop_token_that_was_asked_for_is_told(ignore_eos, eos_ids, reason):
    seen = Recorder(eos_ids=eos_ids, ignore_eos=ignore_eos, stop_token_ids=[EOS])
    seen.feed(event(EOS, finish_reason=FinishReason.STOP, stop_token_id=EOS))
    assert seen.deltas[-1].stop_reason == reason


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_at_the_token_that_completes_it(size, include):
    seen = Recorder(stop="STOP", include_stop_str_in_output=include, logprobs=0)
    ids = seen.ids("xySTOPz")
    assert len(ids) == 7
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        scores = tuple(TokenLogprobs(-float(i), 1) for i in range(start, start + len(part)))
        seen.feed(event(*part, logprobs=scores))
    assert seen.text == ("xySTOP" if include else "xy")
    assert seen.token_ids == ids[:6]
    assert [item.logprob for delta in seen.deltas for item in delta.logprobs] == [-float(i) for i in range(6)]
    assert seen.finished == [("r", 0, 6)]
    last = seen.deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "STOP")
    # What the engine had under way, and its own end of the sample, are not passed on.
    count = len(seen.deltas)
    seen.feed(event(*seen.ids("z")), event(finish_reason=FinishReason.STOP))
    assert len(seen.deltas) == count


def test_a_stop_string_in_the_last_token_wins_over_the_length():
    seen = Recorder(stop="yz", max_tokens=3)
    seen.feed(event(*seen.ids("xyz"), finish_reason=FinishReason.LENGTH))
    assert (seen.text, seen.deltas[-1].finish_reason) == ("x", FinishReason.STOP)
    assert seen.finished == []  # the engine has ended it already


def test_what_waited_for_a_stop_string_is_shown_at_the_end():
    seen = Recorder(stop="STOP")
    seen.feed(event(*seen.ids("xSTO")))
    assert seen.text == "x"
    seen.feed(event(finish_reason=FinishReason.ABORT))
    assert (seen.text, seen.deltas[-1].finish_reason) == ("xSTO", FinishReason.ABORT)


def test_samples_end_one_by_one():
    seen = Recorder(n=2, stop="y")
    seen.feed(event(*seen.ids("xy"), sample_id=1))
    assert seen.finished == [("r", 1, 2)] and not seen.answer.is_done
    seen.feed(event(*seen.ids("x"), sample_id=0, finish_reason=FinishReason.LENGTH))
    assert seen.answer.is_done
    assert [delta.sample_id for delta in seen.deltas] == [1, 0]


def test_an_error_and_what_came_with_the_first_token_are_passed_on():
    seen = Recorder(has_tokenizer=False)
    scores = (None, TokenLogprobs(-1.0, 2))
    seen.feed(event(7, num_cached_tokens=4, prompt_logprobs=scores))
    seen.feed(event(finish_reason=FinishReason.ERROR, error="the step failed"))
    first, last = seen.deltas
    assert (first.text, first.token_ids, first.num_cached_tokens, first.prompt_logprobs) == (
        "",
        (7,),
        4,
        scores,
    )
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the step failed")
