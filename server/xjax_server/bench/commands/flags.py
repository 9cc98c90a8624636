"""Flags of the commands that put servers under load. Imports nothing that takes time."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Flags of the commands that put servers under load."""

    concurrency: Annotated[
        str | None,
        typer.Option(help="requests at once, a case for each number; default: 1,4,8,16; at a rate: any"),
    ] = None
    request_rate: Annotated[
        str,
        typer.Option(help="requests a second at random times, a case for each; inf: the next when one ends"),
    ] = "inf"
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="requests of a case; default: 4 for each stream, else 32")
    ] = None
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 128
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 64
    shared_prefix: Annotated[int, typer.Option(help="tokens, of input-len, that all prompts begin with")] = 0
    repeats: Annotated[int, typer.Option(min=1, help="rounds over all cases, each with new prompts")] = 1
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="short requests before a case that do not count; default: its streams"),
    ] = None
    slo_ttft: Annotated[float | None, typer.Option(help="most ms to the first token, for goodput")] = None
    slo_tpot: Annotated[float | None, typer.Option(help="most ms for each further token, for goodput")] = None
    slo_e2e: Annotated[float | None, typer.Option(help="most ms to the end, for goodput")] = None
    seed: Annotated[int, typer.Option(help="of prompts and arrival times")] = 0
    nonce: Annotated[
        str | None,
        typer.Option(help="makes prompts new to every cache; default: drawn, and told in the result"),
    ] = None
    vocab_size: Annotated[int, typer.Option(min=2, help="token ids of prompts are below this")] = 30_000
