"""A few hundred hostile requests against the whole API; scripts/soak does the same ten thousand times."""

import os
import threading

from tests.server.fake_backend import FakeBackend
from tests.server.hostile import KINDS, Witness, attack
from tests.server.running import RunningServer, until
from xjax_server.openai import routes

COUNT = 400


def test_hostile_requests_leave_nothing_and_disturb_nobody():
    with RunningServer(FakeBackend(pace=0.01), routes=routes, body_timeout=2.0, header_timeout=2.0) as server:
        address = ("127.0.0.1", server.port)
        attack(address, 8, name="small")
        num_files, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        with Witness(address, "small", 300) as witness:
            tally = attack(address, COUNT, name="small", seed=1)
        assert tally.bad == []
        assert len(tally.kinds) == len(KINDS)
        assert {200, 400, 404, 413, 415, 431} <= set(tally.statuses)
        assert witness.content == "hi" * 150
        assert witness.longest_gap < 10.0  # a stream that stands still; pace is for scripts/soak
        until(lambda: server.backend.num_live == 0 and not server.service.active)
        until(lambda: not server.lifecycle._server.server_state.connections, 10)
        assert server.metric('xjax_pages_used{group="0"}') == 0
        assert server.metric("xjax_active_requests") == 0
        until(lambda: len(os.listdir("/proc/self/fd")) <= num_files + 1)
        assert threading.active_count() <= num_threads + 2  # those for texts start when needed
