"""What is measured: a method of outpace's, or another way of generating on the same weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.bench.memory import PeakMemory

if TYPE_CHECKING:
    from outpace.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One request's output and when it came.

    Args:
        tokens: the generated ids.
        step_tokens: how many of them each step brought; empty where an engine does not tell.
        seconds: from the request to its end.
        first_token_seconds: from the request to its first step's end.
        stats: counters of the engine; None for arms that have none.
    """

    tokens: list[int]
    step_tokens: list[int]
    seconds: float
    first_token_seconds: float
    stats: dict[str, Any] | None = None

    def asdict(self) -> dict[str, Any]:
        """Plain values, for the journal."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a group of requests that ran side by side gave.

    Args:
        completions: one a request.
        seconds: wall time of the whole group.
        memory: bytes by part: weights, cache, method, scratch, and the process's peak.
    """

    completions: list[Completion]
    seconds: float
    memory: dict[str, int] = field(default_factory=dict)


class Arm(ABC):
    """One way of generating.

    Attributes:
        name: unique in a run.
        baseline: the arm whose ids this one must reproduce and whose time it is compared with.
        exact: whether it promises to reproduce them.
        batches: whether it runs several requests side by side; else it is measured alone only.
    """

    name: str
    baseline: str
    exact: bool = True
    batches: bool = True

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
        """Generates for prompts of ids side by side, from a cold cache."""


class MethodArm(Arm):
    """A method of outpace's.

    Args:
        name: as it was asked for.
        llm: the model with the method.
        sampling: parameters besides `max_new_tokens`.
    """

    def __init__(self, name: str, llm: LLM, sampling: dict[str, Any]) -> None:
        self.name, self.baseline = name, "plain"
        self.llm, self._sampling = llm, sampling

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
        self.llm.close()  # no arm profits from what another one cached
        step_tokens: list[list[int]] = [[] for _ in prompts]
        results = {}
        begin = time.perf_counter()
        with PeakMemory(self.llm.model.runtime.device) as peak:
            sampling = {**self._sampling, "max_new_tokens": max_new_tokens}
            for number, piece in self.llm.stream_batch(prompts, **sampling):
                if piece.tokens:
                    step_tokens[number].append(len(piece.tokens))
                if piece.result is not None:
                    results[number] = piece.result
        seconds = time.perf_counter() - begin
        completions = [
            Completion(
                tokens=results[i].tokens,
                step_tokens=step_tokens[i],
                seconds=results[i].stats.seconds,
                first_token_seconds=results[i].stats.first_token_seconds or 0.0,
                stats=results[i].stats.asdict(),
            )
            for i in range(len(prompts))
        ]
        memory = {**self.llm.info()["memory"], **peak.parts()}
        return Measured(completions=completions, seconds=seconds, memory=memory)
