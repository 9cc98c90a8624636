"""Where a chat's next turn parts from the pages of the last one, as text. Imported by the one command that
shows it, since the text front takes tenths of a second to import.
"""

import json
from pathlib import Path
from typing import Any, cast

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.checkpoints.hub import resolve
from xjax.checkpoints.metadata import eos_ids
from xjax.config import cache_home
from xjax.errors import LoadError
from xjax.text.front import Front
from xjax.text.template import load_template
from xjax.text.tokenizer import load_tokenizer
from xjax.text.turns import Turns, thought_marks, two_turns
from xjax_server.cli.terminal.console import ProgressBar, write

_QUESTION = "Which city is the capital of France, and what is it known for?"
_ANSWER = "Paris. It is known for the Eiffel Tower, its museums and its bread."
_THOUGHTS = "The user asks for a capital. France's is Paris, and I should say what it is known for."
_NEXT = "And which river flows through it?"
_NUM_SHOWN = 12  # tokens on each side of where they part


def show(
    model: str | None,
    revision: str | None,
    chat_template: Path | None,
    template_kwargs: str | None,
    *,
    thoughts: str | None,
    page_size: int,
) -> None:
    """Print two turns of a chat, and how much of the first the second finds in pages. Raises LoadError."""
    front = _open(model, revision, chat_template)
    kwargs = _variables(template_kwargs)
    if thoughts is None and thought_marks(front) is not None:
        thoughts = _THOUGHTS
    cases = {"an answer": None} | ({} if thoughts is None else {"an answer after thoughts": thoughts})
    texts: list[str] = []
    for name, given in cases.items():
        turns = two_turns(front, _QUESTION, _ANSWER, _NEXT, thoughts=given, template_kwargs=kwargs)
        texts.append(_report(name, turns, front, page_size))
    write("\n".join(texts))


def _open(model: str | None, revision: str | None, override: Path | None) -> Front:
    home = cache_home()
    with ProgressBar() as progress:
        path = resolve(
            model,
            revision=revision,
            cache_dir=home,
            progress=lambda done, total, label: progress(label, done, total or 0),
        )
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint, cache_dir=home)
    ends = eos_ids(checkpoint) | tokenizer.eos_ids
    return Front(tokenizer, load_template(checkpoint, override=override), eos_ids=ends)


def _variables(text: str | None) -> dict[str, Any]:
    try:
        found: object = json.loads(text or "{}")
    except ValueError as error:
        raise LoadError(f"--template-kwargs is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LoadError('--template-kwargs must be a JSON object, like {"enable_thinking": false}')
    return cast("dict[str, Any]", found)


def _report(name: str, turns: Turns, front: Front, page_size: int) -> str:
    same, hit, best = turns.num_same, turns.num_hit(page_size), turns.num_hit_at_best(page_size)
    lines = [
        f"# {name}",
        "",
        f"turn 1: a prompt of {len(turns.prompt)} tokens and {len(turns.said)} tokens of answer",
        _indented(front, turns.prompt + turns.said),
        f"turn 2: a prompt of {len(turns.next_prompt)} tokens",
        _indented(front, turns.next_prompt),
        f"in pages after turn 1: {len(turns.in_pages)} tokens; turn 2 begins with {same} of them",
        f"turn 2 hits {hit} tokens ({hit // page_size} pages of {page_size})"
        + (f"; it would hit {best} if the template kept its past" if turns.is_parted else ""),
    ]
    if turns.is_parted:
        start = max(same - 4, 0)
        lines += [
            f"they part after token {same}:",
            f"  both      {_pieces(front, turns.in_pages[start:same])}",
            f"  in pages  {_pieces(front, turns.in_pages[same : same + _NUM_SHOWN])}",
            f"  turn 2    {_pieces(front, turns.next_prompt[same : same + _NUM_SHOWN])}",
        ]
    else:
        lines.append("nothing parts: the next turn finds all of the last one but its last, partial page")
    return "\n".join(lines) + "\n"


def _indented(front: Front, ids: tuple[int, ...]) -> str:
    text = front.tokenizer.decode(ids, skip_special_tokens=False)
    return "\n".join(f"  | {line}" for line in text.split("\n"))


def _pieces(front: Front, ids: tuple[int, ...]) -> str:
    texts = (front.tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids)
    return " ".join(json.dumps(text, ensure_ascii=False) for text in texts)
