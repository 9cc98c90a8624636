"""A running server around the fake backend, and the official client."""

import openai
import pytest

from tests.server.fake_backend import FakeBackend
from tests.server.running import RunningServer
from xjax_server.openai import routes


@pytest.fixture(scope="package")
def server():
    """Serves what the fake makes; tests must leave it as they found it."""
    with RunningServer(FakeBackend(), routes=routes, names=("small", "org/small")) as running:
        yield running


@pytest.fixture(scope="package")
def client(server):
    """The official client of `server`."""
    with connect(server) as found:
        yield found


def connect(server, key="none"):
    """The official client, without its own retries."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture
def special_server():
    """Starts servers around backends of one's choice: `special_server(backend, **more)`."""
    started = []

    def start(backend, **more):
        running = RunningServer(backend, routes=routes, **more)
        running.__enter__()
        started.append(running)
        return running

    yield start
    for running in started:
        running.__exit__(None, None, None)
