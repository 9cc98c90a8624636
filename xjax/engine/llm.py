"""`LLM`: a model, its text front and an engine in one object, for Python programs and the command line.

    generate   prompts in, one result per prompt in order out
    chat       the same for lists of messages, through the model's chat template
    stream     one prompt, pieces as they are made
    embed      prompts in, one vector per prompt out

Everything heavy is made by `engine.build`; this is the text front around it.
"""

import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import jax
import numpy as np
import numpy.typing as npt

from xjax.backend import EventSink, cache_stats
from xjax.cache.identity import LateNamespace
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.checkpoints.digest import WeightFiles
from xjax.checkpoints.hub import pinned_sampling, resolve
from xjax.checkpoints.metadata import eos_ids, generation_defaults
from xjax.config import EngineOptions, cache_home
from xjax.engine.build import (
    EnginePlan,
    Progress,
    load_model,
    make_table,
    open_mesh,
    page_identity,
    plan_engine,
    set_cpu_devices,
    set_threads,
    start_engine,
    with_defaults,
)
from xjax.engine.outputs import (
    Batch,
    RequestOutput,
    ResultBuilder,
    Stream,
    Vector,
    as_array,
    failed,
    guarded,
    vector_sink,
)
from xjax.engine.pack import largest_shapes, shapes_of
from xjax.engine.step import StepSpec
from xjax.engine.warmup import prepare_kernels
from xjax.errors import CapacityError, LoadError, RequestError, XjaxError
from xjax.request import Request, SamplingParams
from xjax.text.answer import Answer, Delta
from xjax.text.front import Front
from xjax.text.template import load_template
from xjax.text.tokenizer import load_tokenizer

_log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)  # they have items, but no prompts
_MIX = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get distant seeds


