import threading

import jinja2
import pytest

from headrace.serve.text.budget import Budget, BudgetExceeded, Metered
from headrace.serve.text.template import ChatTemplate, TemplateError

ENVIRONMENT = Metered()
LOOP = ENVIRONMENT.from_string("{% for i in range(10) %}{{ i }}{% endfor %}")
MACRO = ENVIRONMENT.from_string("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(9) }}")


@pytest.mark.parametrize("template", [LOOP, MACRO], ids=["loop", "macro"])
def test_turns_are_counted(template: jinja2.Template) -> None:
    with Budget(turns=10):
        template.render()
    with Budget(turns=9), pytest.raises(BudgetExceeded, match="more than 9 turns"):
        template.render()


def test_time_is_looked_at_in_every_turn() -> None:
    with Budget(seconds=-1.0), pytest.raises(BudgetExceeded, match="seconds"):
        LOOP.render()


def test_values_and_output_are_bounded() -> None:
    with Budget(characters=5) as budget:
        assert ENVIRONMENT.from_string("{{ x ~ x }}").render(x="ab") == "abab"
        with pytest.raises(BudgetExceeded, match="a value longer than 5"):
            ENVIRONMENT.from_string("{{ x ~ x }}").render(x="abc")
        budget.write(5)
        with pytest.raises(BudgetExceeded, match="writes more than 5"):
            budget.write(1)


def test_a_budget_holds_on_its_own_thread_only() -> None:
    rendered: list[str] = []
    with Budget(turns=0):
        thread = threading.Thread(target=lambda: rendered.append(LOOP.render()))
        thread.start()
        thread.join()
    assert rendered == ["0123456789"]


def test_long_messages_are_no_long_values() -> None:
    source = "{% for m in messages %}{{ m.content | trim | replace('a', 'b') ~ '\\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "a" * 100_000}] * 20
    assert len(ChatTemplate({"default": source}).render(messages)) == 20 * 100_001


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(50000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 ** 9 * 'a' }}",
        "{{ 7 ** (10 ** 9) }}",
        "{% set a = 3 ** 5000000 %}",
        "{% set a = 3 ** 10000 %}{% set b = a * a %}",
        "{{ 'f' | replace('f', 'f' * 99999) | int(base=16) }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
        "{{ ('a' * 1000000).translate(['b' * 1000000] * 98) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format('a', 1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ['a' * 1000000] * 1000000 }}",
        "{{ (['a' * 1000000] * 1000) | join }}",
        "{{ ','.join(['a' * 1000000] * 1000) }}",
        "{{ range(99999) | map('string') | join('a' * 1000000) }}",
        "{{ ('a' * 1000000).join('a' * 1000000) }}",
        "{{ (['a' * 1000000] * 1000) | tojson }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    ],
)
def test_a_template_cannot_use_up_the_machine(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template was stopped"):
        ChatTemplate({}).render([{"role": "user", "content": "x"}], template=source)


def test_nothing_writes_filler_text_by_the_million() -> None:
    with pytest.raises(TemplateError, match="'lipsum' is undefined"):
        ChatTemplate({}).render([{"role": "user", "content": "x"}], template="{{ lipsum(n=1000000) }}")


@pytest.mark.parametrize(
    "more",
    [
        "{% set ns.x = [ns.x, ns.x] %}",
        "{% set ns.x = (ns.x, ns.x) %}",
        "{% set ns.x = {1: ns.x, 2: ns.x} %}",
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}",
        "{% set ns.x = ([ns.x] * 2) | batch(2) | list %}",
        "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}{{ f(ns.x, ns.x) }}",
        "{% macro f() %}{% set ns.x = kwargs %}{% endmacro %}{{ f(a=ns.x, b=ns.x) }}",
    ],
)
def test_lists_of_lists_are_stopped_before_anything_compares_or_hashes_them(more: str) -> None:
    environment = Metered()
    environment.meter_filters()
    source = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}" + more + "{% endfor %}"
    with Budget(characters=10_000), pytest.raises(BudgetExceeded, match="a value longer than"):
        environment.from_string(source).render()
