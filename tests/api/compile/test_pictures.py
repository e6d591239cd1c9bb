"""Images in every dialect: they reach the engine as spans of the prompt, and errors name the field that has them."""

from __future__ import annotations

import asyncio

import pytest

from headrace.api.compile import pictures as room
from headrace.api.compile.bodies import ImageUrl
from headrace.api.compile.pictures import PictureReader, SentImage
from headrace.text.images import BadPicture, PictureLimits
from tests.api.image_text import MARK, TEMPLATE, ColumnImages, data_url, png

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LIMITS = PictureLimits(4096, 100)
RED, BLUE = png(3), png(5, color=(0, 0, 255))


@pytest.fixture
def options(request):
    given = {
        "template": TEMPLATE,
        "images": ColumnImages(),
        "pictures": PictureReader(LIMITS, most=3),
        "max_model_len": 128,
    }
    return given | getattr(request, "param", {})


def image(file=RED, **more):
    return {"type": "image_url", "image_url": {"url": data_url(file)} | more}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return [{"role": "user", "content": [*parts]}]


def post(house, path, body, status=200):
    answer = house.client.post(path, json={"max_tokens": 4} | body if path != RESPONSES else body)
    assert answer.status_code == status, answer.text
    return answer.json()


def refused(house, path, body, status=400):
    return post(house, path, body, status)["error"]


def source(file=RED):
    kind, data = data_url(file).removeprefix("data:").split(";base64,")
    return {"type": "base64", "media_type": kind, "data": data}


IMAGE = {"type": "image", "source": source()}
INPUT_IMAGE = {"type": "input_image", "image_url": data_url(RED)}
BODIES = {
    CHAT: {"messages": user(text("a"), image(), text("b"), image(BLUE))},
    MESSAGES: {
        "messages": user(
            text("a"),
            {"type": "image", "source": source()},
            text("b"),
            {"type": "image", "source": source(BLUE)},
        )
    },
    RESPONSES: {
        "input": user(
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": data_url(RED)},
            {"type": "input_text", "text": "b"},
            {"type": "input_image", "image_url": data_url(BLUE), "detail": "high"},
        ),
        "max_output_tokens": 4,
    },
}


@pytest.fixture
def requests(house, monkeypatch):
    """The engine's requests."""
    seen, submit = [], house.engine.submit
    monkeypatch.setattr(
        house.engine, "submit", lambda request, *rest: (seen.append(request), submit(request, *rest))[1]
    )
    return seen


@pytest.mark.parametrize("path", BODIES)
def test_images_keep_their_place_between_texts_in_every_dialect(house, requests, path):
    usage = post(house, path, BODIES[path])["usage"]
    (request,) = requests
    prompt = house.model.tokenizer.decode(request.tokens, skip_special_tokens=False)
    assert prompt == f"[user] a{'<pad>' * 3}b{'<pad>' * 5}[assistant] "
    assert [span.length for span in request.images] == [3, 5]
    assert [request.tokens[span.start] for span in request.images] == [MARK, MARK]
    assert len({span.digest for span in request.images}) == 2
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(request.tokens)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_may_have_images(house, path):
    body = BODIES[path] | {"stream": True} | ({} if path == RESPONSES else {"max_tokens": 4})
    with house.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        assert "data:" in answer.read().decode()


def test_an_image_alone_and_in_several_turns(house, requests):
    messages = [*user(image()), {"role": "assistant", "content": "A fox."}, *user(text("And?"), image(BLUE))]
    post(house, CHAT, {"messages": messages})
    assert [span.length for span in requests[0].images] == [3, 5]


def test_results_of_tools_may_have_images(house, requests):
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [text("seen"), {"type": "image", "source": source()}],
    }
    messages = [*user(text("look")), {"role": "assistant", "content": [use]}, *user(result)]
    post(house, MESSAGES, {"messages": messages})
    items = [
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_image", "image_url": data_url(RED)}],
        },
    ]
    post(house, RESPONSES, {"input": items, "max_output_tokens": 4})
    assert [[span.length for span in each.images] for each in requests] == [[3], [3]]


def test_text_that_spells_the_placeholder_stays_text(house, requests):
    post(house, CHAT, {"messages": user(text("<pad>"), image(), text("<pad><pad>"))})
    (request,) = requests
    assert list(request.tokens).count(MARK) == 3
    assert house.model.tokenizer.decode(request.tokens, skip_special_tokens=False).count("<pad>") == 6


