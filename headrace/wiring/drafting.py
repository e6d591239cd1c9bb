"""The drafter: tokens that grammars force, and speculative decoding from ``--speculative-config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from headrace.config import ConfigError, SchedulerOptions
from headrace.config.objects import SpeculativeConfig, read_speculation
from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.forced import ForcedTokenDrafter, ForcedTokens
from headrace.core.drafting.prediction import CachedAnswerProposer, PredictionProposer
from headrace.core.drafting.proposal import CostlyProposer, Drafter, Proposer
from headrace.core.drafting.suffix import NgramProposer, SuffixProposer
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.observe.recording import RecordedDrafter

ProposerT = TypeVar("ProposerT", bound=Proposer)

PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": lambda config: NgramProposer(
        config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
    ),
    "suffix": lambda config: SuffixProposer(config.num_speculative_tokens, config.suffix_max_bytes),
    "prediction": lambda config: PredictionProposer(config.num_speculative_tokens),
    "cached": lambda config: CachedAnswerProposer(config.num_speculative_tokens),
}


class ModelDrafts(NamedTuple):
    """A proposer that runs a draft model.

    ``share`` is the time of drafting one token, relative to the target model's time for a step of the same rows.
    """

    proposer: CostlyProposer
    share: float


def speculation(plans: SchedulerOptions) -> SpeculativeConfig | None:
    """The configuration of speculative decoding; None without one.

    Raises:
        ConfigError: it is invalid.
    """
    if plans.speculative_config is None:
        return None
    return read_speculation("--speculative-config", plans.speculative_config)


def reads_states(plans: SchedulerOptions) -> bool:
    """Whether a head drafts. It needs the hidden states of a step before the next one is planned: steps cannot overlap.

    Raises:
        ConfigError: the options ask for a head and for overlap.
    """
    config = speculation(plans)
    if config is None or not config.has_head:
        return False
    if plans.overlap:
        raise ConfigError(f"--overlap {plans.overlap}: method eagle3 needs the output of a step first; use 0")
    return True


def make_drafter(
    plans: SchedulerOptions, model: ModelDrafts | None = None, forced: ForcedTokens | None = None
) -> Drafter | None:
    """The drafter that the options ask for, which first proposes the tokens that grammars force; None without both.

    ``model`` is a draft model, if there is one.

    Raises:
        ConfigError: the configuration is invalid.
    """
    asked = _budgeted(plans, model)
    return asked if forced is None else ForcedTokenDrafter(forced, asked)


def _budgeted(plans: SchedulerOptions, model: ModelDrafts | None) -> Drafter | None:
    config = speculation(plans)
    if config is None:
        return None
    fixed = None if config.adaptive else config.num_speculative_tokens
    proposers = [PROPOSERS[method](config) for method in config.methods if method in PROPOSERS]
    costly = () if model is None else (model,)
    return BudgetedDrafter(proposers, Acceptance(), DraftBudget(fixed), costly)


def make_simulated_drafter(plans: SchedulerOptions, forced: ForcedAcceptance) -> Drafter | None:
    """A drafter whose proposals are accepted as ``forced`` determines, instead of the methods that the options name.

    For simulations, which have no text. None if the options ask for no drafts.

    Raises:
        ConfigError: the configuration is invalid.
    """
    config = speculation(plans)
    if config is None:
        return None
    forced.most = config.num_speculative_tokens
    budget = DraftBudget(None if config.adaptive else config.num_speculative_tokens)
    if forced.share:
        return BudgetedDrafter((), Acceptance(), budget, [ModelDrafts(forced, forced.share)])
    return BudgetedDrafter([forced], Acceptance(), budget)


def proposer_of(drafter: Drafter | None, kind: type[ProposerT]) -> ProposerT | None:
    """The drafter's proposer of this class, if it has one."""
    asked = drafter.inner if isinstance(drafter, RecordedDrafter) else drafter
    asked = asked.fallback if isinstance(asked, ForcedTokenDrafter) else asked
    proposers = asked.proposers if isinstance(asked, BudgetedDrafter) else ()
    return next((each for each in proposers if isinstance(each, kind)), None)
