"""Write the tables in docs/ that are made from the code; the tests compare them with the files.

scripts/write_docs.py          write docs/options.md, docs/commands.md, docs/api.md and docs/models.md
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from xjax.checkpoints.dequantize import BLOCK_TYPES
from xjax.checkpoints.quantized.methods import METHODS
from xjax.config import EngineOptions
from xjax.models.registry import Entry, supported
from xjax.request import SamplingParams
from xjax_server.cli.app import app
from xjax_server.cli.terminal.options import HIDDEN_ENGINE_OPTIONS, SAMPLING_FLAGS, SAMPLING_HELP, flag
from xjax_server.openai.openapi import ERRORS, OPERATIONS
from xjax_server.openai.read import refused_fields
from xjax_server.openai.types import IGNORED, ContentPart, Message, SamplingFields, StreamOptions

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- made by scripts/write_docs.py; edit the code and run it again -->\n\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return _row(head) + _row("---" for _ in head) + "".join(_row(row) for row in rows)


def _default(item: "Field[Any]") -> str:
    if item.default_factory is not MISSING:
        return "none"
    if item.default in (None, ()):
        return "none"
    return f"`{item.default}`".lower() if isinstance(item.default, bool) else f"`{item.default}`"


def _engine_rows() -> Iterable[list[str]]:
    for item in fields(EngineOptions):
        spelled = [*map(flag, item.metadata.get("aliases", ())), *filter(None, [item.metadata.get("short")])]
        aliases = ", ".join(f"`{name}`" for name in spelled)
        # Where the platform decides, the help says how, behind these words.
        text, _, decided = item.metadata["help"].partition("; default: ")
        if "choices" in item.metadata:
            text += f" ({', '.join(item.metadata['choices'])})"
        is_python = item.name in HIDDEN_ENGINE_OPTIONS
        name = f"`{item.name}` (Python only)" if is_python else f"`{flag(item.name)}`"
        default = decided if item.default is None else f"`{item.default}`"
        yield [name, aliases, default, text]


def _sampling_rows() -> Iterable[list[str]]:
    for item in fields(SamplingParams):
        spelled = f"`{flag(item.name)}`" if item.name in SAMPLING_FLAGS else ""
        yield [f"`{item.name}`", spelled, _default(item), SAMPLING_HELP[item.name]]


def options_page() -> str:
    """Text of docs/options.md: every option with its default."""
    return (
        "# Options\n\n" + NOTE + "## Engine\n\n"
        "Flags of `xjax generate`, `xjax chat` and `xjax serve`; keyword arguments of `xjax.LLM` under the "
        "same names with underscores, which the command line takes too.\n\n"
        + _table(["option", "also", "default", "meaning"], _engine_rows())
        + "\n## Sampling\n\n"
        "Fields of `xjax.SamplingParams` and of a line of `--input`. On the command line the model's own "
        "`generation_config.json` comes before these defaults, unless `--generation-config none`.\n\n"
        + _table(["field", "flag", "default", "meaning"], _sampling_rows())
        + "\n## Environment\n\n"
        + _table(
            ["variable", "meaning"],
            [
                [
                    "`XJAX_HOME`",
                    "folder of models, compiled programs and tokenizers; default: `xjax` in the cache folder",
                ],
                ["`XDG_CACHE_HOME`", "the cache folder; default: `~/.cache`"],
                ["`XJAX_API_KEY`", "key that `xjax serve` asks for, beside those of `--api-key`"],
                ["`HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_HUB_CACHE`", "read by huggingface_hub, as everywhere"],
            ],
        )
    )


def _commands(group: Any, before: str = "") -> Iterable[tuple[str, Any]]:
    """Commands with their whole names; a command that has commands of its own stands as those."""
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from _commands(command, f"{before}{name} ") if inner else [(before + name, command)]


def commands_page() -> str:
    """Text of docs/commands.md: every command with its own flags."""
    program: Any = get_command(app)
    text = "# Commands\n\n" + NOTE
    rows = [[f"`{', '.join(item.opts)}`", item.help] for item in program.params]
    text += _table(["before the command", "meaning"], rows) + "\n"
    for name, command in _commands(program):
        rows, panels = [], set()
        for item in command.params:
            # A command may have a flag of its own under a name that others share.
            panel = getattr(item, "rich_help_panel", None)
            is_shared = panel in ("Sampling", "Engine")
            panels.add(panel if is_shared else None)
            if not is_shared and not getattr(item, "hidden", False):
                spelled = (
                    ", ".join(item.opts)
                    if item.opts[0].startswith("-")
                    else item.metavar or item.name.upper()
                )
                rows.append([f"`{spelled}`", item.help or ""])
        text += f"## xjax {name}\n\n{(command.help or '').strip()}\n\n"
        if rows:
            text += _table(["argument", "meaning"], rows) + "\n"
        if "Engine" in panels:
            kinds = "Sampling and engine flags" if "Sampling" in panels else "Engine flags"
            text += f"{kinds}: [options.md](options.md).\n\n"
    return text.rstrip("\n") + "\n"


API_INTRODUCTION = """\
What the server of OpenAI's API takes and gives, field by field. `/openapi.json` is the same for
programs.

