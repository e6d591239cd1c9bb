"""The drafter of speculative decoding, from ``--speculative-config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from headrace.config import SchedulerOptions
from headrace.config.speculation import SpeculativeConfig, read_speculation
from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.cached import CachedAnswerProposer
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.ngram import NgramProposer
from headrace.core.drafting.prediction import PredictionProposer
from headrace.core.drafting.proposal import Drafter, Proposer
from headrace.core.drafting.suffix import SuffixProposer

ProposerT = TypeVar("ProposerT", bound=Proposer)

PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": lambda config: NgramProposer(
        config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
    ),
    "suffix": lambda config: SuffixProposer(config.num_speculative_tokens, config.suffix_max_bytes),
    "prediction": lambda config: PredictionProposer(config.num_speculative_tokens),
    "cached": lambda config: CachedAnswerProposer(config.num_speculative_tokens),
}


def make_drafter(plans: SchedulerOptions) -> Drafter | None:
    """The drafter that the options ask for; None if they ask for none.

    Raises:
        ConfigError: the configuration is wrong.
    """
    if plans.speculative_config is None:
        return None
    config = read_speculation("--speculative-config", plans.speculative_config)
    fixed = None if config.adaptive else config.num_speculative_tokens
    proposers = [PROPOSERS[method](config) for method in config.methods]
    return BudgetedDrafter(proposers, Acceptance(), DraftBudget(fixed))


def proposer_of(drafter: Drafter | None, kind: type[ProposerT]) -> ProposerT | None:
    """The drafter's proposer of this class, if it has one."""
    proposers = drafter.proposers if isinstance(drafter, BudgetedDrafter) else ()
    return next((each for each in proposers if isinstance(each, kind)), None)
