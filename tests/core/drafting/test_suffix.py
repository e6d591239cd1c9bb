import pytest

from headrace.core.drafting import suffix
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.drafting.suffix import CHUNK, SuffixProposer, scope_of
from headrace.core.request import Request

OUTPUT = list(range(100, 140))


def request(name: str = "r", **more: object) -> Request:
    return Request(name, (1, 2, 3), **more)  # type: ignore[arg-type]


def propose(
    proposer: SuffixProposer, asking: Request, output: list[int], max_tokens: int = 4
) -> Proposal | None:
    (found,) = proposer.propose([DraftRow(asking, [*asking.tokens, *output], max_tokens)])
    return found


def test_a_past_output_is_proposed_again() -> None:
    proposer = SuffixProposer(8)
    for each in range(4):
        proposer.ended(request(str(each)), [1, 2, 3, *OUTPUT])
    found = propose(proposer, request(), OUTPUT[:10])
    assert found is not None
    assert found.tokens == tuple(OUTPUT[10:14])
    assert found.source == "suffix"
    assert propose(proposer, request(), [7, 8, 9]) is None


def test_the_end_of_the_prompt_leads_to_the_output() -> None:
    proposer = SuffixProposer(8)
    proposer.ended(request(), [1, 2, 3, *OUTPUT])
    found = propose(proposer, request(), [], max_tokens=1)
    assert found is not None
    assert found.tokens == (100,)


@pytest.mark.parametrize("other", [{"salt": "b"}, {"tenant": "b"}, {"adapter": "b"}])
def test_no_proposal_crosses_a_scope(other: dict[str, str]) -> None:
    proposer = SuffixProposer(8)
    proposer.ended(request(), [1, 2, 3, *OUTPUT])
    assert propose(proposer, request(), OUTPUT[:10]) is not None
    assert propose(proposer, request(**other), OUTPUT[:10]) is None
    assert scope_of(request()) != scope_of(request(**other))


def test_an_output_that_may_not_be_stored_is_not_indexed() -> None:
    proposer = SuffixProposer(8)
    proposer.ended(request(indexed=False), [1, 2, 3, *OUTPUT])
    assert propose(proposer, request(), OUTPUT[:10]) is None


def test_a_tenant_or_all_can_be_forgotten() -> None:
    proposer = SuffixProposer(8)
    for tenant in ("a", "b"):
        proposer.ended(request(tenant=tenant), [1, 2, 3, *OUTPUT])
    proposer.forget("a")  # before they were indexed
    assert propose(proposer, request(tenant="a"), OUTPUT[:10]) is None
    assert propose(proposer, request(tenant="b"), OUTPUT[:10]) is not None
    proposer.forget()  # afterwards
    assert propose(proposer, request(tenant="b"), OUTPUT[:10]) is None
    assert proposer.nbytes == 0


def test_outputs_are_indexed_a_few_tokens_at_a_time() -> None:
    proposer = SuffixProposer(8)
    outputs = [list(range(at, at + CHUNK + 1)) for at in (1000, 2000)]
    for output in outputs:
        proposer.ended(request(), [1, 2, 3, *output])
    for at, output in enumerate(outputs):
        assert propose(proposer, request(), output[:-1]) is None, "its last token has not been indexed yet"
        assert proposer.counts.outputs == at + 1
    assert propose(proposer, request(), [7, 8, 9]) is None
    for output in outputs:
        found = propose(proposer, request(), output[CHUNK - 3 : CHUNK])
        assert found is not None, "parts are joined"
        assert found.tokens == (output[CHUNK],)


def test_the_indexes_are_bounded() -> None:
    proposer = SuffixProposer(8, max_bytes=200_000)
    for at in range(200):
        proposer.ended(request(tenant=f"t{at}"), [1, 2, 3, *OUTPUT])
        propose(proposer, request(), [])
    assert 0 < proposer.nbytes <= 200_000
    assert proposer.counts.evicted_scopes > 0
    assert SuffixProposer(8, max_bytes=0).nbytes == 0


def test_outputs_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_PENDING", 3)
    proposer = SuffixProposer(8)
    for _ in range(10):
        proposer.ended(request(), [1, 2, 3, *OUTPUT])
    propose(proposer, request(), [])
    assert proposer.counts.outputs == 3
