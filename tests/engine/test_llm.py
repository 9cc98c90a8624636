"""`LLM` over a tiny folder: results in order, errors in their places, streams, stops, interrupts."""

import _thread
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.engine.tiny_folder import CONTEXT, make_tokenizer, write_folder
from xjax import LLM, EngineError, LoadError, Request, RequestError, SamplingParams
from xjax.checkpoints import digest
from xjax.engine import outputs
from xjax.engine.build import set_threads
from xjax.engine.pack import largest_shapes, shapes_of
from xjax.engine.transfer import Mover
from xjax.engine.warmup import source_digest

pytestmark = pytest.mark.device

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS = {"max_num_seqs": 4, "page_size": 8, "prefill_chunk_size": 32, "num_pages": 120}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder, tmp_path_factory):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def is_idle(llm):
    for _ in range(400):
        stats = llm.stats()
        if not (stats["running"] or stats["waiting"] or stats["pages_used_0"]):
            return True
        time.sleep(0.005)
    return False


def test_text_is_the_decoded_tokens(llm, tokenizer):
    result = llm.generate("Hello there", GREEDY)[0]
    assert (result.prompt, result.error, result.finished) == ("Hello there", None, True)
    assert result.prompt_token_ids == tokenizer.encode("Hello there").ids
    output = result.outputs[0]
    assert (output.finish_reason, output.stop_reason, len(output.token_ids)) == ("length", None, 24)
    assert output.text == tokenizer.decode(output.token_ids) and len(set(output.text)) > 8
    assert result.metrics.num_output_tokens == 24 and result.metrics.tokens_per_second > 0
    again = llm.generate([result.prompt_token_ids], GREEDY)[0]
    assert again.prompt is None and again.outputs[0].token_ids == output.token_ids
    array = llm.generate(np.array(result.prompt_token_ids), GREEDY)[0]
    assert array.outputs[0].token_ids == output.token_ids


def test_results_are_in_order_with_errors_in_their_places(llm):
    prompts = ["abc", "", [5, 6, 7], [10**6], "x" * 400, [], "abc", ["no", "ids"]]
    seen = {}
    results = llm.generate(prompts, GREEDY, on_result=lambda i, result: seen.setdefault(i, result))
    assert [result.error is None for result in results] == [
        True,
        False,
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert results[0].outputs[0].text == results[6].outputs[0].text
    assert seen == dict(enumerate(results))
    assert "empty" in str(results[1].error) and "0..98" in str(results[3].error)
    assert "400 tokens" in str(results[4].error) and str(CONTEXT) in str(results[4].error)
    assert all(isinstance(result.error, RequestError) for result in results if result.error)
    assert llm.generate([], GREEDY) == []


def test_each_prompt_can_have_its_own_parameters(llm):
    both = [GREEDY.replace(max_tokens=3), GREEDY.replace(max_tokens=5)]
    assert [len(r.outputs[0].token_ids) for r in llm.generate(["a", "b"], both)] == [3, 5]
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], both[:1])


def test_chat_goes_through_the_template(llm, tokenizer):
    messages = [{"role": "user", "content": "Hi </s>"}]
    result = llm.chat(messages, GREEDY)[0]
    expected = [0, 2, *tokenizer.encode("Hi <").ids, *[tokenizer.token_to_id(c) for c in "/s>"], 1, 3]
    assert result.prompt_token_ids == expected
    batch = llm.chat([messages, [{"role": "user", "content": 3}], messages], GREEDY)
    assert [item.error is None for item in batch] == [True, False, True]
    assert batch[2].outputs[0].token_ids == result.outputs[0].token_ids


def test_max_tokens_is_clipped_to_the_context(llm):
    output = llm.generate("abcd", GREEDY.replace(max_tokens=32000))[0].outputs[0]
    assert len(output.token_ids) == CONTEXT - 4 and output.finish_reason == "length"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("start", "size"), [(0, 1), (3, 5), (11, 2), (19, 5)])
