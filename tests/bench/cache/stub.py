"""A subject of the cache benchmark that computes nothing: `python -m tests.bench.cache.stub OPTIONS`.

A prompt takes a millisecond for each token that it did not see before, whole pages of it.
"""

import json
import sys
from typing import Any

from xjax_server.bench.cache.subject import COUNTS, answer
from xjax_server.bench.offline.worker import serve


class Stub:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.seen: set[tuple[int, ...]] = set()

    def describe(self) -> dict[str, Any]:
        return {"vocab_size": 500, "page_size": 16, "page_bytes": 100, "pages": self.options["num_pages"] - 1}

    def first(self, prompt: list[int]) -> dict[str, Any]:
        assert len(prompt) < self.options["max_model_len"]
        cached = (len(prompt) - 1) // 16 * 16 if tuple(prompt) in self.seen else 0
        self.seen.add(tuple(prompt))
        return {"seconds": (len(prompt) - cached) / 1e3, "cached": cached}

    def work(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == self.options["max_num_seqs"]
        assert all(len(prompt) + num_tokens == self.options["max_model_len"] for prompt in prompts)
        is_shared = len({tuple(prompt[:32]) for prompt in prompts}) == 1
        is_on = not self.options.get("disable_prefix_cache")
        is_swapped = self.options["preemption_mode"] == "swap"
        assert is_swapped == ("cpu_mem_fold" in self.options)
        seconds = 1.0 + (not is_swapped) + 0.5 * (is_shared and not is_on)
        digest = "other" if not is_on and is_shared and sys.argv[2] == "wrong" else "same"
        return {
            "seconds": seconds,
            "work_seconds": 2 * seconds,
            "counts": dict.fromkeys(COUNTS, 3),
            "digest": digest,
        }

    def warm(self) -> dict[str, Any]:
        return {}

    def clear(self) -> dict[str, Any]:
        self.seen.clear()
        return {}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Stub(json.loads(sys.argv[1])), answer)
