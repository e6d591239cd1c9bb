import threading

import jinja2
import pytest

from headrace.text.rendering import Budget, BudgetExceeded, Job, Metered, compiled, render_job

ENVIRONMENT = Metered()
LOOP = ENVIRONMENT.from_string("{% for i in range(10) %}{{ i }}{% endfor %}")
MACRO = ENVIRONMENT.from_string("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(9) }}")
MESSAGES = [{"role": "user", "content": "x" * 100}]
LARGE = "0x" + "f" * 300


@pytest.mark.parametrize("template", [LOOP, MACRO], ids=["loop", "macro"])
def test_turns_are_counted(template: jinja2.Template) -> None:
    with Budget(turns=10):
        template.render()
    with Budget(turns=9), pytest.raises(BudgetExceeded, match="turns"):
        template.render()


def test_time_is_looked_at_within_a_few_turns() -> None:
    with Budget(seconds=-1.0), pytest.raises(BudgetExceeded, match="seconds"):
        LOOP.render()


def test_values_are_counted() -> None:
    double = ENVIRONMENT.from_string("{{ x ~ x }}")
    with Budget(characters=8):
        assert double.render(x="ab") == "abab"
    with Budget(characters=8), pytest.raises(BudgetExceeded, match="characters"):
        double.render(x="abc")


def test_content_may_be_processed_many_times() -> None:
    source = "{% for m in messages %}{{ m.content | trim | replace('a', 'b') ~ '\\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "a" * 100_000}] * 20
    with Budget(2_000_000):
        assert len(render_job(Job(source, messages, {}, {})).text) == 20 * 100_001
    with Budget(0), pytest.raises(BudgetExceeded, match="characters"):
        render_job(Job(source, messages, {}, {}))


def test_a_value_is_not_much_larger_than_the_content() -> None:
    messages = [{"role": "user", "content": "a" * 1_000_000}]
    with Budget(1_000_000):
        assert len(render_job(Job("{{ messages[0].content * 2 }}", messages, {}, {})).text) == 2_000_000
    with Budget(1_000_000), pytest.raises(BudgetExceeded, match="characters"):
        render_job(Job("{{ messages[0].content * 4 }}", messages, {}, {}))


def test_what_usual_templates_do_with_long_content_stays_within_the_budget() -> None:
    content = "<think>a\n</think>\n" + "some words\n" * 30_000
    messages = [{"role": "assistant", "content": content}] * 3
    source = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{{ m.content | trim }}"
        "{{ m.content.rsplit('</think>', 1)[0] }}{% endfor %}{{ messages | selectattr('role') | map(attribute='role')"
        " | list }}"
    )
    with Budget(3 * len(content)):
        assert render_job(Job(source, messages, {}, {})).text.count("some words") == 3 * 60_000


def test_a_budget_holds_on_its_own_thread_only() -> None:
    rendered: list[str] = []
    with Budget(turns=0):
        thread = threading.Thread(target=lambda: rendered.append(LOOP.render()))
        thread.start()
        thread.join()
    assert rendered == ["0123456789"]


def exceeds(source: str) -> BudgetExceeded:
    with Budget(100), pytest.raises(BudgetExceeded) as raised:
        render_job(Job(source, MESSAGES, {}, {"tools": None}))
    return raised.value