def test_what_counts_tokens_counts_those_of_images(house, requests):
    for path in BODIES:
        post(house, path, BODIES[path])
    counted = [
        ("/tokenize", BODIES[CHAT] | {"add_generation_prompt": True}, "count"),
        (f"{MESSAGES}/count_tokens", BODIES[MESSAGES], "input_tokens"),
        (f"{RESPONSES}/input_tokens", {"input": BODIES[RESPONSES]["input"]}, "input_tokens"),
    ]
    counts = [house.client.post(path, json=body).json()[field] for path, body, field in counted]
    assert counts == [len(each.tokens) for each in requests]


def test_a_stored_conversation_keeps_its_images(house, requests):
    first = post(house, RESPONSES, BODIES[RESPONSES])
    post(house, RESPONSES, {"input": "And now?", "previous_response_id": first["id"], "max_output_tokens": 4})
    assert [span.digest for span in requests[0].images] == [span.digest for span in requests[1].images]
    (item,) = house.client.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert item["content"][1] == {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}


@pytest.mark.parametrize("options", [{"pictures": PictureReader(PictureLimits(4096, 2000))}], indirect=True)
def test_low_detail_is_reduced(house):
    """And nothing else is; this model takes neither."""
    parts = image(png(600, 1), detail="low"), image(png(600, 1), detail="auto")
    error = refused(house, CHAT, {"messages": user(*parts)})
    assert "more than 30 columns" in error["message"]
    assert [picture.width for picture in house.model.images.pictures] == [512, 600]


BAD = [
    (data_url(b"hello"), "no image in PNG, JPEG, WebP or GIF"),
    (data_url(RED[:40]), "cannot be"),
    (data_url(png(11, 10)), "11 x 10 pixels; at most 100"),
    (data_url(RED + bytes(5000)), "4096"),
    (data_url(png(31)), "more than 30 columns"),
    ("data:image/png,xyz", "base64"),
    ("data:image/png;base64,!!!!", "base64"),
    (data_url(RED, "text/html"), "'text/html'"),
    ("http://example.com/a.png", "--allowed-media-domains"),
    ("file:///etc/passwd", "--allowed-media-domains"),
    ("", "--allowed-media-domains"),
]


