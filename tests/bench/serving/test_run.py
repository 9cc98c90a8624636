"""Whole runs against scripted servers: turns, warm-up, saved results, tables, comparing."""

import io
import json
import signal
import sys

import pytest
from rich.console import Console

from tests.bench.serving.fake_server import Reply, finish, serving, text
from xjax.errors import EngineError, RequestError
from xjax_server.bench import compare
from xjax_server.bench.beside import peers
from xjax_server.bench.beside import run as beside
from xjax_server.bench.beside.peers import Peer, Setting, Sizes
from xjax_server.bench.beside.servers import Server, ending_children, free_port
from xjax_server.bench.serving import report
from xjax_server.bench.serving.client import Endpoint
from xjax_server.bench.serving.cost import CostPlan, measure_cost
from xjax_server.bench.serving.load import Load
from xjax_server.bench.serving.measure import Slo
from xjax_server.bench.serving.prompts import IdPrompts, Shape
from xjax_server.bench.serving.run import HttpSubject, Plan, run_cases, run_url, with_model
from xjax_server.cli import main

SHAPE = Shape(input_len=6, output_len=3)
PLAN = Plan(loads=(Load(1), Load(2)), shape=SHAPE, num_prompts=4, repeats=2, slo=Slo(ttft=5.0), nonce="n")


def _complete(asked):
    if asked.line.startswith("GET"):
        return Reply(body={"data": [{"id": "first"}, {"id": "second"}]})
    count = asked.body["max_tokens"]
    if not asked.body["stream"]:
        usage = {"prompt_tokens": len(asked.body["prompt"]), "completion_tokens": count}
        return Reply(body={"choices": [{"text": "x"}], "usage": usage})
    return Reply([(0, text("x"))] * count + [(0, finish(len(asked.body["prompt"]), count, is_chat=False))])


def _quiet(label, done, total):
    pass


def _prompts():
    return IdPrompts(SHAPE, seed=0, vocab_size=1000)


def _run(script=_complete, plan=PLAN):
    with serving(script) as fake:
        endpoint = with_model(Endpoint(url=fake.url, model=""))
        return run_url(endpoint, _prompts(), plan, _quiet), fake


def _shown(result):
    out = io.StringIO()
    report.show(result, Console(file=out, width=220))
    return out.getvalue()


def test_a_running_server_is_measured():
    result, fake = _run()
    assert result["kind"] == "serving" and result["models"][0]["model"] == "first"
    assert result["machine"]["versions"]["aiohttp"]
    one, two = result["models"][0]["cases"]
    figures = two["subjects"]["server"]
    assert (one["streams"], two["streams"], two["rate"]) == (1, 2, None)
    assert figures["completed"] == 8 and figures["failed"] == 0 and figures["other_length"] == 0
    assert figures["output_tokens"]["low"] == figures["output_tokens"]["high"] == 3
    assert figures["prompt_tokens"]["low"] == figures["prompt_tokens"]["high"] == 6
    assert figures["goodput"]["median"] == figures["requests_per_second"]["median"] > 0
    assert json.loads(json.dumps(result)) == result
    # One list of models; warm-ups of as many as there are streams; four prompts, two loads, two rounds.
    assert len(fake.asked) == 1 + (1 + 2) + 4 * 2 * 2


def test_no_prompt_is_sent_twice():
    _, fake = _run()
    prompts = [tuple(asked.body["prompt"]) for asked in fake.asked if asked.body]
    assert len(set(prompts)) == len(prompts)
    _, again = _run()
    measured = set(prompts[3:])
    assert measured == {tuple(asked.body["prompt"]) for asked in again.asked[4:]}
    _, other = _run(plan=Plan(loads=(Load(1),), shape=SHAPE, num_prompts=4))
    assert not measured & {tuple(asked.body["prompt"]) for asked in other.asked[1:]}


