from __future__ import annotations

import pytest

from headrace.core.knobs import Knobs
from headrace.core.scheduler.draft import Draft


@pytest.mark.parametrize(
    ("remaining", "decodes", "planned", "knobs", "share"),
    [
        (10, 0, 0, Knobs(), (10, "whole")),
        (20, 0, 0, Knobs(), (16, "budget")),
        (10, 1, 0, Knobs(mixed_prefill_tokens=4), (4, "budget")),
        (10, 0, 0, Knobs(mixed_prefill_tokens=4), (10, "whole")),
        (10, 1, 4, Knobs(mixed_prefill_tokens=4), (0, "budget")),
        (10, 1, 9, Knobs(mixed_prefill_tokens=4), (0, "budget")),
        (10, 0, 0, Knobs(long_prefill_tokens=3), (3, "long_prompt")),
        (3, 0, 0, Knobs(long_prefill_tokens=3), (3, "whole")),
        (16, 0, 0, Knobs(chunked_prefill=False, long_prefill_tokens=3), (16, "whole")),
        (17, 0, 0, Knobs(chunked_prefill=False), (0, "budget")),
    ],
)
def test_share(remaining, decodes, planned, knobs, share):
    draft = Draft(0, budget=16)
    draft.decodes, draft.prefill_tokens = decodes, planned
    assert draft.share(remaining, knobs) == share
