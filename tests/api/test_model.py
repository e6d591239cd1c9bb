import pytest

from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError
from headrace.text.template import ChatTemplate
from tests.text.vocabularies import byte_level

FOLDER = "/srv/models/secret-place/qwen"


def model(**more):
    return ServedModel("qwen", byte_level(), ChatTemplate({}), 100, 400, source=FOLDER, **more)


def test_the_card_shows_no_path():
    card = model(aliases=(FOLDER,)).card
    assert card["id"] == card["root"] == "qwen"
    assert "secret-place" not in str(card)


def test_a_request_may_name_the_model_as_it_was_given_at_the_start():
    named = model(aliases=(FOLDER,))
    for name in ("qwen", FOLDER, None):
        named.check_name(name)
    with pytest.raises(ApiError, match="other"):
        named.check_name("other")
    with pytest.raises(ApiError):
        model().check_name(FOLDER)


def test_the_fingerprint_tells_folders_apart():
    other = ServedModel("qwen", byte_level(), ChatTemplate({}), 100, 400, source="/elsewhere/qwen")
    assert other.fingerprint != model().fingerprint