def test_failures_and_other_lengths_are_told():
    def script(asked):
        if asked.body and asked.body["max_tokens"] == 3 and asked.body["prompt"][0] % 2:
            return Reply(status=503, body={"error": {"message": "no room"}})
        return Reply([(0, text("x")), (0, finish(6, 1, is_chat=False))]) if asked.body else _complete(asked)

    result, _ = _run(script, Plan(loads=(Load(2),), shape=SHAPE, num_prompts=30, warmup=0))
    figures = result["models"][0]["cases"][0]["subjects"]["server"]
    assert figures["failed"] > 0 and figures["completed"] > 0
    assert figures["other_length"] == figures["completed"]
    shown = _shown(result)
    assert f"{figures['failed']} failed: HTTP 503: no room" in shown
    assert "had another length" in shown


def test_a_server_that_refuses_everything_ends_the_run():
    with pytest.raises(RequestError, match="answers no request: HTTP 401: who are you"):
        _run(
            lambda asked: (
                Reply(status=401, body={"error": {"message": "who are you"}})
                if asked.body
                else _complete(asked)
            )
        )


def test_servers_take_turns_with_the_same_prompts():
    with serving(_complete) as one, serving(_complete) as two:
        order = []
        one.script = lambda asked: order.append("one") or _complete(asked)
        two.script = lambda asked: order.append("two") or _complete(asked)
        subjects = {
            name: HttpSubject(Endpoint(url=fake.url, model="m"), _prompts())
            for name, fake in (("one", one), ("two", two))
        }
        run_cases(subjects, Plan(loads=(Load(2),), shape=SHAPE, num_prompts=3, repeats=2, warmup=0), _quiet)
    assert order == (["one"] * 3 + ["two"] * 3) * 2
    first, second = (sorted(asked.body["prompt"] for asked in fake.asked) for fake in (one, two))
    assert first == second


def test_tables_and_comparing(tmp_path):
    result, _ = _run()
    text = _shown(result)
    for part in ("1 stream", "2 streams", "server", "0 of 8", "the load client took"):
        assert part in text
    slow = json.loads(json.dumps(result))
    slow["models"][0]["model"] = "other"
    figures = slow["models"][0]["cases"][0]["subjects"]["server"]
    figures["ttft"]["p50"] *= 3
    figures["tpot"] = None
    for name, item in (("a.json", result), ("b.json", slow)):
        compare.save(item, tmp_path / name)
    a, b = (compare.load(tmp_path / name, {"serving": report.numbers}) for name in ("a.json", "b.json"))
    out = io.StringIO()
    compare.compare(a, b, report.numbers, Console(file=out, width=160))
    lines = {
        line.rsplit(None, 3)[0]: line.split()[-1] for line in out.getvalue().splitlines() if "stream:" in line
    }
    assert lines["1 stream: server: ttft p50 s"] == "3.00"
    assert "1 stream: server: tpot p50 s" not in lines
    assert "not the same models: first and other" in out.getvalue()


def test_our_server_is_compared_with_the_engine_alone():
    result, _ = _run()
    for case in result["models"][0]["cases"]:
        figures = case["subjects"].pop("server")
        alone = json.loads(json.dumps(figures))
        alone["output_tokens_per_second"]["median"] = figures["output_tokens_per_second"]["median"] / 0.93
        case["subjects"] = {beside.OURS: figures, beside.ENGINE: alone}
    assert "2 streams: the server gives 93% of the tokens/s of the engine alone" in _shown(result)


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
    assert "is no result of a benchmark" in capsys.readouterr().err


