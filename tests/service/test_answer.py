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