def test_stop_strings(llm, start, size, include):
    whole = llm.generate("Tell me", GREEDY)[0].outputs[0]
    stop = whole.text[start : start + size]
    at = whole.text.index(stop)
    params = GREEDY.replace(stop=("~nowhere~", stop), include_stop_str_in_output=include)
    result = llm.generate("Tell me", params)[0]
    output = result.outputs[0]
    assert output.text == whole.text[: at + (size if include else 0)]
    assert output.token_ids == whole.token_ids[: at + size], (
        "usage counts to the token that completed the stop"
    )
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert result.metrics.num_output_tokens == at + size
    pieces = list(llm.stream("Tell me", params))
    assert "".join(piece.text for piece in pieces) == output.text
    assert sum(len(piece.token_ids) for piece in pieces) == at + size
    assert is_idle(llm)


def test_min_tokens_holds_back_stop_strings(llm):
    whole = llm.generate("Tell me", GREEDY)[0].outputs[0].text
    stop = whole[2]
    later = [i for i, character in enumerate(whole) if character == stop and i >= 5]
    params = GREEDY.replace(stop=(stop,), min_tokens=5)
    output = llm.generate("Tell me", params)[0].outputs[0]
    assert output.text == (whole[: later[0]] if later else whole)
    assert len(output.token_ids) >= 5
    params = params.replace(min_tokens=2)
    assert llm.generate("Tell me", params)[0].outputs[0].text == whole[: whole.index(stop, 2)]


def test_stop_token_ids(llm):
    whole = llm.generate("Tell me", GREEDY)[0].outputs[0]
    stop_id = whole.token_ids[4]
    at = whole.token_ids.index(stop_id)
    output = llm.generate("Tell me", GREEDY.replace(stop_token_ids=(stop_id,)))[0].outputs[0]
    assert (output.text, output.token_ids) == (whole.text[:at], whole.token_ids[: at + 1])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)


def test_an_end_token_of_generation_config_ends_the_answer(llm):
    """Id 3 is in generation_config.json alone."""
    params = SamplingParams(temperature=0, max_tokens=24, logit_bias={3: 100.0})
    output = llm.generate("Tell me", params)[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (
        "",
        [3],
        "stop",
        None,
    )
    assert len(llm.generate("Tell me", params.replace(ignore_eos=True))[0].outputs[0].token_ids) == 24


def test_log_probabilities(llm):
    result = llm.generate("Tell me", GREEDY.replace(logprobs=3, prompt_logprobs=2))[0]
    output = result.outputs[0]
    assert len(output.logprobs) == 24
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) == 3 and entry[token_id].rank == 1
        assert sorted(item.rank for item in entry.values()) == [1, 2, 3]
        assert all(item.logprob <= 0 for item in entry.values())
        assert entry[token_id].decoded_token == llm.tokenizer.token_bytes(token_id).decode()
    total = sum(entry[i].logprob for i, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) and result.prompt_logprobs[0] is None
    for token_id, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert token_id in entry and 2 <= len(entry) <= 3
    plain = llm.generate("Tell me", GREEDY)[0]
    assert plain.outputs[0].logprobs is None and plain.prompt_logprobs is None


def test_seeds_differ_between_requests_and_repeat(folder):
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(folder, seed=3, **OPTIONS) as llm:
            results = llm.generate(["same"] * 3, params.replace(n=2))
            runs.append([tuple(output.token_ids) for result in results for output in result.outputs])
    assert runs[0] == runs[1] and len(set(runs[0])) == 6


def test_defaults_of_the_model(llm, folder):
    assert llm.default_params() == SamplingParams(temperature=0.7, top_k=5)
    assert llm.has_chat_template
    with LLM(folder, generation_config="none", **OPTIONS) as plain:
        assert plain.default_params() == SamplingParams()


