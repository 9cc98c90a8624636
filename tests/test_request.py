"""What users may ask: every field of SamplingParams refuses what it cannot mean, by its name."""

import json
import math
from dataclasses import asdict, fields

import pytest

from xjax.errors import RequestError
from xjax.request import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams

NAN, INF, HUGE = math.nan, math.inf, 10**400

REFUSED = [
    ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", "8"), ("max_tokens", True),
    ("min_tokens", -1), ("min_tokens", None), ("min_tokens", 0.0),
    ("n", 0), ("n", 129), ("n", "2"),
    ("top_k", -2), ("top_k", 1.0), ("top_k", None),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", "1"), ("seed", True),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("prompt_logprobs", 21), ("prompt_logprobs", 1.5),
    *((name, value) for value in (NAN, INF, -INF, HUGE, -HUGE, "0.5", None, True, [0.5])
      for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
                   "presence_penalty")),
    ("temperature", -0.1), ("temperature", 100.1), ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1),
    ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", 1e-60), ("frequency_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("stop", ""), ("stop", [""]), ("stop", 1.5), ("stop", 5), ("stop", [1]), ("stop", object()),
    ("stop", b"a"), ("stop", "x" * 1025), ("stop", [f"s{i}" for i in range(1000)]),
    ("stop_token_ids", -1), ("stop_token_ids", [2**31]), ("stop_token_ids", 2.5), ("stop_token_ids", "7"),
    ("stop_token_ids", [True]), ("stop_token_ids", range(MAX_LOGIT_BIAS + 1)),
    ("logit_bias", 5), ("logit_bias", [1]), ("logit_bias", {"1": 1}), ("logit_bias", {-1: 1}),
    ("logit_bias", {1: NAN}), ("logit_bias", {1: HUGE}), ("logit_bias", {1: 101}), ("logit_bias", {1: "1"}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0)),
    ("ignore_eos", "false"), ("ignore_eos", 1), ("skip_special_tokens", None),
    ("include_stop_str_in_output", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[:20])
def test_a_field_refuses_what_it_cannot_mean(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        SamplingParams().replace(**{name: value})


def test_every_field_is_refused_something():
    assert {name for name, _ in REFUSED} == {item.name for item in fields(SamplingParams)}


def test_the_ends_of_every_range_are_taken():
    params = SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0, top_k=-1, top_p=1, min_p=1, repetition_penalty=0.01,
        frequency_penalty=-2, presence_penalty=2, seed=-(2**63), n=128, logprobs=20, prompt_logprobs=0,
        stop=["x" * 1024] * MAX_STOP_STRINGS, logit_bias={2**31 - 1: 100},
    )  # fmt: skip
    assert len(params.stop) == MAX_STOP_STRINGS
    SamplingParams(max_tokens=10**30, top_k=10**30, seed=2**64 - 1)


def test_min_tokens_must_not_exceed_max_tokens():
    with pytest.raises(RequestError, match=r"3 is above max_tokens, 2"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_one_stop_and_a_list_and_none_are_the_same_to_the_rest():
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(stop_token_ids=3).stop_token_ids == (3,)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(("changes", "is_plain"), [
    ({}, True), ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "stop": "a"}, True),
    ({"min_tokens": 1}, False), ({"logprobs": 0}, False), ({"prompt_logprobs": 0}, False),
    ({"logit_bias": {1: 1}}, False), ({"repetition_penalty": 1.1}, False),
    ({"frequency_penalty": 0.1}, False), ({"presence_penalty": -0.1}, False),
])  # fmt: skip
def test_plain_is_what_uses_logits_as_they_are(changes, is_plain):
    assert SamplingParams(**changes).is_plain == is_plain


def test_values_go_through_json():
    params = SamplingParams(stop=["a"], logit_bias={5: 1.5}, n=2)
    back = json.loads(json.dumps(asdict(params)))
    back["logit_bias"] = {int(key): value for key, value in back["logit_bias"].items()}
    assert SamplingParams(**back) == params
