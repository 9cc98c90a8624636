"""Write the reference values of tests/text with transformers: `golden_text.py [MODELS]`.

Without an argument: a small byte-level tokenizer folder and what transformers makes of a nasty
corpus and of chats with it. With the folder of the two GGUF models: their ids for the corpus too.
Needs transformers and, for the GGUF files, the gguf package; the tests need neither.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parent.parent / "tests" / "text" / "data"
MODELS = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "gemma": "gemma-3-270m-q4_k_m.gguf",
}
# Text whose special tokens transformers would parse is left to tests with their own expectation.
CORPUS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    "\t\tx\t y",
    " \n \n  \n   x",
    "Hello, world! It's 3:45 o'clock; they'RE we'll I'D can't.",
    "1 12 123 1234 12345 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ 一二三",
    "naïve café Ünïcödé ÅÄÖ ß ﬁ ŉ",
    "e\u0301 a\u0300\u0301\u0302 n\u0303 \u0301 alone",
    "👋🏽 👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ☺️ 1️⃣",
    "汉字和假名かなカナ、한국어 조합 ㅎㅏㄴ。「引用」",
    "שלום עולם مرحبا بالعالم हिन्दी ไทย ქართული Ελληνικά Кириллица",
    "right\u200fto\u200eleft \u202eoverride\u202c zero\u200bwidth\u2060joiner \ufeffbom",
    "\x00\x01\x02\x1b[0m\x7f\x80\x85\xa0\xad nbsp\u00a0thin\u2009ideographic\u3000line\u2028para\u2029",
    "\ufffd \ufffe \uffff \U0010ffff \U000f0000 \ue000 ▁ ▁▁ Ġ Ċ <0x0A> <0xFF>",
    'def f(x: int) -> str:\n    return f"{x!r:>{10}}"  # comment\n\n\n\tif a<b and c>=d: pass\n',
    '{"key": [1, 2.5e-3, null, true], "nested": {"a\\"b": "\\u00e9\\n"}}',
    "<html><body><p class='x'>a &amp; b</p></body></html>",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\Windows\\x",
    "a" * 300,
    "ab" * 150,
    " " * 31 + "x" + " " * 32 + "y" + " " * 33,
    "\n" * 31 + "x" + "\n" * 32 + "y" + "\n" * 40,
    "\t" * 40 + "x",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "!!!???...,,,;;;--==++**//\\\\||^^~~``'''\"\"\"",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 ｆｕｌｌｗｉｄｔｈ ①②③ ™ © № ﷽",
    "x\u0fff\u0e33\u0f71 \U0001f468\u200d",
    "".join(map(chr, range(256))),
    "".join(map(chr, range(0x2000, 0x2070))),
]
CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Name three primary colours.\n\n"},
        {"role": "assistant", "content": "Red,\tyellow and blue 👩‍🚀."},
        {"role": "user", "content": "  Which two make green? e\u0301 "},
    ],
    [{"role": "user", "content": ""}],
]
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wetter", "description": "é <b>", "parameters": {"z": 1, "a": 2}},
    }
]
CHAT_OPTIONS = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}


def mixed_texts(count: int) -> list[str]:
    """Random mixtures of pieces of the corpus, always the same."""
    draw = random.Random(7)
    pieces = [
        piece for text in CORPUS for piece in (text, text[: len(text) // 3], text[len(text) // 2 :]) if piece
    ]
    return ["".join(draw.choice(pieces)[:40] for _ in range(draw.randint(1, 5))) for _ in range(count)]


def write_folder(folder: Path) -> None:
    """Train a small byte-level tokenizer and save it as a folder with a template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    known = tokenizer.get_vocab_size()
    added = {
        str(known): {"content": "<|im_start|>", "special": True},
        str(known + 1): {"content": "<|im_end|>", "special": True, "rstrip": True},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": {
            key: {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **value}
            for key, value in added.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Write everything."""
    write_folder(DATA / "bytelevel")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DATA / "bytelevel")
    texts = CORPUS + mixed_texts(60)
    special = ["<s>a</s>b", "x<|im_end|>  \n y<|im_start|>", "<think>a</think>"]
    chats = []
    for messages in CHATS:
        for tools in (None, TOOLS):
            ids = tokenizer.apply_chat_template(messages, tools=tools, **CHAT_OPTIONS)
            text = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
            chats.append({"messages": messages, "tools": tools, "ids": ids, "text": text})
    reference = {
        "texts": [[text, tokenizer(text)["input_ids"]] for text in texts + special],
        "chats": chats,
    }
    (DATA / "bytelevel_ids.json").write_text(json.dumps(reference) + "\n")
    if len(sys.argv) > 1:
        for name, file in MODELS.items():
            tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=file)
            if name == "smollm2":
                # transformers reads no splitting rule "smollm" out of a GGUF file; this is the model's own.
                digits = pre_tokenizers.Digits(individual_digits=True)
                own = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(own)
            rows = [[text, tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
            chats = [
                {"messages": messages, "ids": tokenizer.apply_chat_template(messages, **CHAT_OPTIONS)}
                for messages in CHATS
                if tokenizer.chat_template
            ]
            (DATA / f"{name}_ids.json").write_text(json.dumps({"texts": rows, "chats": chats}) + "\n")


if __name__ == "__main__":
    main()