def test_without_a_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "bare", tokenizer=False)
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        LLM(folder, **OPTIONS)
    with LLM(folder, skip_tokenizer_init=True, **OPTIONS) as llm:
        results = llm.generate([[5, 6, 7], "text", [5]], [GREEDY, GREEDY, GREEDY.replace(stop=("a",))])
        assert len(results[0].outputs[0].token_ids) == 24 and results[0].outputs[0].text == ""
        assert "token ids" in str(results[1].error) and "stop_token_ids" in str(results[2].error)
        assert llm.tokenizer is None and not llm.has_chat_template


def test_two_at_once(llm, folder):
    with LLM(folder, **OPTIONS) as other:
        expected = llm.generate("ab", GREEDY)[0].outputs[0].token_ids
        assert other.generate("ab", GREEDY)[0].outputs[0].token_ids == expected
    assert llm.generate("ab", GREEDY)[0].outputs[0].token_ids == expected
    closed = other.generate(["ab", "cd"], GREEDY)
    assert all(isinstance(result.error, EngineError) for result in closed)
    with pytest.raises(EngineError, match="closed"):
        other.stream("ab", GREEDY)


# ---- streams -----------------------------------------------------------------------------


def test_a_stream_folded_is_the_answer(llm):
    params = GREEDY.replace(n=2, temperature=1.0, seed=5, logprobs=1)
    result = llm.generate("Tell me", params)[0]
    texts, ids, reasons, scores = ["", ""], [[], []], [None, None], [[], []]
    for chunk in llm.stream("Tell me", params):
        texts[chunk.sample_id] += chunk.text
        ids[chunk.sample_id] += chunk.token_ids
        scores[chunk.sample_id] += chunk.logprobs
        reasons[chunk.sample_id] = chunk.finish_reason
        assert chunk.num_prompt_tokens == 7
    assert texts == [output.text for output in result.outputs]
    assert ids == [output.token_ids for output in result.outputs]
    assert reasons == ["length", "length"]
    assert scores == [output.logprobs for output in result.outputs]
    assert len(list(llm.stream([{"role": "user", "content": "Hi"}], GREEDY))) > 1
    with pytest.raises(RequestError, match="empty"):
        llm.stream("", GREEDY)


@pytest.mark.parametrize("way", ["close", "close unread", "drop", "drop unread"])
def test_a_stream_left_early_is_aborted(llm, way):
    before = llm.stats()["aborts"]
    stream = llm.stream("Tell me", GREEDY.replace(max_tokens=240))
    if "unread" not in way:
        next(stream)
    if way.startswith("close"):
        stream.close()
        assert list(stream) == []
    del stream
    deadline = time.monotonic() + 10
    while llm.stats()["aborts"] == before:
        assert time.monotonic() < deadline, "the request was not aborted"
        time.sleep(0.005)
    assert is_idle(llm)


def test_an_engine_that_stops_ends_a_stream_with_an_error(folder):
    llm = LLM(folder, **OPTIONS)
    stream = llm.stream("Tell me", GREEDY.replace(max_tokens=240))
    next(stream)
    threading.Timer(0.05, llm.close).start()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    assert list(stream) == []


# ---- interrupts and defects --------------------------------------------------------------


def test_an_interrupt_aborts_what_runs(llm):
    late = []
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate(["Tell me"] * 8, GREEDY.replace(max_tokens=240), on_result=lambda *_: late.append(1))
    timer.join()
    assert is_idle(llm)
    num_late = len(late)
    time.sleep(0.05)
    assert len(late) == num_late, "results were reported after the call had ended"


def test_what_on_result_raises_reaches_the_caller(llm, caplog):
    def fail(i, result):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        llm.generate(["ab", "cd", "ef"], GREEDY, on_result=fail)
    assert is_idle(llm)
    assert len(llm.generate(["ab"], GREEDY)) == 1