def test_the_command_saves_and_shows(tmp_path, capsys):
    path = tmp_path / "out.json"
    flags = [
        "--concurrency",
        "2",
        "--num-prompts",
        "4",
        "--input-len",
        "6",
        "--output-len",
        "3",
        "--json",
        str(path),
    ]
    with serving(_complete) as fake:
        code = main(
            ["bench", "serve", "--url", fake.url, "--slo-ttft", "5000", "--extra", '{"top_k": 4}', *flags]
        )
    assert code == 0
    assert "2 streams" in capsys.readouterr().out
    assert json.loads(path.read_text())["flags"]["slo_ttft"] == 5.0
    assert fake.asked[-1].body["top_k"] == 4 and fake.asked[-1].body["model"] == "first"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency takes numbers"),
        (["--request-rate", "0"], "--request-rate takes numbers above 0"),
        (["--shared-prefix", "128"], "shared_prefix is part of the prompt"),
        (["--extra", "[]"], "--extra takes a JSON object"),
        (["--url", "http://127.0.0.1:9"], "cannot be asked"),
    ],
)
def test_wrong_flags_are_one_line(flags, message, capsys):
    assert main(["bench", "serve", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


NULL = [sys.executable, "-m", "xjax_server.bench.serving.null"]
HTTP = (
    "import http.server, sys; "
    "http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
)


def test_a_server_process_is_awaited_and_stopped():
    port = free_port()
    server = Server("files", [sys.executable, "-c", HTTP, str(port)], port=port, ready="/")
    try:
        server.wait(30)
        assert server.url.endswith(str(port))
        assert server.peak_bytes() is None or server.peak_bytes() > 1e6
        server.settle(5)
    finally:
        server.stop()
    with pytest.raises(EngineError, match="gone cannot be started"):
        Server("gone", ["/no/such/program"], port=port, ready="/")


def test_who_is_terminated_stops_what_he_started():
    with pytest.raises(SystemExit) as ended, ending_children():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_server_that_ends_says_why():
    server = Server(
        "bad", [sys.executable, "-c", "raise SystemExit('no weights')"], port=free_port(), ready="/"
    )
    try:
        with pytest.raises(EngineError, match="bad ended with code 1: no weights"):
            server.wait(30)
    finally:
        server.stop()


def _stream(delay):
    """A script that gives a token every so often."""

    def script(asked):
        count = asked.body["max_tokens"]
        return Reply([(delay, text("x"))] * count + [(0, finish(6, count, is_chat=False))])

    return script


def test_the_fastest_setting_is_chosen(monkeypatch):
    delays = {"slow": 0.05, "fast": 0.0, "broken": None}

    class Stub:
        def __init__(self, delay):
            self.context = serving(_stream(delay))
            self.url = self.context.__enter__().url

        def wait(self, seconds):
            pass

        def settle(self, seconds):
            pass

        def stop(self):
            self.context.__exit__(None, None, None)

    def start(peer, setting, sizes):
        if delays[setting.name] is None:
            raise EngineError("will not start")
        return Stub(delays[setting.name])

    monkeypatch.setattr(Peer, "start", start)
    peer = Peer(name="llama-server", model="m", program=("x",), settings=tuple(map(Setting, delays)))
    sizes = Sizes(threads=1, streams=2, tokens=9)
    chosen, tried = beside.try_settings(peer, _prompts(), PLAN, sizes, _quiet)
    assert chosen.name == "fast"
    assert [item["tokens_per_second"] is None for item in tried] == [False, False, True]
    assert tried[2]["error"] == "will not start"
    assert tried[1]["tokens_per_second"] > 2 * tried[0]["tokens_per_second"]


def test_peers_that_cannot_be_had_say_why(tmp_path):
    sizes = Sizes(threads=2, streams=4, tokens=100)
    for name, path, message in (
        ("llama-server", "/no/such", "cannot be run"),
        ("vllm", "/no/such", "cannot be run"),
        ("other", "x", "no peer is called 'other'"),
    ):
        with pytest.raises((EngineError, RequestError), match=message):
            peers.find(name, path, "model.gguf", sizes, tmp_path)


def test_llama_has_at_least_four_settings_and_its_build_flags(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llama-server"
    program.write_text("#!/bin/sh\necho version: 7\n")
    program.chmod(0o755)
    (tmp_path / "CMakeCache.txt").write_text(
        "CMAKE_BUILD_TYPE:STRING=Release\nGGML_NATIVE:BOOL=ON\nOTHER:BOOL=ON\n"
    )
    [peer] = peers.find(
        "llama-server", str(program), "m.gguf", Sizes(threads=2, streams=4, tokens=100), tmp_path
    )
    assert len(peer.settings) >= 4
    assert peer.build == {"build": "7", "CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON"}


def test_what_the_client_takes():
    plan = CostPlan(streams=(2,), output_len=20, seconds=0.005, repeats=1)
    [found] = measure_cost(plan)
    assert found["streams"] == 2
    assert 1e-6 < found["seconds_per_token"]["median"] < 0.02
    assert found["tpot"]["p50"] == pytest.approx(0.005, rel=0.5)