- **supported**: does what OpenAI, or vLLM where the field is its own, documents.
- **refused**: would change the answer and is not built: 400, code `unsupported_parameter`, with any
  value but the harmless ones named here.
- **ignored**: changes no answer here; taken with any value, as is every field that is not listed.

`null` is the same as absent. Whole numbers may be written as `1.0`; a string or `true` where a number
belongs is a 400 whose `param` is the field's path (`messages.0.content`). A body is UTF-8 JSON without
lone surrogates.

"""
API_REPLIES = """\
## Replies

Replies have OpenAI's shapes. What is added to them or easily misread:

- `created` is in seconds; `model` is the name that was asked for; ids begin with `chatcmpl-` and
  `cmpl-`, and are in the header `x-request-id` too.
- `finish_reason` is `stop` or `length`; `stop_reason` beside it is the stop text or token id that ended
  the answer, `null` for the model's own end.
- `usage` counts a prompt once whatever `n` is; `prompt_tokens_details.cached_tokens` are prompt tokens
  whose pages were reused. Tokens up to and including the one that completed a stop text count, nothing
  after it.
- `logprobs` has an entry for each token that counts, the one that ended the answer included. A token's
  text is exact: where its bytes are no UTF-8 by themselves they are written as `\\xf0\\x9f`, in
  completions behind `bytes:`; `bytes` has them in chat. `text_offset` counts characters from the
  beginning of the choice's `text`.
- The choice of sample k of prompt i in completions has index i·n + k.
- With `max_tokens` 0 in completions no token is made: `echo` and `logprobs` then score a prompt.
- A prompt without a token is a 400, `empty_prompt`.
- A prompt is too long when it leaves no room for one token: 400, `context_length_exceeded`, with both
  numbers. `max_tokens` is never too large.

A stream is server-sent events: in chat the role of each choice, then deltas, then a chunk with the
`finish_reason`; with `include_usage` a last chunk with `usage` and no choices; `data: [DONE]`. Comments
(`: keep-alive`) come in every silence, from acceptance on. A failure after the start is an event with
the error object, then `[DONE]`. Tokens that came while a client did not read are put together into one
chunk.

## Errors

`{"error": {"message", "type", "param", "code"}}` with these statuses:

"""


def _range(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    if low is None or low < -(2**50):
        return ""
    above = "above " if "exclusiveMinimum" in schema else ""
    return f", {above}{low} to {high}" if high is not None and abs(high) < 2**50 else f", from {low}"


def _shape(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    for names in ("anyOf", "oneOf"):
        if names in schema:
            kinds = [_shape(item) for item in schema[names] if item.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema:
        return ""
    kind = schema.get("type", "any")
    if kind == "array":
        size = f" (at most {schema['maxItems']})" if "maxItems" in schema else ""
        return f"list of {_shape(schema['items'])}{size}"
    if kind == "string" and "maxLength" in schema:
        return f"string (at most {schema['maxLength']} characters)"
    return {"object": "object"}.get(kind, kind) + _range(schema)


def _field_rows(shape: type[BaseModel], without: type[BaseModel] = BaseModel) -> Iterable[list[str]]:
    """A row a field, supported ones first, without those of another model."""
    properties: dict[str, Any] = shape.model_json_schema()["properties"]
    refused = refused_fields(shape)
    for name, item in shape.model_fields.items():
        if name not in refused and name not in without.model_fields:
            needed = " (required)" if item.is_required() else ""
            yield [f"`{name}`", "supported", _shape(properties[name]) + needed, item.description or ""]
    for name, mark in refused.items():
        if name in without.model_fields:
            continue
        harmless = ", ".join(f"`{json.dumps(value)}`" for value in mark.harmless)
        yield [f"`{name}`", "refused", f"but {harmless}" if harmless else "", mark.why]


def api_page() -> str:
    """Text of docs/api.md: every field of every request."""
    text = "# API\n\n" + NOTE + API_INTRODUCTION
    rows = [[f"`{method.upper()} {path}`", summary] for (path, method), (summary, *_) in OPERATIONS.items()]
    text += _table(["endpoint", "meaning"], rows) + "\n"
    head = ["field", "", "type", "meaning"]
    text += "## Chat and completions\n\n" + _table(head, _field_rows(SamplingFields)) + "\n"
    for (path, _), (_, body, *_) in OPERATIONS.items():
        if body is not None:
            own = _table(
                head, _field_rows(body, SamplingFields if issubclass(body, SamplingFields) else BaseModel)
            )
            text += f"## POST {path}\n\n{own}\n" if body.model_fields else ""
    text += "### Parts\n\n"
    for shape in (Message, ContentPart, StreamOptions):
        text += f"`{shape.__name__}`: {(shape.__doc__ or '').strip()}\n\n"
        text += _table(head, _field_rows(shape)) + "\n"
    text += "### Ignored\n\n" + _table(
        ["field", "why"], ([f"`{name}`", why] for name, why in IGNORED.items())
    )
    return text + "\n" + API_REPLIES + _table(["status", "when"], ([*row] for row in ERRORS.items()))


MODELS_INTRODUCTION = """\
What `xjax generate`, `chat`, `serve` and `xjax.LLM` run: a folder as Hugging Face lays it out
(`config.json` and safetensors, in one file or in shards), a GGUF file, or what `xjax convert` made of
either ([converted.md](converted.md)). The architecture is the entry of
`architectures` in `config.json`, and `general.architecture` in a GGUF.

