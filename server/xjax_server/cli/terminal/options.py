"""Flags that several commands share, made from the dataclasses that hold their defaults.

`takes_engine_flags` adds the flags of the model, of the engine and, unless told otherwise, of sampling
to a command, which receives them as one `Flags` value. Values are checked where they are used, by
`SamplingParams` and `EngineOptions`, not here.
"""

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import typer

import xjax
from xjax.config import EngineOptions
from xjax.request import SamplingParams
from xjax_server.cli.terminal.console import ProgressBar, set_up_logging
from xjax_server.interrupts import ending_at_once, is_compiling

# `--seed` of the command line is the seed of the request.
HIDDEN_ENGINE_OPTIONS = ("seed",)

SAMPLING_HELP = {
    "max_tokens": "most tokens to generate; default: to the end of the context",
    "min_tokens": "tokens before which no end of sequence and no stop token is chosen",
    "temperature": "0 always takes the most likely token",
    "top_k": "choose among the k most likely tokens; 0 or -1: off",
    "top_p": "choose among the most likely tokens that hold this much of what top-k left; 1: off",
    "min_p": "drop tokens less likely than this share of the most likely one; 0: off",
    "repetition_penalty": "above 1 makes tokens of the prompt and the answer less likely; 1: off",
    "frequency_penalty": "taken off a token's logit for each time it is in the answer",
    "presence_penalty": "taken off a token's logit once it is in the answer",
    "logit_bias": "token id to what is added to its logit",
    "seed": "equal seeds give equal answers; default: each request its own, the same ones in every run",
    "n": "answers to one prompt",
    "stop": "end the answer before this text; may be given several times",
    "stop_token_ids": "token ids that end the answer",
    "include_stop_str_in_output": "keep the stop text at the end of the answer",
    "ignore_eos": "go on past the end of sequence",
    "skip_special_tokens": "leave special tokens out of the text",
    "logprobs": "give the log-probability of each token, and of this many most likely ones",
    "prompt_logprobs": "the same for the tokens of the prompt",
}
SAMPLING_FLAGS: dict[str, Any] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "stop": list[str],
    "n": int,
    "logprobs": int,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "ignore_eos": bool,
}
_MODEL_FLAGS: dict[str, tuple[Any, str]] = {
    "model": (
        str,
        "folder, file, user/repo, user/repo:Q4_K_M or user/repo/file.gguf; default: a small chat model",
    ),
    "revision": (str, "branch, tag or commit of a model that is downloaded"),
    "chat_template": (str, "file with a chat template that replaces the model's own"),
}


@dataclass(frozen=True)
class Flags:
    """What the shared flags were set to; only what was given is in the dictionaries."""

    model: str | None
    revision: str | None
    chat_template: str | None
    sampling: dict[str, Any]
    engine: dict[str, Any]
    verbose: bool = False

    def open_engine(self, progress: ProgressBar, *, num_prompts: int) -> "xjax.LLM":
        """Load the model for at most `num_prompts` at once; raises LoadError."""
        set_up_logging(self.verbose)
        options: dict[str, Any] = {"compile_cache": "auto", **self.engine}
        # Room for more sequences than there are would only take memory and start-up time.
        options.setdefault("max_num_seqs", self._sequences(num_prompts))
        # Wrong options are reported before anything is downloaded.
        EngineOptions.from_mapping(options)
        with ending_at_once():
            make = xjax.LLM  # brings JAX
        return make(
            self.model,
            revision=self.revision,
            chat_template=self.chat_template,
            progress=progress,
            **options,
        )

    @contextlib.contextmanager
    def running(self, progress: ProgressBar, *, num_prompts: int) -> "Generator[xjax.LLM]":
        """As `open_engine`, and closed at the end; Ctrl-C does not wait for what is being compiled."""
        with contextlib.ExitStack() as stack:
            try:
                yield stack.enter_context(self.open_engine(progress, num_prompts=num_prompts))
            except KeyboardInterrupt:
                if is_compiling():
                    stack.pop_all()  # `main` ends the process
                raise

    def _sequences(self, num_prompts: int) -> int:
        samples = num_prompts * self.params({}).n
        return min(1 << (samples - 1).bit_length(), EngineOptions().max_num_seqs)

    def params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The model's defaults under the flags under `more`; raises RequestError."""
        return SamplingParams(**{**defaults, **self.sampling, **more})


def flag(name: str) -> str:
    """Spelling of an option on the command line."""
    return "--" + name.replace("_", "-")


def _parameter(name: str, kind: Any, flags: tuple[str, ...], **settings: Any) -> inspect.Parameter:
    if kind is bool:
        settings["metavar"] = ""  # help would show a value, and a switch takes none
    annotation = Annotated[kind | None, typer.Option(*flags, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _value_type(annotation: Any) -> Any:
    """`int` of `int | None`."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if kinds else annotation


def _shared_parameters(has_sampling: bool) -> list[inspect.Parameter]:
    found = [_parameter(name, kind, (flag(name),), help=text) for name, (kind, text) in _MODEL_FLAGS.items()]
    found.append(_parameter("verbose", bool, ("--verbose", "-v"), help="show log lines"))
    for name, kind in SAMPLING_FLAGS.items() if has_sampling else ():
        found.append(
            _parameter(name, kind, (flag(name),), help=SAMPLING_HELP[name], rich_help_panel="Sampling")
        )
    for item in fields(EngineOptions):
        if item.name in HIDDEN_ENGINE_OPTIONS:
            continue
        names = (item.name, *item.metadata.get("aliases", ()))
        text = item.metadata["help"]
        if "choices" in item.metadata:
            text += f" ({', '.join(item.metadata['choices'])})"
        if item.default not in (None, False):
            text += f"; default: {item.default}"
        flags = (*(flag(name) for name in names), *filter(None, [item.metadata.get("short")]))
        found.append(
            _parameter(item.name, _value_type(item.type), flags, help=text, rich_help_panel="Engine")
        )
    return found


def takes(
    command: Callable[..., None], shared: list[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """Give a command parameters beside its own; `make` makes of their values its keyword argument `flags`."""
    own = inspect.signature(command)

    def run(**values: Any) -> None:
        given = {item.name: values.pop(item.name) for item in shared}
        command(**values, flags=make(given))

    kept = [parameter for name, parameter in own.parameters.items() if name != "flags"]
    run.__signature__ = own.replace(parameters=[*kept, *shared])  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def takes_engine_flags(command: Callable[..., None], *, has_sampling: bool = True) -> Callable[..., None]:
    """Give a command the shared flags; it receives them as the keyword argument `flags`."""
    return takes(command, _shared_parameters(has_sampling), _engine_flags)


def _engine_flags(values: dict[str, Any]) -> Flags:
    given = {name: value for name, value in values.items() if value not in (None, [])}
    options = [item.name for item in fields(EngineOptions) if item.name not in HIDDEN_ENGINE_OPTIONS]
    return Flags(
        model=given.get("model"),
        revision=given.get("revision"),
        chat_template=given.get("chat_template"),
        sampling={name: given[name] for name in SAMPLING_FLAGS if name in given},
        engine={name: given[name] for name in options if name in given},
        verbose=bool(given.get("verbose")),
    )
