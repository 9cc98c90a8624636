"""An engine in one configuration, in a child process: scores of given tokens, and greedy continuations.

`python -m xjax_server.bench.quality.subject MODEL OPTIONS` starts it; OPTIONS is a JSON object of engine
options, `model` among them where another model is meant. Knows no other configuration.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import xjax
from xjax.config import cache_home
from xjax.errors import EngineError, RequestError
from xjax.request import SamplingParams
from xjax_server.bench.offline.worker import serve

_BEST = 2  # the best token, and by how much it is


class QualityEngine:
    """An LLM that scores texts. `options` are the engine's."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"compile_cache": str(cache_home() / "compiled"), "dtype": "float32"}
        settings |= {"model": model, **options}
        self._llm = xjax.LLM(**settings)

    def describe(self) -> dict[str, Any]:
        """Bytes of the weights, and the options as they were settled."""
        return {
            "weights_bytes": self._llm.plan.memory.weights,
            "options": {name: str(value) for name, value in vars(self._llm.options).items()},
        }

    def encode(self, text: str, num_tokens: int) -> dict[str, Any]:
        """The first `num_tokens` token `ids` of a text, and the `prefix` that the model begins with."""
        prefix = self._llm.front.encode_prompt("")
        ids = self._llm.front.encode_prompt(text)[len(prefix) :]
        if len(ids) < num_tokens:
            raise RequestError(f"the text has {len(ids)} tokens of this model, {num_tokens} are wanted")
        return {"ids": ids[:num_tokens], "prefix": prefix}

    def score(self, windows: Sequence[Sequence[int]], num_given: int) -> dict[str, Any]:
        """Score each token behind the first `num_given` of each window by those before it.

        For each window: `logprobs` of its tokens, the `best` token at each place, and the `margin` in
        log-probability by which it is.
        """
        params = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True, prompt_logprobs=_BEST)
        found: dict[str, list[Any]] = {"logprobs": [], "best": [], "margins": []}
        for result in self._llm.generate([list(window) for window in windows], params):
            if result.error is not None:
                raise result.error
            places = (result.prompt_logprobs or [])[num_given:]
            ids = result.prompt_token_ids[num_given:]
            ranked = [sorted((place or {}).items(), key=lambda item: item[1].rank or 0) for place in places]
            if not ranked or not all(len(items) >= _BEST for items in ranked):
                raise EngineError("the engine gave no log-probabilities of a prompt")
            found["logprobs"].append(
                [dict(items)[token].logprob for token, items in zip(ids, ranked, strict=True)]
            )
            found["best"].append([items[0][0] for items in ranked])
            found["margins"].append([items[0][1].logprob - items[1][1].logprob for items in ranked])
        return found

    def go_on(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """Greedy `ids` behind each prompt."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0, seed=0, ignore_eos=True)
        results = self._llm.generate([list(prompt) for prompt in prompts], params)
        for result in results:
            if result.error is not None:
                raise result.error
        return {"ids": [result.outputs[0].token_ids for result in results]}

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()


def answer(subject: QualityEngine, question: dict[str, Any]) -> dict[str, Any]:
    """Call what a question names."""
    do = question.pop("do")
    if do not in ("describe", "encode", "score", "go_on"):
        raise EngineError(f"a quality benchmark's worker knows no {do!r}")
    return getattr(subject, do)(**question)


if __name__ == "__main__":
    serve(QualityEngine(sys.argv[1], json.loads(sys.argv[2])), answer)
