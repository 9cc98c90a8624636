"""`xjax` with a made-up engine: `python program.py serve tiny …`. Answers are those of FakeBackend.

Model names steer it: "slow-load" loads for a minute, "no-load" cannot be loaded, "defect" fails as no
program should; "no-template" has no chat template; "paced" takes 20 ms a token; others answer at once.
"""

import sys
import time
from collections import deque
from types import SimpleNamespace

import xjax
from tests.server.fake_backend import FakeBackend, small_front
from xjax.errors import LoadError
from xjax_server.cli import main


class FakeLLM:
    def __init__(self, model=None, **options):
        options.pop("progress")
        if model.endswith("slow-load"):
            time.sleep(60)
        if model.endswith("no-load"):
            raise LoadError("the model is broken: made up")
        if model.endswith("defect"):
            raise ZeroDivisionError("made up")
        self.engine = FakeBackend(pace=0.02 if model.endswith("paced") else 0.0)
        # What tests look at would grow for as long as a soak runs.
        self.engine.requests = deque(maxlen=10)
        self.engine.aborted = deque(maxlen=10)
        self.front = small_front(None) if model.endswith("no-template") else small_front()
        self.max_model_len = self.engine.max_model_len
        self.generation_defaults = {}
        self.options = SimpleNamespace(seed=options.get("seed", 0))
        sys.stderr.write(f"options {sorted(options.items())}\n")
        sys.stderr.flush()

    def wait_ready(self):
        pass

    def close(self):
        self.engine.close()


if __name__ == "__main__":
    xjax.LLM = FakeLLM
    sys.exit(main())
