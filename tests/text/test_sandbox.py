import time

import pytest

from xjax.text import sandbox
from xjax.text.sandbox import Budget, TemplateLimit, TemplateRefusal, make_environment, run_template

GROW = "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}%s"


def run(source: str, **variables) -> str:
    return run_template(make_environment({}).from_string(source), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        GROW % ("'x'", "{% set ns.s = ns.s ~ ns.s %}", ""),
        GROW % ("'x'", "{% set ns.s = ns.s + ns.s %}", ""),
        GROW % ("[1]", "{% set ns.s = ns.s + ns.s %}", ""),
        GROW % ("'x'", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}", ""),
        GROW % ("'x'", "{% set ns.s = [ns.s, ns.s] | join %}", ""),
        GROW % ("'x'", "{% set ns.s = ''.join([ns.s, ns.s]) %}", ""),
        GROW % ("'x'", "{% set ns.s = ns.s | replace('x', 'xxxxxxxxxx') %}", ""),
        GROW % ("'x'", "{% set ns.s = ns.s.replace('x', 'xxxxxxxxxx') %}", ""),
        GROW % ("['x']", "{% set ns.s = [ns.s, ns.s] %}", "{{ ns.s | tojson }}"),
        GROW % ("['x']", "{% set ns.s = [ns.s, ns.s] %}", "{{ ns.s }}"),
        GROW % ("['x']", "{% set ns.s = [ns.s, ns.s] %}", "{{ ns.s | string }}"),
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ n ** n }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%0999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
    ],
)
def test_what_runs_or_grows_without_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    start = time.perf_counter()
    with pytest.raises(TemplateLimit):
        run(source, n=10**9)
    assert time.perf_counter() - start < sandbox.MAX_SECONDS + 5


def test_time_is_bounded():
    now = iter(range(10))
    budget = Budget(lambda: next(now))
    with pytest.raises(TemplateLimit, match="5 s"):
        run_template(make_environment({}).from_string("{% for i in range(99) %}{% endfor %}"), {}, budget)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages.append(1) }}", None),
        ("{{ ''.__class__.__mro__ }}", None),
        ("{{ messages.__class__ }}", ""),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", None),
        ("{{ _xjax_budget._deadline }}", ""),
    ],
)
def test_templates_cannot_reach_python(source, text):
    if text is not None:
        assert run(source, messages=[1]) == text
        return
    with pytest.raises(Exception, match="unsafe|undefined|no attribute"):
        run(source, messages=[1])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in [1, 2, 3] %}{% if m == 1 %}{% continue %}{% endif %}{{ m }}{% break %}{% endfor %}",
            "2",
        ),
        (
            "{% for m in [1, 2] %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{% endfor %}",
            "0False21True2",
        ),
        ("{% for m in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% generation %}{{ 1 }}{% endgeneration %}!", "1!"),
        ("{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(1) %}c{% endcall %}", "<1c>"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
        ("{{ {'é': [1, 'a<b&'], 'a': none} | tojson }}", '{"é": [1, "a<b&"], "a": null}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}", "a\n  b|  a\n  b"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        (
            "{% set ns = namespace(a=1) %}{% for i in [3] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
            "4",
        ),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'xay' | replace('a', 'b') }}{{ ['a', 'b'] | join('-') }}", "bxbya-b"),
        ("{{ '%s-%02d' % ('a', 3) }}{{ '{}'.format('x') }}{{ 'A' | lower }}{{ ' x ' | trim }}", "a-03xax"),
        ("{{ [3, 1] | sort | first }}{{ [{'a': 1}] | map(attribute='a') | list }}", "1[1]"),
        ("{{ [1, 2][::-1] }}{{ 'abc'[1:] }}{{ 7 // 2 }}{{ 'a' ~ 1 }}{{ 2 ** 3 }}", "[2, 1]bc3a18"),
    ],
)
def test_what_templates_use(source, text):
    assert run(source, d={"a": 1}) == text


def test_a_template_can_refuse():
    with pytest.raises(TemplateRefusal, match="^roles must alternate$"):
        run("{{ raise_exception('roles must alternate') }}")