"""
MODELS_TESTS = """\

Logits: a tiny model of the family with random weights gives the logits of transformers within 1e-4 in
float32, whole, in chunks, token by token and among other rows; each part of the family switched off moves
them by over 100 times that; the same weights in a GGUF, laid out as llama.cpp's converter does, give them
too. In bfloat16 they stay as near to the float32 ones as those of transformers in bfloat16 do. A real
model's answers are followed token by token along those of transformers.

What a file does not say:

- Windows of every layer (Mistral 7B v0.1, StarCoder2, Qwen 2 with `use_sliding_window`) are not in a GGUF,
  and Mistral's is one of `llama`: such a file is run with full attention, as llama.cpp does.
- Mixtral's GGUF too is one of `llama`; that it has experts is read off it. Whether the weights of a token's
  experts are made to sum to one is known by family: not in `qwen2moe`, yes in the others, as in llama.cpp.
- OLMo 3's GGUF is one of `olmo2`; that it has windows is read off it. A `rope.scaling.attn_factor`
  there is taken for the whole of what YaRN multiplies by, the `attention_factor` of `config.json`: so
  llama.cpp's converter wrote it at first, now it writes `yarn_attn_factor`. Read in its source; no such file
  was tried.
- "longrope" and "dynamic" have other frequencies for long contexts than for short ones. Which are used
  goes by the longest sequence that the engine runs (`--max-model-len`, else the model's context) and never
  by the length of one sequence, so that no cached key changes its meaning. "longrope" takes its short list
  where the longest sequence lies within the original context. "dynamic" is plain up to the context that the
  model was trained for; `--max-model-len` may go up to `factor` times that, with the base of that length.

Refused with a line that says so: vision towers' inputs, and any architecture not listed.

## Tensor types

"""
MODELS_QUANTIZED = """\

With `--kernels numba` (`auto` on a CPU with AVX2, one device) a matrix that is only multiplied, and an
embedding, stay codes in memory:

| type | kept as | |
| --- | --- | --- |
| `q8_0`, `q4_0`, `q4_1`, `q5_0`, `q5_1`, `q4_k`, `q5_k`, `q6_k` | itself | at most 3 % more than the file |
| `iq4_nl`, `q3_k` | `q8_0`, `q6_k` | the same numbers in wider codes |
| other | numbers | as are router, experts of a mixture, norms and biases |

They stand for the numbers that `--kernels xla` loads, to the bit. Where the tensors of a fused matrix have
several types (`attn_v` of Q4_K_M files), each keeps its own, and so many products are made. Activations are
rounded to 8 bits a group of 32 on the way into a product: answers are near those of `--kernels xla`, not
equal.

## Quantized folders

What `quantization_config` of `config.json` says, by `quant_method`. Codes stay as they are, 4-bit ones two in
a byte, and stand for the difference of code and zero times the scale: in float32 the product that the
reference package rounds to the type of its scales, to the bit.

"""
MODELS_QUANTIZED_TESTS = """\

Tested: random matrices packed by the named package, against what it makes of them, to the bit; a tiny Llama
in most forms against the logits of transformers on the same numbers, within 1e-4; each part left out moves
them by over 100 times that; missing, cut and mistyped tensors and nonsense settings are errors of one line.

- Weights are quantized, activations are not (but those of packed weights, see below): an 8-bit model for
  8-bit activations runs with the model's dtype, which is more exact than what it was made for, and slower.
- q, k and v, or gate and up, are one product. Where they have different orders of inputs (`desc_act`), kinds
  or groups, or some are not quantized, they become numbers; as do an embedding and the experts of a mixture.
- Which modules are quantized follows from the tensors that are there, not from lists in the config.
- With `--kernels numba` integer codes of 4 and 8 bits are packed and multiplied as they are, as those of GGUF
  files, where scales belong to a channel or to groups of a multiple of 32 inputs in their own order. 8-bit
  codes with zeros, and 4-bit ones with zeros whose scales have more than 16 bits, are not.
- Other products turn codes into numbers block by block: such a model takes less memory, not less time.

Refused with a line that says so: bitsandbytes, hqq, aqlm, quanto, torchao and any method not listed; AWQ's
`gemv` forms, Marlin's, 4-bit floats, sparse and rotated weights. Take a bfloat16 or GGUF form of the model,
or one of the methods above.
"""
_REAL_MODELS = {"llama": "SmolLM2-135M", "gemma3": "Gemma-3-270M"}


def _model_row(entry: Entry) -> list[str]:
    # The modules' own words, on one line, without the family's name in front.
    text = " ".join((entry.module.__doc__ or "").split("\n\n")[0].split()).partition(": ")[2]
    names = [", ".join(f"`{name}`" for name in kind) for kind in (entry.hf, entry.gguf)]
    real = _REAL_MODELS.get(entry.module.__name__.rpartition(".")[2])
    return [entry.title, *names, text, f"logits, {real}" if real else "logits"]


def models_page() -> str:
    """Text of docs/models.md: every family of the registry, and how tensors may be stored and quantized."""
    head = ["family", "`config.json`", "GGUF", "what it is", "tested by"]
    text = "# Models\n\n" + NOTE + MODELS_INTRODUCTION + _table(head, map(_model_row, supported()))
    readable = [block for block in BLOCK_TYPES.values() if block.decode is not None]
    plain = [f"`{block.name}`" for block in readable if block.block_size == 1 and "float" in block.name]
    packed = [f"`{block.name}`" for block in readable if block.block_size > 1]
    rows = [["safetensors, GGUF", ", ".join(plain)], ["GGUF", ", ".join(packed)]]
    text += MODELS_TESTS + _table(["in", "read"], rows)
    methods = ([f"`{method.name}`", method.bits, method.what, method.tested] for method in METHODS)
    text += MODELS_QUANTIZED + _table(["method", "bits", "what is read", "tested against"], methods)
    return text + MODELS_QUANTIZED_TESTS + MODELS_DEVICES


MODELS_DEVICES = """\

## Several devices

With `--tensor-parallel N` (`-tp N`) the first N devices share each layer: of attention every device has its
heads and their pages, of the feed-forward (of each expert, too) its part of the width, of embedding and
head its part of the words. Weights are read straight to where they belong. A step adds up one vector a
token after each half of a layer (a shared expert adds another) and after the embedding, and puts the logits
together; weights and pages are never sent.

- N must divide the query heads, and either divide the kv heads or be a multiple of them. Then each kv head,
  and its pages, are held N / kv heads times, each copy for its part of the query heads: Gemma 3 270M, one kv
  head and four query heads, goes on 1, 2 or 4 devices; the default model, three and nine, on 1, 3 or 9.
  Another N is refused with those that would do.
- A feed-forward width or a vocabulary that N does not divide is held whole by every device. So are, of
  quantized matrices, inputs in an order of their own or in groups that N does not divide.
- A converted model is laid out for N devices as it is read, whatever N; it is kept as for one.
- Memory is planned for one device: `--num-pages` counts pages that all of them hold a part of.
- `--kernels numba` is for one device.
- A CPU stands for N devices, for a trial: that is slower than one. `LLM` and the command line see to that
  before JAX starts; later, set `JAX_NUM_CPU_DEVICES` in time.

Tested: logits against those of one device or of transformers within 1e-4 in float32, on 2 to 4 virtual CPU
devices; a random schedule with preemption gives the same tokens; what a compiled step sends is counted. Not
tested on several accelerators.
"""


PAGES = {
    "options.md": options_page,
    "commands.md": commands_page,
    "api.md": api_page,
    "models.md": models_page,
}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
