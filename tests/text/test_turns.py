"""Where the next turn parts from what is in pages, counted by hand over one token a byte."""

import pytest

from tests.text.small import from_gguf, gguf_bytes
from xjax.errors import RequestError
from xjax.text.front import Front
from xjax.text.template import ChatTemplate
from xjax.text.turns import thought_marks, two_turns

END = "<|end|>"
KEEPS = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Drops the thoughts of every answer but the last message's, as reasoning models' templates do.
DROPS = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ m.role[0] }}:{{ text }}<|end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# Begins the thoughts itself.
OPENS = DROPS.replace("a:{% endif %}", "a:<think>\n{% endif %}")
TRIMS = KEEPS.replace("m.content }}", "m.content | trim }}")


def front(template):
    tokenizer = from_gguf(gguf_bytes(**{"tokenizer.ggml.merges": []}))
    return Front(tokenizer, ChatTemplate({"default": template}, {}), eos_ids=frozenset((0,)))


def text(front, ids):
    return front.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_template_that_keeps_its_past():
    model = front(KEEPS)
    turns = two_turns(model, "hi", "yes", "so")
    assert text(model, turns.prompt) == f"u:hi{END}a:"
    assert text(model, turns.said) == f"yes{END}"
    assert text(model, turns.next_prompt) == f"u:hi{END}a:yes{END}u:so{END}a:"
    assert len(turns.in_pages) == 7 + 3  # the end is sampled and not computed
    assert (turns.num_same, turns.is_parted) == (10, False)
    assert [turns.num_hit(size) for size in (1, 4, 5, 8, 11)] == [10, 8, 10, 8, 0]
    assert turns.num_hit_at_best(4) == 8


def test_a_template_that_drops_thoughts():
    model = front(DROPS)
    assert thought_marks(model) == ("<think>", "</think>")
    turns = two_turns(model, "hi", "yes", "so", thoughts="hm")
    assert text(model, turns.said) == f"<think>\nhm\n</think>\n\nyes{END}"
    assert text(model, turns.next_prompt) == f"u:hi{END}a:yes{END}u:so{END}a:"
    assert (turns.num_same, turns.is_parted) == (7, True)
    assert text(model, turns.in_pages[7:]).startswith("<think>")
    assert text(model, turns.next_prompt[7:]).startswith("yes")
    assert (turns.num_hit(4), turns.num_hit_at_best(4)) == (4, 16)
    assert not two_turns(model, "hi", "yes", "so").is_parted


def test_a_prompt_that_begins_the_thoughts():
    model = front(OPENS)
    turns = two_turns(model, "hi", "yes", "so", thoughts="hm")
    assert text(model, turns.prompt + turns.said) == f"u:hi{END}a:<think>\nhm\n</think>\n\nyes{END}"
    assert turns.num_same == 7
    # An answer without thoughts parts there, too: the opening is in pages and not in the past.
    assert two_turns(model, "hi", "yes", "so").num_same == 7


def test_a_template_that_trims_parts_in_the_answer():
    model = front(TRIMS)
    turns = two_turns(model, "hi", " yes ", "so")
    assert (turns.num_same, turns.is_parted) == (7, True)
    turns = two_turns(model, "hi", "yes ", "so")
    assert text(model, turns.in_pages[turns.num_same :]) == " "
    assert thought_marks(model) is None


def test_the_last_token_of_a_prompt_is_never_taken_from_pages():
    """A next prompt that adds nothing but an end: of nine tokens the same, eight can be hit."""
    model = front("{% for m in messages %}{{ m.content }}{% endfor %}")
    turns = two_turns(model, "abcd", "efgh", "i")
    assert (turns.num_same, len(turns.in_pages), len(turns.next_prompt)) == (8, 8, 9)
    assert turns.num_hit(4) == 8 and turns.num_hit(8) == 8 and turns.num_hit(9) == 0


def test_variables_reach_the_template():
    model = front(KEEPS + "{% if quick and add_generation_prompt %}!{% endif %}")
    turns = two_turns(model, "hi", "yes", "so", template_kwargs={"quick": True})
    assert text(model, turns.prompt).endswith("a:!") and turns.num_same == 7 and turns.is_parted


def test_without_a_template():
    model = Front(from_gguf(gguf_bytes()), None, eos_ids=frozenset((0,)))
    with pytest.raises(RequestError, match="no chat template"):
        two_turns(model, "hi", "yes", "so")