class LLM:
    """A model ready to answer. Use it as a context manager, or call `close`.

    model                 folder, file, or name on the hub; None for the default model
    chat_template         file that replaces the model's own template
    skip_tokenizer_init   serve token ids alone
    progress              called with (what, done, total) while loading
    options               any field of `EngineOptions`
    Raises LoadError with one line when the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        chat_template: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        given = EngineOptions.from_mapping(options)
        set_threads(given.threads)
        set_cpu_devices(given.tensor_parallel)
        mesh = open_mesh(given.tensor_parallel)
        home = cache_home()
        fetch = None if progress is None else _fetch_progress(progress)
        path = resolve(
            None if model is None else str(model), revision=revision, cache_dir=home, progress=fetch
        )
        checkpoint = open_checkpoint(path)
        weights = WeightFiles.of(checkpoint.sources)
        device = jax.devices()[0]
        self.options = with_defaults(given, device)
        # Beside the weights, which take as long.
        kernels = _start(partial(prepare_kernels, self.options.kernels), "xjax-kernels")
        self._tokenizer, template = None, None
        if not skip_tokenizer_init:
            self._tokenizer = load_tokenizer(checkpoint, cache_dir=home)
            template = load_template(
                checkpoint, override=None if chat_template is None else Path(chat_template)
            )
        self._eos_ids = eos_ids(checkpoint) | (self._tokenizer.eos_ids if self._tokenizer else frozenset())
        self._front = (
            None if self._tokenizer is None else Front(self._tokenizer, template, eos_ids=self._eos_ids)
        )
        self.has_chat_template = template is not None
        self.generation_defaults: dict[str, float] = {}
        if self.options.generation_config == "auto":
            self.generation_defaults = dict(generation_defaults(checkpoint)) or pinned_sampling(path)
        self.model = load_model(
            checkpoint, dtype=self.options.dtype, kernels=self.options.kernels, device=device, mesh=mesh,
            progress=progress,
        )  # fmt: skip
        self.plan = plan_engine(self.model, self.options, device=device)
        _log_start(self.plan, self.generation_defaults)
        self._settle_kernels(kernels, given)
        table = make_table(
            self.model,
            self.plan,
            backend=self.options.kernels,
            cache=_program_folder(self.options.compile_cache, home),
            progress=progress,
        )
        self.engine = start_engine(self.model, self.plan, table)
        step = StepSpec(self.model.family, self.plan.config, self.options.kernels, mesh)
        dtype, coding = str(self.model.dtype), checkpoint.coding
        identify = partial(page_identity, step, self.plan, dtype=dtype, coding=coding, device=device)
        self.namespace = LateNamespace(identify, weights, home)
        self._serial = itertools.count()

    def _settle_kernels(self, kernels: Future[None], given: EngineOptions) -> None:
        """Wait until the kernels are there; what the user did not ask for by name may be missing."""
        try:
            kernels.result()
        except LoadError as error:
            if given.kernels != "auto":
                raise
            _log.warning("kernels: xla, since %s", error)
            self.options = self.options.replace(kernels="xla")

    # ---- many at once ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_result: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; text gets the tokenizer's own special tokens, token ids are taken as they are.

        on_result   called as results are complete, with their index; on another thread
        returns     one result a prompt, in order; a prompt that failed has `error` set
        """
        jobs = [(prompt, partial(self._encode, prompt)) for prompt in _many(prompts, SupportsIndex)]
        return self._run_all(jobs, params, on_result)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_result: Callable[[int, RequestOutput], None] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}; see `generate`."""
        encode = partial(self._encode_chat, tools=tools, **template_kwargs)
        jobs = [(None, partial(encode, item)) for item in _many(messages, Mapping)]
        return self._run_all(jobs, params, on_result)

    def _run_all(
        self,
        jobs: Sequence[tuple[Any, Callable[[], list[int]]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        on_result: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        each = self._params_of(params, len(jobs))
        self._check_thread()
        batch, ready = Batch(len(jobs), on_result), []
        for i, (prompt, encode) in enumerate(jobs):
            text, request_id = prompt if isinstance(prompt, str) else None, self._next_id()
            try:
                ready.append((i, self._request(request_id, encode(), each[i]), text))
            except XjaxError as error:
                batch.settle(i, failed(request_id, text, error))
        try:
            self.engine.prepare([request for _, request, _ in ready])
            for i, request, text in ready:
                self._submit(i, request, text, batch)
            return batch.wait()
        except BaseException as error:
            batch.stop(error)
            for _, request, _ in ready:
                self.engine.abort(request.request_id)
            raise

    def _submit(self, i: int, request: Request, text: str | None, batch: Batch[RequestOutput]) -> None:
        builder = ResultBuilder(request, text, self._tokenizer)
        answer = Answer(request, self._tokenizer, self.engine, _folding(builder, partial(batch.settle, i)))
        try:
            self._enter(request, guarded(batch, i, answer, request), batch)
        except XjaxError as error:
            batch.settle(i, failed(request.request_id, text, error))

    def _enter(self, request: Request, sink: EventSink, batch: Batch[Any]) -> None:
        """Queue a request, after a wait where the queue is full, of its own batch at the latest."""
        while True:
            try:
                self.engine.submit(request, sink)
                return
            except CapacityError:
                batch.pause(0.05)

    def _check_thread(self) -> None:
        if self.engine.is_output_thread:
            raise RequestError("on_result must not wait for the engine: its own thread would do the work")

    # ---- vectors ----

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Pool the hidden states of prompts, as the head would read them, into one vector each.

        prompts      texts or lists of token ids, as `generate` takes them
        pooling      "last": those of the last token; "mean": of all of them
        normalize    divide each vector by its length
        dimensions   keep so many numbers, the first ones; None: all E
        returns      [n, E] float32, in order
        Raises the error of the first prompt that cannot be computed; the others are given up then.
        """
        size = self.plan.config.embed_dim
        is_count = isinstance(dimensions, int) and not isinstance(dimensions, bool)
        if dimensions is not None and not (is_count and 1 <= dimensions <= size):
            raise RequestError(f"dimensions must be from 1 to {size}, not {dimensions!r}", param="dimensions")
        self._check_thread()
        params = SamplingParams(temperature=0)
        requests = [
            self._request(self._next_id(), self._encode(prompt), params, pooling=pooling or "")
            for prompt in _many(prompts, SupportsIndex)
        ]
        batch: Batch[Vector] = Batch(len(requests), None)
        try:
            self.engine.prepare(requests)
            for i, request in enumerate(requests):
                self._enter(request, vector_sink(batch, i), batch)
            return as_array(batch.wait(), dimensions or size, normalize=normalize)
        except BaseException as error:
            batch.stop(error)
            for request in requests:
                self.engine.abort(request.request_id)
            raise

    # ---- one at a time ----

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Stream:
        """Yield the pieces of an answer as they are made; closing the iterator aborts the request.

        prompt   text, token ids or a list of messages
        Raises RequestError at once for a prompt that cannot be served.
        """
        given = prompt if isinstance(prompt, _NO_LISTS) else _listed(prompt)
        if isinstance(given, list) and given and isinstance(given[0], Mapping):
            ids = self._encode_chat(given, tools=tools, **template_kwargs)
        else:
            ids = self._encode(given)
        request = self._request(self._next_id(), ids, self._params_of(params, 1)[0])
        self.engine.prepare([request])
        return Stream(request, self._tokenizer, self.engine)

    # ---- parts ----

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None with `skip_tokenizer_init`."""
        return self._tokenizer

    @property
    def front(self) -> Front:
        """The text front. Raises RequestError with `skip_tokenizer_init`."""
        if self._front is None:
            raise RequestError("this model was loaded without a tokenizer; give token ids", param="prompt")
        return self._front

    def default_params(self) -> SamplingParams:
        """Sampling as the model's generation_config recommends it."""
        defaults: dict[str, Any] = self.generation_defaults
        return SamplingParams(**defaults)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus answer that the longest single request may have."""
        return self.engine.longest

    def wait_ready(self) -> None:
        """Compile every step and move of pages that a server can need; return as soon as no request has to
        wait for one.

        Raises LoadError for a program that fails the audit and EngineError for one that cannot be compiled.
        """
        config, table = self.plan.scheduler, self.engine.table
        shapes = shapes_of(config)
        first = largest_shapes(config)
        table.prepare([*first, *(shape for shape in shapes if shape not in first)])
        moves = _start(partial(self.engine.prepare_moves, singly=True), "xjax-compile-moves")
        table.wait(first)
        moves.result()

        def go_on() -> None:
            with suppress(XjaxError):  # whoever needs what failed gets the error
                self.engine.prepare_moves()
                table.wait(shapes)
                self.engine.end_warm_up()

        # No daemon, for it may be inside the compiler when the process wants to end; it ends soon then.
        threading.Thread(target=go_on, name="xjax-compile-moves", daemon=False).start()

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges of the engine."""
        return self.engine.stats()

    def cache_stats(self) -> Mapping[str, Any]:
        """What the prefix cache and swapping have done and hold; the names: `xjax.backend.cache_stats`."""
        return cache_stats(self.engine.stats())

    def clear_cache(self) -> int:
        """Forget every kept prefix and return how many pages of tokens that were; running requests go on.

        Raises EngineError when the engine has stopped.
        """
        self._check_thread()
        return self.engine.clear_cache().result()

    def close(self) -> None:
        """Stop the engine; requests still running end with an error."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_id(self) -> str:
        return f"llm-{next(self._serial)}"

    def _params_of(self, params: Any, count: int) -> list[SamplingParams]:
        """One set of parameters a prompt, from one for all or a list of them."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params()] * count
        each = list(params) if isinstance(params, Iterable) else [params]
        wrong = next((item for item in each if not isinstance(item, SamplingParams)), None)
        if wrong is not None or None in each:
            kind = type(wrong).__name__
            raise RequestError(
                f"params: expected SamplingParams or a list of them, not {kind}", param="params"
            )
        if len(each) != count:
            raise RequestError(f"{count} prompts but {len(each)} sampling params", param="params")
        return each

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.front.encode_prompt(prompt)
        try:
            if not isinstance(prompt, _NO_LISTS):
                return [operator.index(item) for item in prompt]
        except TypeError:
            pass
        raise RequestError("a prompt is text or a list of token ids", param="prompt")

    def _encode_chat(self, messages: Messages, **kwargs: Any) -> list[int]:
        return self.front.encode_chat(messages, **kwargs)

    def _request(
        self, request_id: str, ids: Sequence[int], params: SamplingParams, *, pooling: str | None = None
    ) -> Request:
        if params.seed is None:
            serial = int(request_id.rpartition("-")[2])
            params = params.replace(seed=(self.options.seed + (serial + 1) * _MIX) % 2**64)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        return Request(
            request_id=request_id,
            prompt_ids=tuple(ids),
            sampling=params,
            eos_ids=self._eos_ids,
            arrival=time.monotonic(),
            pooling=pooling,
        )


