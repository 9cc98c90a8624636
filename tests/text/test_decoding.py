import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from xjax.errors import LoadError
from xjax.text.decoding import read_decoding


def read(decoder):
    inner = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        inner.decoder = decoder
    return read_decoding(inner)


def test_byte_level_alphabet_is_the_libraries():
    decoding = read(decoders.ByteLevel())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in (*range(0x80), 0xE9, 0x6F22, 0x1F680):
        ((spelled, _),) = split.pre_tokenize_str(chr(code))
        assert decoding.token_bytes(spelled) == chr(code).encode()


def test_pieces():
    decoding = read(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
    assert decoding.token_bytes("▁a▁") == b" a "
    assert decoding.token_bytes("<0x0A>") == b"\n"
    assert decoding.token_bytes("<0x0A>x") == b"<0x0A>x"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.Strip("x", 1, 0)])
def test_unknown_decoders_are_named(decoder):
    with pytest.raises(LoadError, match="decoder"):
        read(decoder)