@pytest.mark.parametrize(
    "source",
    [
        "{{ 7 ** 2 }}",
        "{{ '%d' % 1 }}",
        "{{ '%d' | format(1) }}",
        "{{ '{}'.format('a') }}",
        "{{ 'a' | center(10) }}",
        "{{ 'a'.ljust(10) }}",
        "{{ 'a'.zfill(10) }}",
        "{{ 'a\\tb'.expandtabs(10) }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ 'a'.encode() }}",
        "{{ ','.join(['a']) }}",
        "{{ 3.5.hex() }}",
        "{{ [1] | sum }}",
        "{{ 1.5 | round(3, 'ceil') }}",
        "{{ 'a' | indent(10) }}",
        "{{ 'http://a' | urlize }}",
        "{{ 'a b' | wordwrap(1) }}",
        "{{ 'a b' | truncate(1) }}",
        "{{ '<a>' | striptags }}",
        "{{ [1] | batch(3) | list }}",
        "{{ [1] | slice(3) | list }}",
        "{{ ['b', 'a'] | sort }}",
        "{{ range(9) | map('string') | join }}",
        "{{ strftime_now('%10000d') }}",
        "{{ strftime_now('%d' * 200) }}",
        "{{ messages[0].content.rfind('a' * 300) }}",
        "{{ messages[0].content.rsplit('a' * 300) }}",
        "{{ messages[0].content.strip('a' * 300) }}",
        "{{ messages[0].content | replace('a' * 300, 'b') }}",
        *(f"{{{{ {LARGE} {operator} 3 }}}}" for operator in ("+", "-", "*", "/", "//", "%")),
        f"{{{{ 3 - {LARGE} }}}}",
    ],
)
def test_operations_without_a_bound_run_in_another_process_always(source: str) -> None:
    assert exceeds(source).always


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r if 0.5 in r %}{% endfor %}",
        "{% set r = range(99999) %}" + "{% if 0.5 in r %}{% endif %}" * 1000,
        "{% set r = range(99999) %}" + "{% if 0.5 is in(r) %}{% endif %}" * 1000,
        "{% set x = 'a' * 100000 %}" + "{% set y = x[::-1] %}" * 1000,
        "{% for i in range(2000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 'a' * 10000000 }}",
        "{{ ['a'] * 10000000 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ ('a' * 100000) | replace('a', 'b' * 200) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 200) }}",
        "{{ (['a' * 100000] * 100) | join }}",
        "{{ (['a' * 100000] * 100) | tojson }}",
        "{{ (['a' * 100000] * 100) | string }}",
        "{{ ['a' * 100000] * 100 }}",
        "{{ ('a' * 100000) | list | join('b' * 200) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ ('a' * 400000).rfind('a' * 128 ~ 'b' ~ 'a' * 100) }}",
        "{{ ('a' * 400000).rsplit('a' * 128 ~ 'b' ~ 'a' * 100) }}",
        "{{ ('a' * 400000).rpartition('a' * 128 ~ 'b' ~ 'a' * 100) }}",
        "{{ ('a' * 400000) | trim('a' * 200) }}",
        "{{ ('a' * 400000).strip('a' * 200) }}",
        "{{ ('a' * 400000) | list }}",
        "{{ ('a ' * 200000).split() }}",
        "{{ ('a ' * 200000).split(' ') }}",
        "{{ ('a\n' * 200000).splitlines() }}",
        "{{ ('a ' * 200000) | title }}",
    ],
)
def test_work_beyond_the_budget_runs_in_another_process(source: str) -> None:
    assert not exceeds(source).always


@pytest.mark.parametrize(
    "more",
    [
        "{% set ns.x = [ns.x, ns.x] %}",
        "{% set ns.x = (ns.x, ns.x) %}",
        "{% set ns.x = {1: ns.x, 2: ns.x} %}",
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}",
        "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}{{ f(ns.x, ns.x) }}",
        "{% macro f() %}{% set ns.x = kwargs %}{% endmacro %}{{ f(a=ns.x, b=ns.x) }}",
    ],
)
def test_lists_of_lists_are_stopped_before_anything_compares_or_hashes_them(more: str) -> None:
    source = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}" + more + "{% endfor %}"
    with Budget(characters=10_000), pytest.raises(BudgetExceeded, match="characters"):
        render_job(Job(source, MESSAGES, {}, {}))


@pytest.mark.parametrize(
    "source", ["{{ 'a' | center(10 ** 12) }}", "{{ 10 ** 10 ** 9 * 'a' }}", "{{ 3 ** 5000000 }}"]
)
def test_nothing_without_a_bound_is_computed_while_compiling(source: str) -> None:
    compiled(source)
