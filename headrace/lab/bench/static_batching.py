"""Static batching: the most that continuous batching can gain over it on a workload (`bound`), and a baseline that does
it, without an inference server: padded batches with ``transformers.generate``.

For the bound only output lengths matter: if all outputs are equally long, no scheduler can gain anything.

In the baseline, requests form batches in order of arrival, padded on the left to the longest prompt. A batch decodes
until its last row is done, then the next one starts. The figures favour the baseline: a request ends with its own last
token, a token counts at the step that generated it, and padding is not counted.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headrace.lab.bench.stats import Record
from headrace.lab.workload.work import Prompt, Work, is_chat


def _constant(rows: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Time to decode a workload, in units of the step cost (default: in steps).

    ``static`` waits for each batch's longest output; rows of finished outputs are empty. ``padded`` is the same, but
    finished rows are still computed (padded ``generate``). ``refilled`` gives a free row to the next request at once.
    ``floor`` is a lower bound for any order of the requests.
    """

    static: float
    padded: float
    refilled: float
    floor: float

    @property
    def gain(self) -> float:
        """Speedup of refilling in order of arrival over static batching."""
        return self.static / self.refilled

    @property
    def most(self) -> float:
        """Upper bound of the speedup of any scheduler over static batching."""
        return self.static / self.floor


def bound(
    lengths: Sequence[int],
    batch: int,
    step_cost: Callable[[int], float] = _constant,
    refill: int | None = None,
) -> Bound:
    """The bound of these output lengths for a static batch of ``batch`` rows.

    ``step_cost`` gives the cost of a decode step by its number of rows. By default every step costs 1, which holds if
    reading the weights dominates. ``refill`` is the number of rows for continuous batching (default: ``batch``).

    Raises:
        ValueError: no lengths, a length below 1, or a batch below 1.
    """
    rows = batch if refill is None else refill
    if not lengths or min(lengths) < 1 or batch < 1 or rows < 1:
        raise ValueError("bound needs at least one length, and lengths and batch sizes of at least 1")
    groups = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    cheapest = min(step_cost(n) / n for n in range(1, rows + 1))
    return Bound(
        static=sum(_decode(group, step_cost) for group in groups),
        padded=sum(max(group) * step_cost(len(group)) for group in groups),
        refilled=_refill(lengths, rows, step_cost),
        floor=max(
            max(lengths) * step_cost(1),
            math.fsum(lengths) * cheapest,
            _ceil_steps(lengths, rows) * step_cost(1),
        ),
    )


