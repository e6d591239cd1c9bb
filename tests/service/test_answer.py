from headrace.core.events import Emitted, Finished
from headrace.core.request import FinishReason, Request
from headrace.service.answer import Answer


def test_the_first_token_is_timed_whether_or_not_its_reader_is_woken() -> None:
    for interval in (0, 1):
        answer = Answer([Request("a", (1,)), Request("b", (1,))], interval)
        assert answer.first_token_at is None
        answer.tell(1, Emitted("b", (7,)))
        first = answer.first_token_at
        assert first is not None
        answer.tell(0, Emitted("a", (7,)))
        answer.tell(0, Finished("a", FinishReason.STOP, 1, 1, 0))
        assert answer.first_token_at == first


class Woken:
    """A reader that counts how often it is woken."""

    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        self.count += 1


def test_a_reader_is_woken_once_until_it_reads() -> None:
    answer, reader = Answer([Request("a", (1,)), Request("b", (1,))], 2), Woken()
    answer.wakes(reader)
    counts = []
    for event in (
        *(Emitted("a", (1,)), Emitted("a", (2,)), Emitted("b", (3,))),  # the first token of a is enough
        Finished("b", FinishReason.STOP, 1, 1, 0),
    ):
        answer.tell("ab".index(event.request_id), event)
        counts.append(reader.count)
    assert counts == [1, 1, 1, 1]
    assert len(answer.take()) == 4
    answer.tell(0, Emitted("a", (4,)))
    assert reader.count == 1  # the tokens are counted from the first of b on
    answer.tell(0, Emitted("a", (5,)))
    assert reader.count == 2
    answer.take()
    answer.wakes(None)
    answer.tell(0, Finished("a", FinishReason.STOP, 1, 1, 0))
    assert reader.count == 2
    answer.wakes(reader)  # all has arrived before
    assert reader.count == 3
