"""Goodness of fit: are drawn tokens distributed as the target says?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outpace.errors import InvalidRequest
from outpace.sampling import Sampler, SamplingParams
from outpace.verify.teacher import forced_logits, logits_after

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.llm import LLM
    from outpace.runtimes.base import Runtime

FITS, WRONG, NO_POWER = "fits", "wrong", "no power"

LENGTH = 3  # tokens of a draw: a step's accepted ones and the one behind them
LEVEL = 1e-3  # chance that one correct run of all tests together fails
CONTROL = 2.0  # the control's temperature, in units of the asked one

_MIN_EXPECTED = 5.0  # a cell with fewer expected draws is pooled: Cochran's rule
_MIN_SPLIT = 20.0  # a cell with more is divided by its next token
_NUM_PLAIN = 32  # tokens among which a prefix is chosen
_OTHER = -1  # stands for every token that has no cell of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a chi-square test says of one acceptance rule.

    Args:
        acceptance: the rule.
        samples: draws, over all prefixes.
        drafted, accepted: proposed tokens while drawing; without any the rule was not tried.
        cells: of the test, small ones pooled.
        statistic: chi-square, with `cells` minus the number of prefixes degrees of freedom.
        p_value: chance of so large a statistic for the target's own draws.
        control_p_value: the same for a distribution that is not the target's; must be below level.
        control_distance: total variation between the control's cells and the target's.
        level: border of both, corrected for the number of tests (Bonferroni).
    """

    acceptance: str
    samples: int
    drafted: int
    accepted: int
    cells: int
    statistic: float
    p_value: float
    control_p_value: float
    control_distance: float
    level: float

    @property
    def verdict(self) -> str:
        """ "fits", "wrong", or "no power" where the control was not told from the target."""
        if self.p_value < self.level:
            return WRONG
        return FITS if self.control_p_value < self.level else NO_POWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """All texts of `LENGTH` tokens after a prefix, divided into cells.

    A cell is a path of tokens, with `_OTHER` last for all that are not listed beside it.

    Args:
        prefix: ids before the draws.
        probs: cell -> its probability under the target.
        control: cell -> its probability under the control.
        divided: paths whose next token has cells of its own.
    """

    prefix: list[int]
    probs: dict[tuple[int, ...], float]
    control: dict[tuple[int, ...], float]
    divided: frozenset[tuple[int, ...]]

    def cell(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The cell of a drawn text."""
        path: tuple[int, ...] = ()
        for token in tokens:
            if (*path, token) not in self.probs and (*path, token) not in self.divided:
                return (*path, _OTHER)
            path = (*path, token)
            if path in self.probs:
                break
        return path

    @classmethod
    def build(
        cls, runtime: Runtime, prefix: Sequence[int], *, params: SamplingParams, samples: int
    ) -> Partition:
        """Divides until further cells would expect too few of `samples` draws.

        Args:
            runtime: the target; asked once for each cell that is divided.
            prefix: ids, at least one.
            params: the draws' sampling; not greedy.
            samples: number of draws.
        """
        shifted = SamplingParams(temperature=params.temperature * CONTROL)
        probs: dict[tuple[int, ...], float] = {}
        control: dict[tuple[int, ...], float] = {}
        todo: list[tuple[tuple[int, ...], float, float]] = [((), 1.0, 1.0)]
        for path, p_path, c_path in todo:
            row = logits_after(runtime, prefix, path)
            p = p_path * _probs(row, [*prefix, *path], params)
            c = c_path * _probs(row, [*prefix, *path], shifted)
            listed = torch.nonzero(p * samples >= _MIN_EXPECTED).flatten().tolist()
            for token in listed:
                child = (*path, token)
                if len(child) < LENGTH and float(p[token]) * samples >= _MIN_SPLIT:
                    todo.append((child, float(p[token]), float(c[token])))
                else:
                    probs[child], control[child] = float(p[token]), float(c[token])
            p[listed] = c[listed] = 0.0
            probs[(*path, _OTHER)], control[(*path, _OTHER)] = float(p.sum()), float(c.sum())
        divided = frozenset(path for path, _, _ in todo)
        return cls(prefix=list(prefix), probs=probs, control=control, divided=divided)


def choose_prefix(llm: LLM, prompt: Sequence[int], *, params: SamplingParams) -> list[int]:
    """A prompt and the beginning of an answer, up to where the target is least certain.

    Places whose last token stood before are preferred: there the methods without a model of their
    own propose something.

    Args:
        llm: the target, decoding plainly.
        prompt: ids.
        params: the draws' sampling.
    """
    runtime = llm.model.runtime
    room = runtime.max_context - len(prompt) - LENGTH
    if room < 1:
        raise InvalidRequest(
            f"a prompt of {len(prompt)} tokens leaves no room for draws in the context of "
            f"{runtime.max_context}: use shorter prompts"
        )
    answer = llm.generate(
        list(prompt),
        max_new_tokens=min(room, _NUM_PLAIN),
        temperature=params.temperature,
        seed=params.seed,
        ignore_eos=True,
    ).tokens
    text = [*prompt, *answer]
    best: tuple[bool, float, int] | None = None
    for end, row in enumerate(forced_logits(runtime, prompt, answer), start=len(prompt)):
        p = _probs(row, text[:end], params)
        entropy = float(torch.special.entr(p).sum())
        place = (text[end - 1] in text[1 : end - 1], entropy, end)
        best = place if best is None else max(best, place)
    assert best is not None
    return text[: best[2]]


def measure_fit(
    llm: LLM,
    partitions: Sequence[Partition],
    *,
    params: SamplingParams,
    samples: int,
    level: float = LEVEL,
) -> Fit:
    """Draws by a method and a rule, and tests the cells' counts against the target (Pearson).

    Args:
        llm: the method under test.
        partitions: one for each prefix, built for the same sampling and `samples`.
        params: the draws' sampling; its `acceptance` is the rule and its `seed` fixes the draws.
        samples: draws for each prefix.
        level: p-values below are failures.
    """
    statistic = control_statistic = distance = 0.0
    num_cells = dof = drafted = accepted = 0
    for partition in partitions:
        result = llm.generate(
            partition.prefix,
            n=samples,
            max_new_tokens=LENGTH,
            ignore_eos=True,
            temperature=params.temperature,
            seed=params.seed,
            acceptance=params.acceptance,
        )
        drafted += result.stats.drafted
        accepted += result.stats.accepted
        counts = Counter(partition.cell(choice.tokens) for choice in result.choices)
        table = _pool(partition, counts, samples)
        num_cells += len(table)
        dof += len(table) - 1
        observed, p, c = table.unbind(dim=1)
        statistic += _chi_square(observed, samples * p)
        control_statistic += _chi_square(observed, samples * c)
        distance += float((p - c).abs().sum()) / 2 / len(partitions)
    return Fit(
        acceptance=params.acceptance,
        samples=samples * len(partitions),
        drafted=drafted,
        accepted=accepted,
        cells=num_cells,
        statistic=statistic,
        p_value=p_value(statistic, dof),
        control_p_value=p_value(control_statistic, dof),
        control_distance=distance,
        level=level,
    )


def p_value(statistic: float, dof: int) -> float:
    """Chance that a chi-square variable with `dof` degrees of freedom is at least so large."""
    if dof == 0:
        return 1.0
    halves = torch.tensor([dof / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _probs(logits: Tensor, text: Sequence[int], params: SamplingParams) -> Tensor:
    """`[vocab]` in fp64: the target's distribution after `text`."""
    sampler = Sampler(
        params, prompt=text, seed=0, vocab_size=logits.shape[-1], device=logits.device
    )
    return torch.softmax(sampler.process(logits, []).cpu().double(), dim=-1)


def _pool(partition: Partition, counts: Counter[tuple[int, ...]], samples: int) -> Tensor:
    """`[cells, 3]`: count, probability, control's probability; small cells made one."""
    rows = torch.tensor(
        [
            [counts[cell], p, partition.control[cell]]
            for cell, p in sorted(partition.probs.items(), key=lambda item: -item[1])
        ],
        dtype=torch.float64,
    )
    # From the largest cell down: the small ones are last, and join until they are large enough.
    num = int((rows[:, 1] * samples >= _MIN_EXPECTED).sum())
    while 0 < num < len(rows) and float(rows[num:, 1].sum()) * samples < _MIN_EXPECTED:
        num -= 1
    return torch.cat([rows[:num], rows[num:].sum(dim=0, keepdim=True)]) if num < len(rows) else rows


def _chi_square(observed: Tensor, expected: Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())
