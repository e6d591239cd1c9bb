"""Checks and test doubles for extensions of Headrace, for use from your own tests. pytest is not required.

`check_order`, `check_admission`, `check_victims`, `check_eviction`, `check_store` and `check_workload` raise an
AssertionError that says what is wrong. Files in reading order:

- `checks`: checks of queue orders, admission, victim and eviction policies, stores of responses and workloads;
  requests, and a crowd of them, served with the policies under test
- `engines`: engines over the hashing runner, and the loop that drives them in virtual time
- `hashing_runner`: a runner without a model that makes any wrong block visible in the output; its peers,
  and a drafter with wrong drafts, which must not change outputs
"""

from headrace.testing.checks import (
    ADMISSION_CHECKS,
    EVICTION_CHECKS,
    ORDER_CHECKS,
    STORE_CHECKS,
    VICTIM_CHECKS,
    WORKLOAD_CHECKS,
    StoreTraits,
    check_admission,
    check_eviction,
    check_order,
    check_outputs,
    check_store,
    check_victims,
    check_workload,
    make_crowd,
    make_request,
    serve_crowd,
)
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, LyingDrafter, expected_tokens

__all__ = [
    "ADMISSION_CHECKS",
    "EVICTION_CHECKS",
    "ORDER_CHECKS",
    "STORE_CHECKS",
    "VICTIM_CHECKS",
    "WORKLOAD_CHECKS",
    "HashingRunner",
    "LyingDrafter",
    "Record",
    "StoreTraits",
    "check_admission",
    "check_eviction",
    "check_order",
    "check_outputs",
    "check_store",
    "check_victims",
    "check_workload",
    "drain",
    "expected_tokens",
    "hashing_engine",
    "make_crowd",
    "make_request",
    "serve_crowd",
]
