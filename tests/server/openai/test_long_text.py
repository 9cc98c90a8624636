"""A long text is worked on beside the streams, not before them."""

import threading

from tests.server.fake_backend import FakeBackend
from tests.server.openai.conftest import connect

LONG = "Streams go on while somebody sends a book. " * 9600  # some 400,000 characters


def test_a_stream_goes_on_while_a_long_text_is_encoded(special_server):
    server = special_server(FakeBackend(pace=0.005, max_model_len=1_000_000))
    is_open, chunks = threading.Event(), []

    def watch():
        messages = [{"role": "user", "content": "hi"}]
        with connect(server) as client:
            stream = client.chat.completions.create(model="small", messages=messages, stream=True)
            for chunk in stream:
                chunks.append(chunk)
                is_open.set()
                if stop.is_set():
                    break
            stream.close()

    stop, counts = threading.Event(), []
    watcher = threading.Thread(target=watch)
    watcher.start()
    is_open.wait(10)
    for _ in range(3):
        before = len(chunks)
        status, _, _ = server.request("POST", "/tokenize", {"prompt": LONG})
        counts.append(len(chunks) - before)
        assert status == 200
    stop.set()
    watcher.join(10)
    # Some 60 when encoding lets others run, at most 7 when it does not.
    assert min(counts) >= 15
