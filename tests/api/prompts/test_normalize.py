from headrace.api.compile.bodies import ChatBody
from headrace.api.compile.draft import Applied
from headrace.api.compile.markers import Action, chosen
from headrace.api.compile.render import described, header, normalized

BILLING = "x-anthropic-billing-header: cch=1234;\n"
ALL = chosen(["all"])


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
    same, done = normalized(given, ALL)
    assert (same is given, done) == (True, ())
    given = body(system(BILLING), user())
    assert normalized(given, ()) == (given, ())


def test_a_nonce_is_removed_and_an_empty_block_with_it():
    parts = [{"type": "text", "text": text} for text in (BILLING.strip(), "Be brief.")]
    changed, done = normalized(body(system(parts), user()), ALL)
    assert shown(changed) == [("system", "Be brief."), ("user", "Hello")]
    assert done == (Applied("billing_header", Action.REMOVED, 1),)
    changed, _ = normalized(body(system(BILLING), user()), ALL)
    assert shown(changed) == [("user", "Hello")]


def test_a_system_message_that_was_all_there_was_stays():
    changed, done = normalized(body(system(BILLING)), ALL)
    assert shown(changed) == [("system", "")]
    assert len(done) == 1


def test_what_is_constant_in_a_session_moves_to_the_first_user_message():
    given = body(
        system("Rules.\nToday's date: 2026-11-25\nMore rules."),
        user("One"),
        {"role": "assistant", "content": "Yes"},
        user("Two"),
    )
    changed, done = normalized(given, ALL)
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
    changed, done = normalized(given, ALL)
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
            ALL,
        )[0].messages

    first, second = turn("aa", 900), turn("bb", 800, {"role": "assistant", "content": "Yes"}, user("Two"))
    assert first[0] == second[0]
    assert second[1].text() == "One"


def test_text_that_no_message_could_take_stays():
    given = body(system("Today's date: 2026-11-25\nRules."), {"role": "assistant", "content": "Hi"})
    assert normalized(given, ALL) == (given, ())


def test_a_cache_mark_of_a_removed_block_passes_to_the_one_before():
    mark = {"type": "ephemeral", "ttl": "1h"}
    parts = [
        {"type": "text", "text": "Rules."},
        {"type": "text", "text": BILLING, "cache_control": mark},
    ]
    changed, _ = normalized(body(system(parts), user()), ALL)
    assert changed.messages[0].mark().seconds == 3600.0


def test_only_system_and_developer_messages_change():
    given = body(user(f"{BILLING}Explain this header."), {"role": "developer", "content": f"{BILLING}Rules."})
    changed, _ = normalized(given, ALL)
    assert shown(changed) == [("user", f"{BILLING}Explain this header."), ("developer", "Rules.")]
