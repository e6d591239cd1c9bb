"""The memory plan with a draft model, against the memory that the process takes."""

from __future__ import annotations

import json
import subprocess
import sys

ROWS = 16

SCRIPT = """
import json, sys
from headrace.wiring import model
from headrace.wiring.drafting import proposer_of
from headrace.compute.device import resident_bytes
from headrace.compute.drafting.draft_model import DraftModel
from headrace.config import options
from headrace.core.events import Finished
from headrace.core.request import Request, SamplingParams

loaded = model.load(options(json.loads(sys.argv[1])))
engine, ledger = loaded.engine, loaded.ledger
length = ledger.max_model_len - 8
rows = int(sys.argv[2])
for i in range(rows):  # as long as they may be, so that all pages are used
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.submit(Request(f"r{i}", tuple((7 * i + j) % 4000 for j in range(length - 40)), params, seed=i), 0.0)
left, now = rows, 0.0
while left:
    now += 0.01
    left -= sum(isinstance(event, Finished) for event in engine.step(now))
proposer = proposer_of(engine.scheduler.drafter, DraftModel)
draft = proposer._forward._kv.nbytes
print(json.dumps([resident_bytes(), ledger.total_bytes, draft]))
"""


def test_the_process_takes_what_the_plan_says_with_a_draft_model() -> None:
    drafts = {
        "method": "draft_model",
        "model": "builtin-draft",
        "adaptive": False,
        "num_speculative_tokens": 4,
    }
    given = {
        "dtype": "float32",  # where bfloat16 is emulated, its activations take more than is estimated
        "max_num_seqs": ROWS,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 240 << 20,
        "speculative_config": json.dumps(drafts),
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps(given), str(ROWS)]
    for _ in range(3):  # where memory is short, the system takes pages of libraries away
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        resident, planned, draft = json.loads(done.stdout.splitlines()[-1])
        if abs(resident - planned) < 0.05 * planned:
            break
    assert draft > 20 << 20, "the draft model has no pages"
    assert abs(resident - planned) < 0.05 * planned, f"{resident:,} bytes are used, {planned:,} were planned"