def _ceil_steps(lengths: Sequence[int], rows: int) -> int:
    return -(-sum(lengths) // rows)


def _decode(group: Sequence[int], step_cost: Callable[[int], float]) -> float:
    """Cost of decoding one group, in which finished rows leave."""
    cost, done = 0.0, 0
    ordered = sorted(group)
    for i, length in enumerate(ordered):
        cost += (length - done) * step_cost(len(ordered) - i)
        done = length
    return cost


def _refill(lengths: Sequence[int], rows: int, step_cost: Callable[[int], float]) -> float:
    """Cost of decoding when every free row takes the next length in order."""
    ends: list[int] = []
    cost, step = 0.0, 0
    for length in lengths:
        heapq.heappush(ends, step + length)
        if len(ends) < rows:
            continue
        cost += (ends[0] - step) * step_cost(len(ends))
        step = heapq.heappop(ends)
    while ends:
        cost += (ends[0] - step) * step_cost(len(ends))
        step = heapq.heappop(ends)
    return cost


class NoTransformers(RuntimeError):
    """transformers is not installed; the message says what to install."""


class TransformersStatic:
    """A `stats.Target` that decodes padded batches of ``batch_size`` rows.

    ``model`` is a local folder or a hub name; ``dummy`` uses random weights of its shape. ``dtype`` is the name of a
    torch dtype or ``auto``. ``closed``: a closed loop of ``batch_size`` requests; a request's times count from the
    start of its batch.

    Raises:
        NoTransformers: transformers is missing.
    """

    def __init__(
        self,
        name: str,
        model: str,
        batch_size: int,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        dummy: bool = False,
        closed: bool = False,
    ) -> None:
        try:
            import torch
            import transformers
        except ImportError:
            raise NoTransformers(
                'padded static batching needs transformers: pip install "headrace[bench]"'
            ) from None
        self.name = name
        self.completed = 0
        self._torch = torch
        self._transformers: Any = transformers
        self._batch_size = batch_size
        self._device = device
        self._closed = closed
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
        if dummy:
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
            loaded = self._transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=kind, trust_remote_code=False
            )
        self._model: Any = loaded.to(device).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        # Replaces the model's default generation config, so that only `_RowEnds` ends a row.
        self._model.generation_config = self._transformers.GenerationConfig(pad_token_id=0)
        self._steps = 0
        self._rows_computed = 0
        self._rows_useful = 0

    def run(self, work: Sequence[Work]) -> list[Record]:
        if any(each.temperature for each in work):
            raise ValueError(
                "padded static batching supports greedy decoding only: the workload's temperature must be 0"
            )
        self.completed = self._steps = self._rows_computed = self._rows_useful = 0
        ordered = sorted(work, key=lambda each: each.arrival)
        prompts = {each.id: self._encode(each.prompt) for each in work}
        records: dict[str, Record] = {}
        began = time.perf_counter()
        for first in range(0, len(ordered), self._batch_size):
            batch = ordered[first : first + self._batch_size]
            time.sleep(max(0.0, batch[-1].arrival - (time.perf_counter() - began)))
            for record in self._batch(batch, [prompts[each.id] for each in batch], began):
                records[record.id] = record
            self.completed += len(batch)
        return [records[each.id] for each in work]

    def facts(self) -> dict[str, Any]:
        useful = self._rows_useful / self._rows_computed if self._rows_computed else 0.0
        return {"batch_size": self._batch_size, "steps": self._steps, "useful_rows_percent": 100.0 * useful}

    def close(self) -> None:
        del self._model

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if not is_chat(prompt):
            return list(cast("tuple[int, ...]", prompt))
        messages = [message._asdict() for message in prompt]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _batch(self, batch: Sequence[Work], prompts: Sequence[list[int]], began: float) -> list[Record]:
        torch = self._torch
        started = time.perf_counter() - began
        width = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ends = _RowEnds(torch, batch, self._eos, began)
        config = self._transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max(each.max_tokens for each in batch), pad_token_id=0
        )
        with torch.inference_mode():
            self._model.generate(
                tokens.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=config,
                stopping_criteria=self._transformers.StoppingCriteriaList([ends]),
            )
        self._steps += len(ends.times)
        self._rows_computed += len(ends.times) * len(batch)
        self._rows_useful += sum(ends.lengths)
        return [
            Record(
                id=each.id,
                arrived=started if self._closed else each.arrival,
                finished=ends.times[length - 1],
                token_seconds=tuple(ends.times[:length]),
                prompt_tokens=len(prompt),
                output_tokens=length,
                finish_reason="stop" if stopped else "length",
            )
            for each, prompt, length, stopped in zip(batch, prompts, ends.lengths, ends.stopped, strict=True)
        ]


class _RowEnds:
    """A stopping criterion that ends each row at its own limit or end token, and records the time of every step."""

    def __init__(self, torch: Any, batch: Sequence[Work], eos: Sequence[int], began: float) -> None:
        self._torch = torch
        self._began = began
        self._limits = torch.tensor([each.max_tokens for each in batch])
        self._obeys_eos = torch.tensor([not each.ignore_eos for each in batch])
        self._eos = torch.tensor(list(eos), dtype=torch.long)
        self.times: list[float] = []
        self.lengths = [0] * len(batch)
        self.stopped = [False] * len(batch)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        drawn = input_ids[:, -1].cpu()
        self.times.append(time.perf_counter() - self._began)
        step = len(self.times)
        ended = self._torch.isin(drawn, self._eos) & self._obeys_eos
        for row in (ended | (self._limits <= step)).nonzero().flatten().tolist():
            if not self.lengths[row]:
                self.lengths[row] = step
                self.stopped[row] = bool(ended[row])
        done = self._torch.tensor([length > 0 for length in self.lengths])
        return done.to(input_ids.device)