@pytest.mark.parametrize(("url", "why"), BAD)
def test_a_bad_image_is_refused_with_its_field_and_the_reason(house, url, why):
    part = {"type": "image_url", "image_url": {"url": url}}
    error = refused(house, CHAT, {"messages": user(image(), text("x"), part)})
    assert error["param"] == "messages[0].content[2].image_url.url"
    assert error["code"] == "invalid_image"
    assert error["param"] in error["message"]
    assert why in error["message"]
    blocks = [text("hi"), {"type": "image", "source": {"type": "url", "url": url}}]
    error = refused(
        house,
        MESSAGES,
        {"messages": [*user(text("a")), {"role": "assistant", "content": "b"}, *user(*blocks)]},
    )
    assert "messages[2].content[1].source.url" in error["message"]
    items = [{"role": "system", "content": "s"}, *user({"type": "input_image", "image_url": url})]
    error = refused(house, RESPONSES, {"input": items})
    assert error["param"] == "input[1].content[0].image_url"
    assert error["param"] in error["message"]
    assert post(house, CHAT, {"messages": user(text("still here"))})["choices"]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (image(detail="huge"), "messages[0].content[0].image_url.detail"),
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": "x"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        (image(size=3), "messages[0].content[0].image_url.size"),
        (image() | {"uuid": "x"}, "messages[0].content[0].uuid"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
        ({"type": "video_url", "video_url": {}}, "messages[0].content[0].type"),
        ({"type": "file", "file": {}}, "messages[0].content[0].type"),
    ],
)
def test_a_part_of_another_form_is_refused_by_its_field(house, part, param):
    assert refused(house, CHAT, {"messages": user(part)})["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            RESPONSES,
            {"input": user({"type": "input_image", "file_id": "file-1"})},
            "input[0].content[0].file_id",
        ),
        (RESPONSES, {"input": user({"type": "input_file"})}, "input[0].content[0].type"),
        (RESPONSES, {"input": user({"type": "input_image"})}, "input[0].content[0].image_url"),
        (RESPONSES, BODIES[RESPONSES] | {"truncation": "auto"}, "truncation"),
        (
            RESPONSES,
            BODIES[RESPONSES] | {"context_management": [{"type": "compaction"}]},
            "context_management",
        ),
        (f"{RESPONSES}/compact", {"model": "fox", "input": BODIES[RESPONSES]["input"]}, "input"),
        (
            MESSAGES,
            {"messages": user(IMAGE | {"source": {"type": "file", "file_id": "x"}})},
            "messages[0].content[0].source",
        ),
        (MESSAGES, {"messages": user({"type": "document"})}, "messages[0].content[0]"),
        (
            MESSAGES,
            {"messages": user(IMAGE | {"source": source() | {"media_type": "x"}})},
            "media_type",
        ),
        (CHAT, BODIES[CHAT] | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (CHAT, BODIES[CHAT] | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (
            CHAT,
            {"messages": [{"role": "system", "content": [image()]}, *user(text("x"))]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            {"messages": [*user(text("x")), {"role": "assistant", "content": [image()]}]},
            "messages[1].content[0].type",
        ),
        (CHAT, {"messages": user(*[image()] * 4)}, "messages[0].content[3]"),
        ("/v1/cache/warm", {"prefixes": [{"messages": user(image())}]}, "messages"),
    ],
)
def test_what_images_cannot_do_is_refused_by_name(house, path, body, name):
    given = body if path.startswith((RESPONSES, "/v1/cache")) else {"max_tokens": 4} | body
    answer = house.client.post(path, json=given)
    assert answer.status_code == 400, answer.text
    assert name in answer.text


@pytest.mark.parametrize("options", [{"images": None}], indirect=True)
@pytest.mark.parametrize(
    ("path", "param"),
    [
        (CHAT, "messages[0].content[1].type"),
        (MESSAGES, "messages[0].content[1].type"),
        (RESPONSES, "input[0].content[1].type"),
    ],
)
def test_a_model_of_text_refuses_images_by_their_field(house, path, param):
    error = refused(house, path, BODIES[path])
    assert param in error["message"]
    assert "the model takes text only" in error["message"]
    counting = {
        CHAT: "/tokenize",
        MESSAGES: f"{MESSAGES}/count_tokens",
        RESPONSES: f"{RESPONSES}/input_tokens",
    }[path]
    body = {name: value for name, value in BODIES[path].items() if name in ("messages", "input")}
    assert param in house.client.post(counting, json=body).json()["error"]["message"]


@pytest.mark.parametrize("options", [{"template": "{{ messages[0].content[0].text }}"}], indirect=True)
def test_a_template_that_leaves_out_an_image_is_refused(house):
    assert "leaves out images" in refused(house, CHAT, {"messages": user(text("a"), image())})["message"]


def test_marks_of_the_cache_cover_images(house, requests):
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        *user(image(), text("first") | mark),
        {"role": "assistant", "content": "b"},
        *user(image(BLUE) | mark),
    ]
    post(house, CHAT, {"messages": messages})
    (request,) = requests
    first, second = [each for each in request.retention if each.seconds == 300.0]
    prompt = house.model.tokenizer.decode(request.tokens[: first.end], skip_special_tokens=False)
    assert prompt == "[user] <pad><pad><pad>first"
    assert second.end > request.images[1].end


def test_images_wait_for_memory_in_their_order(monkeypatch):
    """An image takes the memory of the largest one while it is decoded, and then its own."""
    monkeypatch.setattr(room, "MOST_HELD_BYTES", 3 * 120)
    reader, order = PictureReader(LIMITS), []

    async def hold(width, until):
        (file,) = await reader.read([SentImage("p", "f", ImageUrl(url=data_url(png(width))))])
        async with file.decoded() as picture:
            order.append(picture.width)
            await until.wait()

    async def scene():
        first, others = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(hold(9, first)), asyncio.create_task(hold(8, first))]
        while len(order) < 2:  # the second one waits until the first has shrunk
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(hold(7, others))]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(hold(1, others))]
        await asyncio.sleep(0.05)
        before = [*order]
        tasks[2].cancel()  # a request that is given up does not hold up the next
        await asyncio.sleep(0.05)
        first.set(), others.set()
        await asyncio.wait(tasks)
        return before, reader._room.held

    assert asyncio.run(scene()) == ([9, 8], 0)
    assert order == [9, 8, 1]


def test_base64_is_decoded_in_pieces(monkeypatch):
    monkeypatch.setattr(room, "_PIECE", 8)
    for size in range(40):
        data = bytes(range(size))
        url = data_url(data)
        assert room._decoded_url(url, 100) == data
        assert room._decoded_url(url.replace("png;", "png;name=" + "x" * 500 + ";"), 100) == data
    start = "data:image/png;base64,"
    for wrong in ("AA==AAAA", "AAAAAA==AAAA", "AAA", "AAAA AAA", "A===", "AAAAAAA=AAAAAAAA", "=AAAAAAA"):
        with pytest.raises(BadPicture, match="not valid base64"):
            room._decoded_url(start + wrong, 100)
