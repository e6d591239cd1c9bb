"""Per-request markers in system messages."""

from __future__ import annotations

import pytest

from headrace.api.compile.bodies import ChatBody
from headrace.api.compile.draft import Applied
from headrace.api.compile.markers import ALL, MARKERS, Action, chosen, known_marker, marker_at
from headrace.api.compile.normalization import described, header, normalized

GIT = "gitStatus: The status.\nCurrent branch: main\n\nStatus:\nM a.py\nM b.py\n\nRecent commits:\n1a Start\n"


FOUND = [
    ("billing_header", "x-anthropic-billing-header: cc_version=2.1; cch=9f3e;\n", "You are an agent."),
    ("total_tokens", "<total_tokens>179300 left</total_tokens>", "and more"),
    ("current_date", "Today's date: 2026-11-25\n", "Platform: linux"),
    ("current_date", "  Today\u2019s date is Wed Nov 25 2026.\n", "Platform: linux"),
    ("current_date", "Current time: 10:31:07\n", ""),
    ("current_date", "<current_date>2026-11-25</current_date>\n", "</env>"),
    ("git_status", GIT, "\n# Next section\nRecent changes are below."),
]


@pytest.mark.parametrize(("name", "marker", "rest"), FOUND)
def test_a_marker_is_found_as_clients_write_it(name, marker, rest):
    text = f"Rules first.\n{marker}{rest}"
    (found,) = MARKERS[name].pattern.findall(text)
    assert found == marker
    at = text.index(marker) + len(marker) // 2
    assert marker_at(text, at) == name
    assert marker_at(text, 3) == ""
    if rest:
        assert marker_at(text, len(text) - 1) == ""


@pytest.mark.parametrize(
    "text",
    [
        "Tell today's date in ISO form.",
        "The header x-anthropic-billing-header: is stripped by proxies.",
        "Write gitStatus: to the log",
        "Today we ship.",
        "total_tokens: 5",
    ],
)
def test_ordinary_text_is_no_marker(text):
    assert [name for name, marker in MARKERS.items() if marker.pattern.search(text)] == []


def test_names_choose_markers_in_the_order_of_the_table():
    assert [marker.name for marker in chosen(["total_tokens", "billing_header"])] == [
        "billing_header",
        "total_tokens",
    ]
    assert chosen([ALL]) == tuple(MARKERS.values())
    assert chosen([]) == ()
    with pytest.raises(ValueError, match="'dates' is not a marker; expected one of all, billing_header"):
        chosen(["dates"])
    assert known_marker("git_status") == "git_status"


@pytest.mark.parametrize(
    "text",
    [
        "gitStatus: x\n" + "Status\n" * 20_000 + "\0",
        "<total_tokens>" * 20_000,
        "Today's date:" * 20_000,
        "x-anthropic-billing-header:" + "\n" * 100_000,
        " " * 100_000,
        "\t-" * 50_000,
        "\t" * 100_000,
    ],
)
def test_a_hostile_text_is_searched_to_its_end(text):
    found = {name: len(marker.pattern.sub("", text)) for name, marker in MARKERS.items()}
    assert all(left <= len(text) for left in found.values())


BILLING = "x-anthropic-billing-header: cch=1234;\n"


EVERY = chosen(["all"])


def body(*messages):
    return ChatBody.model_validate({"messages": list(messages)})


def system(content):
    return {"role": "system", "content": content}


def user(content="Hello"):
    return {"role": "user", "content": content}


def shown(conversation):
    return [(message.role, message.text()) for message in conversation.messages]


def test_without_markers_nothing_is_touched():
    given = body(system("Be brief."), user(BILLING))
    same, done = normalized(given, EVERY)
    assert (same is given, done) == (True, ())
    given = body(system(BILLING), user())
    assert normalized(given, ()) == (given, ())


def test_a_nonce_is_removed_and_an_empty_block_with_it():
    parts = [{"type": "text", "text": text} for text in (BILLING.strip(), "Be brief.")]
    changed, done = normalized(body(system(parts), user()), EVERY)
    assert shown(changed) == [("system", "Be brief."), ("user", "Hello")]
    assert done == (Applied("billing_header", Action.REMOVED, 1),)
    changed, _ = normalized(body(system(BILLING), user()), EVERY)
    assert shown(changed) == [("user", "Hello")]


def test_a_system_message_that_was_all_there_was_stays():
    changed, done = normalized(body(system(BILLING)), EVERY)
    assert shown(changed) == [("system", "")]
    assert len(done) == 1


def test_what_is_constant_in_a_session_moves_to_the_first_user_message():
    given = body(
        system("Rules.\nToday's date: 2026-11-25\nMore rules."),
        user("One"),
        {"role": "assistant", "content": "Yes"},
        user("Two"),
    )
    changed, done = normalized(given, EVERY)
    assert shown(changed)[0] == ("system", "Rules.\nMore rules.")
    assert shown(changed)[1] == ("user", "One\n\nToday's date: 2026-11-25")
    assert shown(changed)[3] == ("user", "Two")
    assert described(done) == [
        {"marker": "current_date", "action": "moved_to_first_user_message", "times": 1}
    ]


def test_what_changes_by_turn_moves_to_the_last_message_and_only_its_last_value():
    budgets = "".join(f"<total_tokens>{n} left</total_tokens>\n" for n in (900, 800, 700))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = body(
        system(f"Rules.\n{budgets}"),
        user("One"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4 files"}]},
    )
    changed, done = normalized(given, EVERY)
    assert shown(changed)[0] == ("system", "Rules.\n")
    assert shown(changed)[-1] == ("tool", "4 files\n<total_tokens>700 left</total_tokens>")
    assert done == (Applied("total_tokens", Action.MOVED_TO_END, 3),)
    assert header(done) == {"X-Headrace-Normalized": "total_tokens=moved_to_last_message"}


def test_prefixes_of_two_turns_are_equal_afterwards():
    def turn(nonce, left, *more):
        return normalized(
            body(
                system(
                    f"x-anthropic-billing-header: cch={nonce};\nRules.\n<total_tokens>{left} left</total_tokens>"
                ),
                user("One"),
                *more,
            ),
            EVERY,
        )[0].messages

    first, second = turn("aa", 900), turn("bb", 800, {"role": "assistant", "content": "Yes"}, user("Two"))
    assert first[0] == second[0]
    assert second[1].text() == "One"


def test_text_that_no_message_could_take_stays():
    given = body(system("Today's date: 2026-11-25\nRules."), {"role": "assistant", "content": "Hi"})
    assert normalized(given, EVERY) == (given, ())


def test_a_cache_mark_of_a_removed_block_passes_to_the_one_before():
    mark = {"type": "ephemeral", "ttl": "1h"}
    parts = [
        {"type": "text", "text": "Rules."},
        {"type": "text", "text": BILLING, "cache_control": mark},
    ]
    changed, _ = normalized(body(system(parts), user()), EVERY)
    assert changed.messages[0].mark().seconds == 3600.0


def test_only_system_and_developer_messages_change():
    given = body(user(f"{BILLING}Explain this header."), {"role": "developer", "content": f"{BILLING}Rules."})
    changed, _ = normalized(given, EVERY)
    assert shown(changed) == [("user", f"{BILLING}Explain this header."), ("developer", "Rules.")]
