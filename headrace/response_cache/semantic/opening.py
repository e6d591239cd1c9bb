"""Opens the semantic cache from its options: reads the calibration, checks what it was made with, builds the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import ConfigError, SemanticOptions
from headrace.core.events import Event
from headrace.core.ports import Embedder
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.rules.calibration import CONFIDENCE, Calibration, Unsupported
from headrace.response_cache.rules.judge import Judge, Nearest, PairScorer
from headrace.response_cache.rules.pairs import Verdicts

if TYPE_CHECKING:
    from headrace.response_cache.semantic.level import SemanticCache
    from headrace.response_cache.semantic.pair_book import Basis, PairBook
    from headrace.response_cache.semantic.rows import SharedRows

SELF = "self"
"""The name of the served model as second judge."""

DRAFT_COSINE = 0.7
"""Minimum similarity of a cached response that is used as a draft."""


class SemanticParts(NamedTuple):
    """What the semantic cache needs of the engine and its models.

    ``encoder`` and ``judge`` load a sentence encoder and a cross-encoder by name; they raise `ValueError` with the
    reason. ``proposes``: cached responses are proposed to speculative decoding. ``spell`` returns the text of tokens.
    ``adapts_audit``: the share of audits follows the errors that they find. ``verdicts`` are the served model's, where
    it is the second judge.
    """

    encoder: Callable[[str], Embedder]
    judge: Callable[[str], PairScorer]
    proposes: bool
    spell: Callable[[Sequence[int]], str]
    seed: int
    adapts_audit: bool = False
    verdicts: Verdicts | None = None


def open_semantic(
    options: SemanticOptions,
    parts: SemanticParts,
    exact: ExactCache,
    tell: Callable[[Event], None],
    file: Path | None,
    share: Callable[[str, int], SharedRows | None],
) -> SemanticCache | None:
    """The semantic cache over ``exact``; None if it is off.

    ``file`` stores its rows, from which the index is rebuilt. ``share`` opens those that other servers have too, of
    the encoder with this name and so many dimensions.

    Raises:
        ConfigError: it is not available, or cannot meet its error bound.
    """
    if options.semantic_cache == "off":
        return None
    if options.semantic_cache == "draft":
        _check_drafts(options, proposes=parts.proposes)
    encoder, judge, basis = judged(options, parts)
    try:
        from headrace.response_cache.semantic.level import Mode, SemanticCache
        from headrace.response_cache.semantic.partitions import Partitions
        from headrace.response_cache.semantic.rows import RowStore
        from headrace.response_cache.semantic.search_thread import SearchThread
    except ImportError as error:
        raise ConfigError("--semantic-cache needs: pip install 'headrace[semantic]'") from error
    try:
        row_store = None if file is None else RowStore(file, encoder.name)
    except OSError as error:
        raise ConfigError(f"--semantic-cache: {error}") from error
    pairs = None if basis is None else _open_pairs(options.semantic_labels, basis)
    # The first call takes half a second: make it before any request.
    encoder.embed(["Which question comes first?"])
    partitions = Partitions(encoder.dimensions, options.semantic_cache_bytes)
    shared = share(encoder.name, encoder.dimensions)
    return SemanticCache(
        SearchThread(encoder, judge, partitions, row_store, shared, pairs),
        exact,
        Mode(options.semantic_cache),
        parts.spell,
        tell,
        deadline=options.semantic_deadline,
        audit=options.semantic_audit,
        adapts_audit=parts.adapts_audit,
        verdicts=parts.verdicts,
        shared=shared,
        pairs=pairs,
        max_error=options.semantic_max_error,
        confidence=CONFIDENCE,
        seed=parts.seed,
    )


def _open_pairs(labels: str | None, basis: Basis) -> PairBook:
    """Pairs to label, with the labels of a file."""
    from headrace.response_cache.semantic.pair_book import LabelFile, PairBook

    try:
        file = None if labels is None else LabelFile(Path(labels).expanduser(), basis.name)
    except OSError as error:
        raise ConfigError(f"--semantic-labels: {error}") from error
    return PairBook(basis, file)


def _check_drafts(options: SemanticOptions, *, proposes: bool) -> None:
    """Raise `ConfigError` if cached responses cannot be drafts: nothing ``proposes`` them, or a judge is named."""
    if not proposes:
        raise ConfigError(
            "--semantic-cache draft needs speculative decoding from cached responses: "
            """--speculative-config '{"method": "cached"}'"""
        )
    if options.semantic_threshold is not None or options.semantic_labels is not None:
        given = "--semantic-threshold" if options.semantic_threshold is not None else "--semantic-labels"
        raise ConfigError(f"{given} has no effect on drafts: use --semantic-cache serve or shadow")
    if options.semantic_judge is not None:
        raise ConfigError("--semantic-judge has no effect on drafts: use --semantic-cache serve or shadow")


def open_verdicts(options: SemanticOptions) -> Verdicts | None:
    """The served model's verdicts, if it is the second judge."""
    return Verdicts() if options.semantic_judge == SELF else None