def _start(work: Callable[[], None], name: str) -> Future[None]:
    """Run something beside this thread; at its end the process waits for it."""
    threads = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        return threads.submit(work)
    finally:
        threads.shutdown(wait=False)


def _listed(value: Any) -> list[Any]:
    """The items of a list, an array or a generator. Raises RequestError for what has none."""
    try:
        return [value] if isinstance(value, _NO_LISTS) else list(value)
    except TypeError as error:
        kind = type(value).__name__
        raise RequestError(f"expected a prompt or a list of prompts, not {kind}", param="prompt") from error


def _many(prompts: Any, part: type) -> list[Any]:
    """Prompts as a list, when they may also be a single one: a text, or a list of `part`."""
    items = _listed(prompts)
    if isinstance(prompts, _NO_LISTS) or not items or getattr(items[0], "ndim", 0):  # a row of token ids
        return items
    return [items] if isinstance(items[0], part) else items


def _folding(builder: ResultBuilder, settle: Callable[[RequestOutput], None]) -> Callable[[Delta], None]:
    def fold(delta: Delta) -> None:
        if builder.add(delta):
            settle(builder.result)

    return fold


def _log_start(plan: EnginePlan, defaults: Mapping[str, Any]) -> None:
    settings = ", ".join(f"{name} {value}" for name, value in defaults.items())
    _log.info("sampling as the model's generation config has it: %s", settings or "nothing in it")
    for name, value in plan.memory.table():
        _log.info("%-16s %s", name, value)
    if plan.memory.longest < plan.scheduler.max_model_len:
        _log.warning(
            "the pages hold %d tokens: longer requests are refused, though the context is %d",
            plan.memory.longest,
            plan.scheduler.max_model_len,
        )


def _program_folder(setting: str | None, home: Path) -> Path | None:
    if setting is None or setting == "none":
        return None
    return home / "programs" if setting == "auto" else Path(setting).expanduser()


def _fetch_progress(progress: Progress) -> Callable[[int, int | None, str], None]:
    def report(done: int, total: int | None, label: str) -> None:
        progress(label, done, total or 0)

    return report
