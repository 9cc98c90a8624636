"""Start-up times and peak memory of a child whose behaviour is known."""

import resource
import sys

import pytest

from xjax.errors import EngineError
from xjax_server.bench.offline.startup import generate_command, time_start

SLOW = "import sys, time; time.sleep(0.3); sys.stdout.write('a'); sys.stdout.flush(); time.sleep(0.3)"
LARGE = "import sys; x = bytearray(b'a') * int(sys.argv[1]); print(len(x))"
HOME = "import os; print(os.environ['XJAX_HOME'])"


def test_first_byte_and_end(tmp_path):
    start = time_start([sys.executable, "-c", SLOW], tmp_path)
    assert 0.3 <= start.first_seconds <= start.total_seconds - 0.25


def test_peak_is_of_this_child(tmp_path):
    # A child begins with the peak of the process that starts it; what counts lies above that.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    large = time_start([sys.executable, "-c", LARGE, str(own + 200 * 10**6)], tmp_path)
    small = time_start([sys.executable, "-c", "print(1)"], tmp_path)
    assert 200e6 < large.peak_bytes - own < 300e6
    assert small.peak_bytes < own * 1.1 + 50e6


def test_home_is_handed_on(tmp_path):
    time_start(
        [sys.executable, "-c", f"{HOME}; assert os.environ['XJAX_HOME'] == {str(tmp_path)!r}"], tmp_path
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no model')", "code 1: no model"),
        ("pass", "code 0: it printed nothing"),
    ],
)
def test_failure_says_why(code, message, tmp_path):
    with pytest.raises(EngineError, match=message):
        time_start([sys.executable, "-c", code], tmp_path)


def test_command_runs_our_command_line(tmp_path):
    command = generate_command("no/such.gguf", "hello", threads=2, num_tokens=4)
    with pytest.raises(EngineError, match=r"code 2: xjax: error: .*no/such\.gguf"):
        time_start(command, tmp_path)
