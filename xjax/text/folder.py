"""The tokenizer of a Hugging Face folder: tokenizer.json, or a SentencePiece tokenizer.model.

tokenizer_config.json names the special tokens and may add tokens to either. Knows files and
their formats, not what is done with the tokenizer.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken

from xjax.checkpoints.metadata import read_optional_json
from xjax.errors import LoadError
from xjax.text.vocabulary.gguf import Specials
from xjax.text.vocabulary.pieces import Kind, Pieces, build_pieces, check_pieces, register

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def load_folder(folder: Path, cache_dir: Path | None) -> tuple[tokenizers.Tokenizer, Specials]:
    """Load the tokenizer of a folder; LoadError when it has none that is known."""
    config = read_optional_json(folder / "special_tokens_map.json") | read_optional_json(
        folder / "tokenizer_config.json"
    )
    if (folder / "tokenizer.json").exists():
        inner = _load_json(folder / "tokenizer.json")
        prefix, suffix = _template_ids(inner)
        defaults = (None, None)
    elif (folder / "tokenizer.model").exists():
        inner = _load_model(folder / "tokenizer.model", cache_dir)
        prefix, suffix = (), ()
        defaults = (True, False)
    else:
        raise LoadError(
            f"{folder}: no tokenizer.json and no tokenizer.model; add one, "
            "or pass token ids (skip_tokenizer_init)"
        )
    _add_configured(inner, config, folder)
    bos_id, eos_id = (_id_of(inner, config.get(name)) for name in ("bos_token", "eos_token"))
    with_bos = config.get("add_bos_token", defaults[0])
    with_eos = config.get("add_eos_token", defaults[1])
    return inner, Specials(
        bos_id=bos_id,
        eos_ids=frozenset(() if eos_id is None else (eos_id,)),
        prefix=_edge(prefix, bos_id, with_bos),
        suffix=_edge(suffix, eos_id, with_eos),
    )


def _load_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    except Exception as error:  # tokenizers raises bare Exception
        raise LoadError(f"{path}: not a tokenizer that this version of tokenizers reads: {error}") from error


def _template_ids(inner: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find what the tokenizer's own post-processor puts before and after a text."""
    if inner.num_special_tokens_to_add(is_pair=False) == 0:
        return (), ()
    for text in ("a", "0", " "):
        bare: list[int] = inner.encode(text, add_special_tokens=False).ids
        full: list[int] = inner.encode(text, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _edge(given: tuple[int, ...], token_id: int | None, wanted: bool | None) -> tuple[int, ...]:
    """Add or drop one special token where the configuration says so."""
    if wanted is None or token_id is None or wanted == (token_id in given):
        return given
    return (token_id, *given) if wanted else tuple(i for i in given if i != token_id)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _content(token: object) -> str | None:
    content: object = token.get("content") if isinstance(token, Mapping) else token  # type: ignore[union-attr]
    return content if isinstance(content, str) and content and _is_unicode(content) else None


def _id_of(inner: tokenizers.Tokenizer, token: object) -> int | None:
    content = _content(token)
    return None if content is None else inner.token_to_id(content)


def _add_configured(inner: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens that tokenizer_config.json lists, and mark the special ones."""
    known = inner.get_added_tokens_decoder()
    listed: object = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise LoadError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is not a table of tokens by id"
        )
    for key, value in cast("dict[str, object]", listed).items():
        if not key.isdecimal() or not isinstance(value, dict) or _content(value) is None:  # type: ignore[arg-type]
            raise LoadError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: {key!r} is no token")
    for token_id, entry in sorted((int(key), value) for key, value in cast("dict[str, Any]", listed).items()):
        flags = {
            name: bool(entry.get(name, False))
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        token = AddedToken(entry["content"], **flags)
        if token_id in known and known[token_id].special == token.special:
            continue
        register(inner, [token])
        if inner.token_to_id(token.content) != token_id:
            raise LoadError(
                f"{folder / 'tokenizer_config.json'}: token {token.content!r} has id {token_id} there "
                f"and {inner.token_to_id(token.content)} in the vocabulary"
            )
    special = {i.content for i in inner.get_added_tokens_decoder().values() if i.special}
    extra: Any = config.get("additional_special_tokens")
    entries: list[Any] = [config.get(name) for name in _NAMED]
    for entry in entries + (extra if isinstance(extra, list) else []):
        content = _content(entry)
        if content is not None and content not in special and inner.token_to_id(content) is not None:
            register(inner, [AddedToken(content, special=True, normalized=False)])


# ---- tokenizer.model: a protobuf message ------------------------------------------------------


def _load_model(path: Path, cache_dir: Path | None) -> tokenizers.Tokenizer:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    try:
        pieces = read_pieces(data)
    except (ValueError, LookupError, AttributeError, TypeError, struct.error) as error:
        raise LoadError(f"{path}: not a SentencePiece model: {error}") from error
    return build_pieces(check_pieces(pieces, str(path)), cache_dir)


def read_pieces(data: bytes) -> Pieces:
    """Read the vocabulary out of a SentencePiece model; ValueError when it is none."""
    tokens: list[str] = []
    kinds: list[int] = []
    scores: list[float] = []
    model_type, prefix_space, collapse, charsmap = 1, True, True, b""
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode("utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, int(Kind.NORMAL)))
        elif number == 2:
            model_type = dict(_fields(value)).get(3, 1)
        elif number == 3:
            normalizer = dict(_fields(value))
            charsmap = normalizer.get(2, b"")
            prefix_space = bool(normalizer.get(3, 1))
            collapse = bool(normalizer.get(4, 1))
    if model_type not in (1, 2):
        raise ValueError(f"its kind is {_MODEL_TYPES.get(model_type, model_type)}; known: bpe, unigram")
    return Pieces(
        tokens,
        kinds,
        scores,
        prefix_space,
        collapse_spaces=collapse,
        charsmap=charsmap,
        is_unigram=model_type == 1,
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a message; values are int, or bytes still to be read."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"cut off at byte {len(data)}")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(f"number too long at byte {position}")
