import pytest

from headrace.api.compile.markers import ALL, MARKERS, chosen, known_marker, marker_at

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