def test_a_defect_of_the_text_side_is_an_error_in_its_place(llm, monkeypatch, caplog):
    whole = outputs.ResultBuilder.add

    def add(self, delta):
        if self.result.prompt == "bad" and self.result.outputs[0].token_ids:
            raise ZeroDivisionError("ours")
        return whole(self, delta)

    monkeypatch.setattr(outputs.ResultBuilder, "add", add)
    results = llm.generate(["ok", "bad", "ok"], GREEDY)
    assert [result.error is None for result in results] == [True, False, True]
    assert "ours" in str(results[1].error) and is_idle(llm)


def test_a_full_queue_makes_a_batch_wait(folder):
    with LLM(folder, max_queue=2, **OPTIONS) as llm:
        results = llm.generate(["ab"] * 12, GREEDY)
        assert all(result.error is None for result in results)


def test_threads_asked_for_too_late_are_refused(llm):
    with pytest.raises(LoadError, match="too late"):
        set_threads(63)
    set_threads(None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_model_len": 10**6}, "1000000 is above"),
        ({"compile_cache": "relative"}, "absolute"),
        ({"nonsense": 1}, "unknown option 'nonsense'"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
    ],
)
def test_wrong_options(folder, options, text):
    with pytest.raises(LoadError, match=text):
        LLM(folder, **(OPTIONS | options))


