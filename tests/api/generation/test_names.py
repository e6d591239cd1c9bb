import pytest

from headrace.api.anthropic.routes import NAMES
from headrace.api.errors import ApiError, invalid
from headrace.api.wire import named
from headrace.core.request import InvalidParameter


def renamed(error: Exception) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as raised, named(NAMES):
        raise error
    return raised.value.param, str(raised.value)


def test_errors_have_the_names_of_the_dialect():
    broken = invalid("response_format: no such type", "response_format.json_schema")
    assert renamed(broken) == ("output_config.format", "output_config.format: no such type")
    assert renamed(InvalidParameter("stop", "stop must not be empty")) == (
        "stop_sequences",
        "stop_sequences must not be empty",
    )


def test_other_errors_stay_as_they_are():
    error = invalid("messages: the user may not stop", "messages")
    assert renamed(error) == ("messages", str(error))
