"""The process: what is said and when, signals, drain, and every way to fail at start. Answers are made up."""

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.running import parse, read_all, until
from xjax.errors import LoadError
from xjax_server.lifecycle import _raise_file_limit, address_of, listen

PROGRAM = [sys.executable, "-m", "tests.server.program", "serve"]
ROOT = Path(__file__).resolve().parent.parent.parent


class Process:
    """`xjax serve` around a made-up engine, on a port of the system's choice."""

    def __init__(self, *arguments, port=0, environment=None):
        self._child = subprocess.Popen(
            [*PROGRAM, *arguments, *([] if "--uds" in arguments else ["--port", str(port)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        self.said = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._child.kill()
        self._child.communicate()

    def wait_for(self, text):
        """Read what it says until a line has `text`."""
        while not self.said or text not in self.said[-1]:
            line = self._child.stderr.readline()
            assert line, "".join(self.said)
            self.said.append(line)
        return self.said[-1]

    @property
    def port(self):
        line = next(line for line in self.said if "listening" in line)
        return int(re.search(r":(\d+);", line).group(1))

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def stream(self, **fields):
        """A connection on which a chat is streamed; its first bytes were read."""
        client = self.connect()
        body = {"model": "x/paced", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        data = json.dumps(body).encode()
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(data) + data
        )
        return client, client.recv(1000)

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def signal(self, number=signal.SIGTERM):
        self._child.send_signal(number)

    def end(self, timeout=60):
        """(exit code, everything that it said)."""
        _, rest = self._child.communicate(timeout=timeout)
        return self._child.returncode, "".join(self.said) + rest


@pytest.fixture
def paced():
    with Process("x/paced", "--drain-timeout", "1") as process:
        process.wait_for("openai.OpenAI")
        yield process


def test_what_it_says_can_be_followed(paced):
    said = "".join(paced.said)
    assert f"xjax: listening on http://127.0.0.1:{paced.port};" in said
    assert "xjax: serving x/paced" in said
    curl = re.search(r"curl (\S+) .* -d '(.*)'", said)
    assert curl.group(1) == f"http://127.0.0.1:{paced.port}/v1/chat/completions"
    asked = json.loads(curl.group(2))
    client, begin = paced.stream(**{**asked, "max_tokens": 3})
    with client:
        assert parse(begin + read_all(client))[2].endswith(b"data: [DONE]\n\n")
    assert paced.get("/v1/models")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_takes_no_more(paced, number):
    client, begin = paced.stream(max_tokens=30)  # 0.6 s
    idle = paced.connect()
    time.sleep(0.05)
    paced.signal(number)
    until(lambda: _is_refused(paced.port))
    with idle:
        idle.sendall(b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n")
        answer = b""
        while b"}}" not in answer:
            answer += idle.recv(4096)
        status, headers, body = parse(answer)
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert "retry-after" in headers
    with client:
        text = parse(begin + read_all(client))[2].decode()
    assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
    code, said = paced.end()
    assert code == 0
    assert "xjax: stopping: 1 requests run, up to 1 s; again to stop at once\n" in said
    assert said.endswith("xjax: stopped\n")
    assert "Traceback" not in said and "error" not in said.lower().replace("errors", "")


def _is_refused(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


def test_after_the_bound_what_runs_ends_with_an_error_event(paced):
    client, begin = paced.stream(max_tokens=4000)
    paced.signal()
    began = time.monotonic()
    with client:
        text = parse(begin + read_all(client))[2].decode()
    assert 0.8 < time.monotonic() - began < 20
    assert '"draining"' in text.split("\n\n")[-3] and text.endswith("data: [DONE]\n\n")
    code, said = paced.end()
    assert code == 0 and "they are ended" in said


def test_a_second_signal_ends_at_once(paced):
    client, _ = paced.stream(max_tokens=4000)
    paced.signal()
    until(lambda: _is_refused(paced.port))
    paced.signal()
    assert paced.end()[0] == 128 + signal.SIGTERM  # after the drain's bound it would be 0
    client.close()


def test_a_client_that_reads_nothing_does_not_hold_the_end_up(paced):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", paced.port))
    body = json.dumps(
        {"model": "x/paced", "prompt": ["hi"] * 100, "max_tokens": 4000, "stream": True}
    ).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    time.sleep(0.3)
    paced.signal()
    assert paced.end(15)[0] == 0
    client.close()


def test_health_answers_while_loading_and_a_signal_ends_it():
    with Process("x/slow-load") as process:
        process.wait_for("listening")
        assert process.get("/health")[::2] == (200, b'{"status": "loading"}')
        status, headers, _ = process.get("/ready")
        assert status == 503 and "retry-after" in headers
        process.signal()
        began = time.monotonic()
        assert process.end()[0] == 0
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(("model", "code", "line"), [
    ("no-load", 2, "xjax: error: the model is broken: made up"),
    ("defect", 1, "xjax: error: unexpected ZeroDivisionError: made up (--debug shows the trace)"),
])  # fmt: skip
def test_a_load_that_fails_is_a_line_and_a_code(model, code, line):
    with Process(f"x/{model}") as process:
        ended, said = process.end()
    assert ended == code
    assert said.splitlines()[-1] == line and "Traceback" not in said


def test_a_port_in_use_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process("x/slow-load", port=port) as process:
            code, said = process.end()
    assert code == 2
    line = (
        f"xjax: error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port"
    )
    assert said.splitlines() == [line]


def test_a_unix_socket(tmp_path):
    path = tmp_path / "xjax.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))  # what a killed process leaves
    with Process("x/tiny", "--uds", str(path)) as process:
        process.wait_for("curl")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert b'"x/tiny"' in parse(read_all(client))[2]
        with Process("x/tiny", "--uds", str(path)) as second:
            code, said = second.end()
            assert code == 2 and "Address already in use" in said
        file = tmp_path / "notes.txt"
        file.touch()
        with Process("x/tiny", "--uds", str(file)) as third:
            code, said = third.end()
            assert code == 2 and f"cannot listen on --uds {file}: it is there and is no socket" in said
            assert file.exists()
        process.signal()
        assert process.end()[0] == 0
    assert not path.exists()


def test_a_key_of_the_environment_is_asked_for():
    with Process("x/tiny", "--host", "127.0.0.1", environment={"XJAX_API_KEY": "secret"}) as process:
        process.wait_for("openai.OpenAI")
        assert process.get("/v1/models")[0] == 401
        assert process.get("/health")[0] == 200
        process.signal()
        code, said = process.end()
    assert code == 0 and "secret" not in said
    assert "-H 'Authorization: Bearer …'" in said


def test_a_model_without_a_template_is_asked_for_completions():
    with Process("x/no-template") as process:
        process.wait_for("openai.OpenAI")
        said = "".join(process.said)
        curl = re.search(r"curl (\S+) .* -d '(.*)'", said)
        assert curl.group(1) == f"http://127.0.0.1:{process.port}/v1/completions"
        assert json.loads(curl.group(2))["prompt"] == "Hello"
        assert "no chat template" in said


def test_as_many_files_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        _raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("host", ["no.such.name.invalid", "", "a" * 300, "\0"])
def test_a_host_that_is_none(host):
    with pytest.raises(LoadError, match="--host"):
        listen(host, 0)


def test_addresses():
    with listen("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        with contextlib.suppress(LoadError), listen("::1", 0) as listener:
            assert address_of(listener).startswith("http://[::1]:")