def judged(options: SemanticOptions, parts: SemanticParts) -> tuple[Embedder, Judge, Basis | None]:
    """The encoder, a judge with the rules that a calibration with this encoder certifies, and their basis.

    Drafts need no calibration, because they do not change responses; they have no basis. A threshold by hand needs none
    either.

    Raises:
        ConfigError: the calibration is missing, certifies no such bound, or was made with another encoder or judge.
    """
    if options.semantic_cache == "draft":
        return _encoder(options.semantic_encoder, parts), Nearest(DRAFT_COSINE), None
    from headrace.response_cache.semantic.pair_book import Basis

    cosine, file, max_error = (
        options.semantic_threshold,
        options.semantic_calibration,
        options.semantic_max_error,
    )
    calibration = None if cosine is not None and file is None else _read(file)
    if calibration is not None and cosine is None:
        try:
            calibration.rules(max_error, CONFIDENCE)  # before the encoder is loaded
        except Unsupported as error:
            raise ConfigError(f"--semantic-max-error {max_error:g}: {error}") from error
    encoder = _encoder(options.semantic_encoder, parts)
    if calibration is not None and encoder.name != calibration.encoder:
        raise ConfigError(
            f"--semantic-calibration was made with the encoder {calibration.encoder}, not with {encoder.name}"
        )
    second = _second_judge(options.semantic_judge, None if calibration is None else calibration.judge, parts)
    basis = Basis(encoder.name, calibration, cosine, max_error, second)
    return encoder, Judge(basis.rules(), second), basis


def _second_judge(name: str | None, calibrated: str | None, parts: SemanticParts) -> PairScorer | None:
    """The cross-encoder of the calibration; None if that has none. Without a calibration, any is taken."""
    if name is None or name == SELF:
        if calibrated:
            raise ConfigError(
                f"--semantic-calibration was made with the judge {calibrated}: name it with --semantic-judge"
            )
        return None
    try:
        judge = parts.judge(name)
    except ValueError as error:
        raise ConfigError(f"--semantic-judge: {error}") from error
    if calibrated is not None and judge.name != calibrated:
        made = f"with the judge {calibrated}" if calibrated else "without a judge"
        raise ConfigError(
            f"--semantic-calibration was made {made}, not with {judge.name}: run headrace cache calibrate --judge"
        )
    return judge


def _encoder(name: str, parts: SemanticParts) -> Embedder:
    try:
        return parts.encoder(name)
    except ValueError as error:
        raise ConfigError(f"--semantic-encoder: {error}") from error


def _read(file: str | None) -> Calibration:
    if file is None:
        raise ConfigError(
            "--semantic-cache needs a calibration: --semantic-calibration FILE, made by `headrace cache "
            "calibrate` from labelled requests"
        )
    try:
        return Calibration.from_text(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--semantic-calibration {file}: {error}") from error