COUNT_THREADS = """
import os, jax
from xjax.engine.build import set_threads
set_threads(3)
jax.numpy.ones(3).block_until_ready()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_threads_limit_what_steps_compute_with():
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")
    }
    command = [sys.executable, "-c", COUNT_THREADS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == 3


def test_what_it_starts_with_is_in_the_log(folder, caplog):
    logger = logging.getLogger("xjax.engine.llm")
    before = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        with LLM(folder, **OPTIONS) as llm:
            text = caplog.text
            assert "generation config" in text and "warning" not in text.lower()
            assert all(value in text for name, value in llm.plan.memory.table() if name != "available")
        caplog.clear()
        with LLM(folder, **{**OPTIONS, "num_pages": 9}):
            assert "the pages hold 64 tokens" in caplog.text and str(CONTEXT) in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(before)


def test_who_waits_for_a_place_in_the_queue_hears_that_the_call_is_over():
    batch = outputs.Batch(2, None)
    began = time.monotonic()
    batch.pause(0.01)
    batch.stop(OSError("disk full"))
    for wait in (lambda: batch.pause(60), batch.wait):
        with pytest.raises(OSError, match="disk full"):
            wait()
    assert time.monotonic() - began < 10


def test_a_prompt_that_is_refused_compiles_nothing(folder):
    """Or the program could not end before a program that nobody wants is made."""
    with LLM(folder, **OPTIONS) as llm:
        results = llm.generate(["x" * 400, ""], GREEDY)
        assert all(isinstance(result.error, RequestError) for result in results)
        with pytest.raises(RequestError, match="400 tokens"):
            llm.stream("x" * 400, GREEDY)
        assert not llm.engine.table._futures


def test_a_prompt_in_a_form_of_others_is_refused_in_its_place(llm):
    for prompts in ({"prompt_token_ids": [1]}, [{"prompt_token_ids": [1]}]):
        (result,) = llm.generate(prompts, GREEDY)
        assert isinstance(result.error, RequestError) and "list of token ids" in str(result.error)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, object()])
def test_what_is_no_prompt_at_all_is_refused(llm, prompts):
    for call in (llm.generate, llm.chat, llm.stream):
        with pytest.raises(RequestError, match="expected a prompt or a list of prompts, not"):
            call(prompts, GREEDY)


@pytest.mark.parametrize(
    "prompt", [b"abc", bytearray(b"abc"), {"prompt": "a"}, {0: 5}, [b"a"], [None], [[1.0]]]
)
def test_what_has_items_but_is_no_prompt_is_an_error_in_its_place(llm, prompt):
    results = llm.generate(prompt, GREEDY)
    assert ["text or a list of token ids" in str(result.error) for result in results] == [True]
    with pytest.raises(RequestError, match="text or a list of token ids"):
        llm.stream(prompt, GREEDY)


def test_a_chat_of_a_wrong_kind_is_one_error(llm):
    for messages in ("hello", {"role": "user", "content": "hello"}):
        results = llm.chat(messages, GREEDY)
        assert [type(result.error) for result in results] == [RequestError]


def test_prompts_may_be_arrays(llm):
    """A list of them, and the rows of one."""
    rows = np.array([[5, 6, 7], [8, 9, 10]])
    wanted = [result.outputs[0].token_ids for result in llm.generate(rows.tolist(), GREEDY)]
    for prompts in (rows, list(rows), iter(rows)):
        assert [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)] == wanted


def test_prompts_may_come_from_a_generator(llm):
    short = GREEDY.replace(max_tokens=3)
    listed = llm.generate(["ab", "cd"], short)
    drawn = llm.generate((text for text in ("ab", "cd")), (short for _ in range(2)))
    assert [item.outputs[0].token_ids for item in drawn] == [item.outputs[0].token_ids for item in listed]
    turn = {"role": "user", "content": "ab"}
    drawn = llm.chat(iter([turn]), short)
    assert drawn[0].outputs[0].token_ids == llm.chat([turn], short)[0].outputs[0].token_ids


@pytest.mark.parametrize("params", ["x", 5, {"n": 1}, [None], ["x"], [GREEDY, None]])
def test_parameters_of_a_wrong_kind_are_refused(llm, params):
    with pytest.raises(RequestError, match="expected SamplingParams or a list of them") as caught:
        llm.generate("a", params)
    assert caught.value.param == "params"
    with pytest.raises(RequestError, match="expected SamplingParams"):
        llm.stream("a", params)


def test_on_result_cannot_wait_for_its_own_thread(llm, caplog):
    with pytest.raises(RequestError, match="on_result must not wait"):
        llm.generate("a", GREEDY, on_result=lambda i, result: llm.generate("b", GREEDY))
    assert llm.generate("a", GREEDY)[0].error is None


def test_wait_ready_compiles_what_a_server_needs_and_then_counts_compiles(folder):
    with LLM(folder, **OPTIONS) as llm:
        shapes = shapes_of(llm.plan.scheduler)
        assert llm.max_model_len == min(CONTEXT, llm.engine.longest)
        llm.wait_ready()
        assert set(largest_shapes(llm.plan.scheduler)) <= set(llm.engine.table.ready)
        for shape in shapes:
            assert llm.engine.table.find(shape) is not None or shape.full
        for _ in range(600):
            if llm.engine.metrics.compiles is not None:
                break
            time.sleep(0.1)
        assert set(shapes) <= set(llm.engine.table.ready)
        llm.generate(["one", "two"], GREEDY.replace(logprobs=2))
        llm.generate("three", GREEDY)
        before = llm.stats()["compiles_after_warmup"]
        assert before == 0
        jax.jit(lambda x: x * 3 + 1)(np.ones(3, np.float32)).block_until_ready()
        assert llm.stats()["compiles_after_warmup"] == before + 1


def wait_until_warm(llm):
    for _ in range(600):
        if llm.engine.metrics.compiles is not None:
            return
        time.sleep(0.1)
    raise AssertionError("the warm-up did not end")


def test_what_a_server_runs_compiles_nothing_with_samples_and_swaps(folder):
    """Copies of pages for n > 1 and pages on their way to the host and back have programs of their own."""
    options = {**OPTIONS, "num_pages": 40, "preemption_mode": "swap", "cpu_mem_fold": 2.0}
    with LLM(folder, **options) as llm:
        llm.wait_ready()
        ready = set(llm.engine._mover._programs)
        assert ready >= {(kind, 0, 1) for kind in ("copy", "gather", "scatter")}
        wait_until_warm(llm)
        assert len(llm.engine._mover._programs) == 3 * len(llm.engine._mover.runs)
        llm.generate("twenty characters ..", GREEDY.replace(n=4))
        params = [GREEDY.replace(n=1 + i % 3, max_tokens=90, logprobs=i % 2 or None) for i in range(8)]
        results = llm.generate([f"{i} of eight " * 4 for i in range(8)], params)
        assert [len(result.outputs) for result in results] == [1, 2, 3, 1, 2, 3, 1, 2]
        seen = llm.cache_stats()
        assert seen["swap"]["out"]["sequences"] > 2 and seen["swap"]["in"]["pages"] > 20
        assert seen["copies"] >= 3
        assert llm.stats()["compiles_after_warmup"] == 0


def test_closing_while_moves_are_compiled_is_clean(folder, monkeypatch):
    begun, gate, made = threading.Event(), threading.Event(), []
    make = Mover._made

    def slow(self, kind, group, count):
        if count > 1:
            begun.set()
            assert gate.wait(20)
        made.append(count)
        return make(self, kind, group, count)

    monkeypatch.setattr(Mover, "_made", slow)
    llm = LLM(folder, **OPTIONS)
    llm.wait_ready()
    assert begun.wait(20)
    began = time.monotonic()
    llm.close()
    assert time.monotonic() - began < 15
    gate.set()
    threads = [thread for thread in threading.enumerate() if thread.name == "xjax-compile-moves"]
    for thread in threads:
        thread.join(60)
    assert made == [1, 4] and llm.engine.metrics.compiles is None
    assert not any(thread.is_alive() for thread in threads)


def test_a_process_that_ends_while_moves_are_compiled(folder):
    code = (
        f"from xjax import LLM; llm = LLM({str(folder)!r}, **{OPTIONS!r}); llm.wait_ready(); print('ready')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "ready", "")


def test_what_the_cache_did_and_holds(folder):
    with LLM(folder, **OPTIONS) as llm:
        text = "the same beginning of all of them, "
        assert llm.cache_stats()["records"] == 0
        first = llm.generate(text + "one", GREEDY)[0]
        second = llm.generate(text + "two", GREEDY.replace(n=3))[0]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(text) // 8 * 8)
        chunk = list(llm.stream(text + "six", GREEDY.replace(n=2)))[-1]
        assert chunk.num_cached_tokens == second.num_cached_tokens
        seen = llm.cache_stats()
        assert (seen["hits"], seen["hit_tokens"]) == (2, 2 * second.num_cached_tokens)
        assert seen["misses"]["unknown"] == 1 and seen["misses"]["short"] == 0
        assert seen["cached_tokens"] == 8 * seen["records"] > 80
        assert seen["pages"] == [
            {"used": 0, "idle": seen["records"], "cached": seen["records"], "total": OPTIONS["num_pages"] - 1}
        ]
        assert seen["host_slots"] == [{"used": 0, "total": 0}]
        assert seen["stored"] == seen["records"] + seen["evicted"]
        assert llm.clear_cache() == seen["records"]
        assert llm.cache_stats()["records"] == 0 and llm.clear_cache() == 0
        assert llm.generate(text + "two", GREEDY)[0].num_cached_tokens == 0
        llm.generate("x", GREEDY.replace(max_tokens=1))
        assert llm.cache_stats()["misses"]["short"] == 1
    with pytest.raises(EngineError, match="closed"):
        llm.clear_cache()


def test_who_clears_the_cache_of_an_engine_that_dies_hears_of_it(folder, monkeypatch, caplog):
    with LLM(folder, **OPTIONS) as llm:
        gate = threading.Event()

        def die():
            gate.wait(20)
            raise ZeroDivisionError("made up")

        llm.engine._command(die)
        waiting = [llm.engine.clear_cache() for _ in range(3)]
        waiting[0].cancel()
        gate.set()
        for future in waiting[1:]:
            with pytest.raises(EngineError, match="made up"):
                future.result(20)
        with pytest.raises(EngineError, match="made up"):
            llm.clear_cache()


def test_nobody_may_wait_for_the_cache_on_the_output_thread(llm, caplog):
    with pytest.raises(RequestError, match="own thread"):
        llm.generate("abc", GREEDY, on_result=lambda i, result: llm.clear_cache())


def test_steps_are_counted_by_their_time(llm):
    before = llm.stats()
    llm.generate("one", GREEDY.replace(max_tokens=5))
    after = llm.stats()
    steps = after["engine_steps"] - before["engine_steps"]
    assert steps >= 5
    for name in ("step_seconds", "host_seconds"):
        assert after[f"{name}_count"] - before[f"{name}_count"] == steps
        assert after[f"{name}_sum"] > before[f"{name}_sum"]
        bounds = [key for key in after if key.startswith(f"{name}_le_")]
        counts = [after[key] for key in bounds]
        assert counts == sorted(counts) and counts[-1] <= after[f"{name}_count"]
        assert [float(key.rpartition("_")[2]) for key in bounds] == sorted(
            float(key.rpartition("_")[2]) for key in bounds
        )


def test_the_first_event_tells_of_the_queue(folder):
    """One row and two requests: the second waits for as long as the first runs."""
    with LLM(folder, **{**OPTIONS, "max_num_seqs": 1}) as llm:
        llm.generate("warm", GREEDY)
        events, done = {"a": [], "b": []}, threading.Event()

        def sink(event):
            events[event.request_id].append((time.monotonic(), event))
            if event.request_id == "b" and event.finish_reason is not None:
                done.set()

        ids = tuple(llm.front.encode_prompt("one"))
        arrival = time.monotonic()
        for name in events:
            sampling = GREEDY.replace(seed=1, max_tokens=60)
            request = Request(request_id=name, prompt_ids=ids, sampling=sampling, arrival=arrival)
            llm.engine.submit(request, sink)
        assert done.wait(60)
        for got in events.values():
            assert [event.queue_seconds is None for _, event in got] == [False] + [True] * (len(got) - 1)
        (first, a), (last, _) = events["a"][0], events["a"][-1]
        (begun, b) = events["b"][0]
        assert 0 <= a.queue_seconds <= first - arrival
        assert (last - first) * 0.5 < b.queue_seconds <= begun - arrival


# ---- what names pages that outlive the process --------------------------------------------


def test_the_lasting_namespace_is_of_the_model_not_of_its_name(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XJAX_HOME", str(tmp_path / "home"))
    hashed, read = [], digest._hash
    monkeypatch.setattr(digest, "_hash", lambda path: hashed.append(path) or read(path))
    copy, changed = tmp_path / "other name", tmp_path / "changed"
    for target in (copy, changed):
        shutil.copytree(folder, target)
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    spaces = {}
    for path in (folder, copy, changed):
        with LLM(path, **OPTIONS) as llm:
            if path == folder:
                llm.generate("hi", GREEDY.replace(max_tokens=1))
                identity = llm.namespace._identify()
            assert path not in {file.parent for file in hashed}  # neither a start nor an answer needs it
            spaces[path] = llm.namespace.get()
            # The device's pages are those of this process.
            assert spaces[path] != llm.plan.scheduler.namespace
    assert spaces[folder] == spaces[copy] != spaces[changed]
    assert (identity.family, identity.page_size, identity.page_dtype) == ("llama", 8, "float32")
    assert (identity.dtype, identity.kernels) == ("float32", llm.options.kernels)
    assert identity.config == llm.plan.config and identity.layers == llm.model.spec
    assert identity.arithmetic[0] != source_digest() and identity.coding == {}
