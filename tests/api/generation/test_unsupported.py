import pytest

from headrace.api.compile.bodies import CHAT, COMPLETIONS, TOKENIZE, ChatBody, CompletionBody, Message
from headrace.api.errors import ApiError
from headrace.api.openai.routes import TokenizeBody, TokenizeChatBody
from headrace.api.wire import MESSAGE, refuse_unsupported


@pytest.mark.parametrize("name", sorted(CHAT))
def test_null_and_neutral_values_ask_for_nothing(name):
    for neutral in (None, *CHAT[name]):
        assert refuse_unsupported({name: neutral, "n": 1}, CHAT) == {"n": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("verbosity", "low"),
        ("store", True),
        ("use_beam_search", 0),  # 0 == False, but it is not the neutral value
        ("best_of", True),
        ("audio", {}),
    ],
)
def test_what_asks_for_something_is_refused_by_name(name, value):
    with pytest.raises(ApiError) as error:
        refuse_unsupported({name: value}, CHAT)
    assert error.value.param == name
    assert error.value.code == "unsupported_parameter"
    assert "not supported yet" in str(error.value)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "assistant", "function_call": {}}, "messages[1].function_call"),
        (
            {"role": "user", "content": [{"type": "text"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
    ],
)
def test_messages_are_looked_into(message, param):
    with pytest.raises(ApiError) as error:
        refuse_unsupported({"messages": [{"role": "user", "content": ""}, message]}, CHAT)
    assert error.value.param == param


def test_a_message_as_the_client_dumped_it_passes():
    message = {"role": "assistant", "content": "x", "function_call": None, "audio": None}
    kept = refuse_unsupported({"messages": [message, 5]}, CHAT)
    assert kept["messages"] == [{"role": "assistant", "content": "x"}, 5]


@pytest.mark.parametrize(
    ("table", "form"),
    [
        (CHAT, ChatBody),
        (COMPLETIONS, CompletionBody),
        (TOKENIZE, TokenizeBody),
        (TOKENIZE, TokenizeChatBody),
        (MESSAGE, Message),
    ],
)
def test_no_field_is_both_supported_and_not(table, form):
    assert not set(table) & set(form.model_fields)
