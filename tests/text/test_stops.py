from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stream import Match, StopMatcher

reproducible = settings(deadline=None, derandomize=True)

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut_by_the_book(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character; the longest stop string that ends here ends the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@reproducible
@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(1, 6), max_size=30))
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    matcher = StopMatcher(stops, include)
    shown, stopped, at = "", None, 0
    for size in [*sizes, len(text)]:
        seen = matcher.push(text[at : at + size])
        at += size
        if isinstance(seen, Match):
            shown, stopped = shown + seen.text, seen.stop
            break
        shown += seen
    else:
        shown += matcher.flush()
    assert (shown, stopped) == cut_by_the_book(text, stops, include)


@reproducible
@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for char in text:
        if isinstance(matcher.push(char), Match):
            return
        seen += char
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0
        )
        assert matcher.held == longest
