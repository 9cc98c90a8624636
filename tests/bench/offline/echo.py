"""A subject of the benchmark that computes nothing and takes as long as it is told.

    python -m tests.bench.offline.echo SECONDS [bad | dies | mute | packed]

`bad` answers other tokens than an honest one, `mute` none; `dies` ends at the first question about speed;
`packed` has weights of few bytes.
"""

import sys
from typing import Any

from xjax.errors import LoadError
from xjax_server.bench.offline.worker import serve


class Echo:
    """Times of a fixed length for any case."""

    def __init__(self, seconds: float, manner: str) -> None:
        self.seconds, self.manner = seconds, manner

    def describe(self) -> dict[str, Any]:
        sys.stdout.write("noise on standard output\n")
        size = 600 if self.manner == "packed" else 4000
        return {
            "weights_bytes": 4000, "read_weights": 1000, "read_bytes": size, "head_weights": 100,
            "kv": [[3, None], [2, 32]], "kv_width": 2.0, "pages_bytes": 0, "vocab_size": 500, "options": {},
        }  # fmt: skip

    def check(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        if self.manner == "absent":
            raise LoadError("no weights here")
        if self.manner == "mute":
            return {"ids": None}
        return {"ids": [prompt[0] + (self.manner == "bad")] * num_tokens}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        if self.manner == "dies":
            sys.stderr.write("something broke\n")
            sys.exit(3)
        return {"seconds": [self.seconds * len(prompt)]}

    def decode(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "two rows with one prompt"
        return {"seconds": [self.seconds * len(prompts)] * num_tokens, "host_seconds": 0.001}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Echo(float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
