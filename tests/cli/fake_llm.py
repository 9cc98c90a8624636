"""An engine for the tests of the command line, with answers one can tell beforehand.

The answer to a prompt is "1:PROMPT 2:PROMPT 3:PROMPT ", a token a word, cut by max_tokens; the
answer to a chat is the same with the contents of its messages joined by "|". "fail" as prompt
fails the request, "defect" raises what is no error of ours, "slow" takes long between tokens,
"break" streams a token and then fails in the engine.
Run as a program, this file is `xjax` with that engine.
"""

import sys
import time
from dataclasses import dataclass, field

import xjax
from xjax.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from xjax.errors import EngineError, LoadError, RequestError

NUM_WORDS = 3


@dataclass
class FakeLLM:
    """Stands in for xjax.LLM; `made` holds every instance."""

    model: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    progress: object = None
    options: dict = field(default_factory=dict)
    has_chat_template: bool = True
    calls: list = field(default_factory=list)
    is_closed: bool = False
    made = []

    def __init__(self, model=None, *, revision=None, chat_template=None, progress=None, **options):
        if model == "missing":
            raise LoadError("no model named 'missing'")
        self.model, self.revision, self.chat_template = model, revision, chat_template
        self.options, self.calls, self.is_closed = options, [], False
        self.has_chat_template = model != "base"
        self.generation_defaults = {"temperature": 0.5}
        if progress:
            progress("loading weights", 1, 2)
            progress("loading weights", 2, 2)
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.is_closed = True

    def _words(self, prompt, params):
        text = prompt if isinstance(prompt, str) else "|".join(str(m) for m in prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            text = "|".join(message["content"] for message in prompt)
        if text == "defect":
            raise ZeroDivisionError("a defect\nwith two lines")
        if text == "fail":
            raise RequestError("messages: cannot be served", param="messages")
        if text == "slow":
            return [f"{i}:slow " for i in range(1000)]
        return [f"{i + 1}:{text} " for i in range(min(NUM_WORDS, params.max_tokens or NUM_WORDS))]

    def stream(self, prompt, params):
        self.calls.append((prompt, params))
        for i, word in enumerate(self._words(prompt, params)):
            if word.endswith(":break ") and i:
                raise EngineError("the step failed: made up")
            if word.endswith(":slow "):
                time.sleep(0.05)
            yield StreamChunk(
                sample_id=0, text=word, token_ids=(i,), num_prompt_tokens=7, num_cached_tokens=4
            )

    def _result(self, prompt, params):
        result = RequestOutput("0", prompt_token_ids=[1, 2], num_cached_tokens=1, finished=True)
        try:
            words = self._words(prompt, params)
        except RequestError as error:
            result.error = error
            return result
        for index in range(params.n):
            output = CompletionOutput(index, "".join(words), list(range(len(words))), finish_reason="stop")
            result.outputs.append(output)
        result.metrics = RequestMetrics(0.25, 1.25, sum(len(output.token_ids) for output in result.outputs))
        return result

    def generate(self, prompts, params, *, on_result=None):
        is_one = isinstance(prompts, str)
        asked = [(prompts, params)] if is_one else list(zip(prompts, params, strict=True))
        self.calls += asked
        results = []
        for prompt, one in asked:
            results.append(self._result(prompt, one))
            if prompt == "slow" and one.max_tokens is None:
                time.sleep(5)
        # Results come in any order.
        for position in reversed(range(len(results))):
            if on_result:
                on_result(position, results[position])
        return results

    def chat(self, messages, params, *, on_result=None):
        is_one = bool(messages) and isinstance(messages[0], dict)
        if is_one:
            self.calls.append((messages, params))
            return [self._result(messages, params)]
        return self.generate(messages, params, on_result=on_result)


if __name__ == "__main__":
    xjax.LLM = FakeLLM
    from xjax_server.cli import main

    sys.exit(main())
