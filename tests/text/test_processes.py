"""Templates in processes of their own: the limits hold inside one call of C, and the next template finds a process."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from headrace.text import bounded as module
from headrace.text.bounded import Limits
from headrace.text.content import Controls, PromptText
from headrace.text.processes import RenderProcesses, TemplateStopped
from headrace.text.rendering import Job, TemplateError

MESSAGES = [{"role": "user", "content": "hi"}]
HOSTILE = [
    "{{ ('a'*400000).rfind('ab'+'a'*200000) }}",
    "{{ ('a'*400000).rsplit('ab'+'a'*200000) }}",
    "{{ ('a'*4000000).strip('b'*4000000 ~ 'c') }}{{ ('a'*4000000).replace('a', 'b'*4000) }}",
    "{{ ('%*d' % (1000000000,1)) | length }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format('a', 1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ 'a\\t'.expandtabs(1000000000) }}",
    "{{ ('a\\n' * 1000000) | indent(1000) }}",
    "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
    "{{ ([range(90000) | list] * 90000) | sort }}",
    "{{ 7 ** (10 ** 9) }}",
    "{% set a = 3 ** 5000000 %}{{ a * a }}",
    "{{ 'f' | replace('f', 'f' * 9999999) | int(base=16) }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "{{ (['a' * 1000000] * 1000000) | join }}",
    "{{ ('a' * 1000000).join('a' * 1000000) }}",
    "{{ (['a' * 1000000] * 1000) | tojson }}",
    "{{ range(99999) | map('string') | join('a' * 1000000) }}",
    "{{ ('http://a.b/' * 500000) | urlize }}",
    "{{ ('a ' * 3000000) | wordwrap(1) | length }}",
    "{{ ('<' * 50000000) | striptags }}",
    "{{ [1] | batch(1000000000, 1) | list }}",
    "{{ [1] | slice(1000000000, 1) | list }}",
    "{{ strftime_now('%c' * 10000000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% for i in range(50000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{{ raise_exception('a' * 10 ** 8) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = ns.x | map('string') %}{% endfor %}",
    "{% " + "a" * 60_000 + " %}",
    "{{ 1 | " + "a" * 60_000 + " }}",
    "{{ 1 is " + "a" * 60_000 + " }}",
    "{{ " + "a" * 60_000 + ".b }}",
    "{{ x." + "a" * 60_000 + ".b }}",
    "{{ " + "(" * 60_000 + " }}",
    "{{ " + "-" * 60_000 + "1 }}",
    "{{ " + "not " * 15_000 + "1 }}",
    "{{ 1" + " + 1" * 15_000 + " }}",
    "{{ 1" + " | abs" * 9_000 + " }}",
    "{% if 1 %}" * 6_000 + "{% endif %}" * 5_000,
    "{{ 0x" + "f" * 60_000 + " }}",
]


@pytest.fixture(scope="module")
def processes() -> Iterator[RenderProcesses]:
    made = RenderProcesses(Limits(cpu_seconds=0.1, memory_bytes=64 << 20))
    yield made
    made.close()


def job(source: str, **more: Any) -> Job:
    return Job(source, MESSAGES, {}, {"bos_token": "<s>"}, **more)


@pytest.mark.parametrize("source", HOSTILE)
def test_every_hostile_template_ends_at_a_limit(processes: RenderProcesses, source: str) -> None:
    with pytest.raises(TemplateError) as raised:
        processes.render(job(source))
    assert len(str(raised.value)) < 2_000
    assert processes.render(job("{{ bos_token }}{{ messages[0].content }}")) == PromptText("<s>hi")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ ('a'*400000).rfind('ab'+'a'*200000) }}", r"needs more than 0\.1 s of CPU time"),
        ("{{ 'a'.ljust(1000000000) }}", "needs more than 67108864 bytes of memory"),
        ("{{ 'a' * 2000000 }}", "writes more than 1048576 bytes"),
    ],
)
def test_the_limit_is_named(processes: RenderProcesses, source: str, why: str) -> None:
    with pytest.raises(TemplateStopped, match=f"the chat template was stopped: it {why}"):
        processes.render(job(source))


def test_a_process_that_waits_is_stopped_too() -> None:
    slow = RenderProcesses(Limits(cpu_seconds=60, wall_seconds=0.05))
    with pytest.raises(TemplateStopped, match=r"took more than 0\.05 s"):
        slow.render(job("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"))


def test_what_a_template_leaves_does_not_count_for_the_next(processes: RenderProcesses) -> None:
    cycle = "{% set ns = namespace() %}{% set ns.x = ns %}{% set ns.y = 'a' * 40000000 %}"
    for _ in range(3):
        assert processes.render(job(cycle)) == PromptText("")
        assert processes.render(job("{{ ('a' * 40000000) | length }}")) == PromptText("40000000")


def test_a_process_that_keeps_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RenderProcesses()
    ends: list[bool] = []
    exchange = module._exchange

    def full(process: Any, line: bytes, payload: bytes) -> Any:
        answer, text = exchange(process, line, payload)
        ends.append(answer["full"])
        return answer | {"full": True}, text

    assert made.render(job("x")) == made.render(job("x")) == PromptText("x")
    assert len(made._processes._idle) == 1
    monkeypatch.setattr(module, "_exchange", full)
    assert made.render(job("x")) == PromptText("x")
    assert ends == [False]
    assert not made._processes._idle


def test_a_process_that_is_killed_is_replaced(processes: RenderProcesses) -> None:
    processes.render(job("x"))
    for process in processes._processes._idle:
        process.kill()
        process.wait()
    assert processes.render(job("y")) == PromptText("y")


def test_errors_of_a_template_are_those_of_the_servers_process(processes: RenderProcesses) -> None:
    for source, why in (
        ("{% for %}", "syntax error in line 1"),
        ("{{ raise_exception('no system role') }}", "^no system role$"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "Recursion|stopped"),
    ):
        with pytest.raises(TemplateError, match=why):
            processes.render(job(source))
    with pytest.raises(TemplateError, match="cannot be written as JSON"):
        processes.render(job("x")._replace(variables={"x": object()}))


def test_what_is_quoted_comes_back(processes: RenderProcesses) -> None:
    asked = job("{{ messages[0].content }}</s>", controls=Controls(("</s>", "hi")))
    assert processes.render(asked) == PromptText("hi</s>", ((0, 2),))


def test_the_variables_of_a_template(processes: RenderProcesses) -> None:
    assert processes.variables("{{ a }}{% set b = 1 %}{{ b }}") == {"a"}
    with pytest.raises(TemplateError, match="syntax error"):
        processes.variables("{% for %}")


def test_several_threads_have_a_process_each_and_two_stay(processes: RenderProcesses) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(processes.render(job(f"{n}")).text))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["0", "1", "2", "3"]
    assert len(processes._processes._idle) <= 2


def test_a_process_has_the_servers_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    for zone in ("Asia/Kolkata", "America/New_York", "UTC"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        made = RenderProcesses()
        assert made.render(job("{{ strftime_now('%H') }}")).text == datetime.now().strftime("%H")
        made.close()
    monkeypatch.undo()
    time.tzset()


def test_a_process_sees_none_of_the_servers_secrets(
    processes: RenderProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    processes.close()
    processes.render(job("x"))
    (process,) = processes._processes._idle
    if os.path.exists("/proc"):
        with open(f"/proc/{process.pid}/environ") as file:
            assert "secret" not in file.read()
