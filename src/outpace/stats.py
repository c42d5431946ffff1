"""What a request cost and what speculation brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outpace.tree import Tree

PHASES = ("propose", "forward", "accept", "other")


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one request, or of several added up.

    Args:
        method: the method that proposed.
        exact: whether the acceptance rule keeps the target's output.
        exactness: "bit-exact", "same-shape" or "ordinary" forwards.
        prompt_tokens, completion_tokens: ids in and ids delivered.
        reused_tokens: prompt ids whose keys and values were still cached.
        steps: forwards that emitted tokens.
        nodes: tree nodes that ran, roots and scratch included.
        drafted, accepted: candidates proposed below the root, and those delivered.
        drafted_by_depth, accepted_by_depth: steps whose tree reached depth 1, 2, ..., and steps
            that accepted so deep.
        seconds, first_token_seconds: since the request was added.
        first_tokens: tokens that the first delivering step brought.
        time_split: seconds in propose, forward, accept and the rest, prefill included.
    """

    method: str
    exact: bool
    exactness: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    nodes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first_token_seconds: float | None = None
    first_tokens: int = 0
    time_split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def tokens_per_step(self) -> float | None:
        """Delivered tokens a forward; None before the first."""
        return self.completion_tokens / self.steps if self.steps else None

    @property
    def acceptance(self) -> float | None:
        """Share of the proposed candidates that were delivered; None when nothing was proposed."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first, over the time since the first."""
        if self.first_token_seconds is None or self.completion_tokens < 2:
            return None
        elapsed = self.seconds - self.first_token_seconds
        return (self.completion_tokens - self.first_tokens) / elapsed if elapsed > 0 else None

    def count_step(self, tree: Tree, path: Sequence[int], delivered: int) -> None:
        """Adds one verified tree, of whose outcome `delivered` tokens reached the user."""
        accepted = min(len(path) - 1, delivered)
        self.steps += 1
        self.nodes += len(tree)
        self.completion_tokens += delivered
        self.drafted += tree.num_candidates - 1
        self.accepted += accepted
        _count_depths(self.drafted_by_depth, max(tree.depths[: tree.num_candidates]))
        _count_depths(self.accepted_by_depth, accepted)

    def add(self, other: Stats) -> None:
        """Adds another choice of the same prompt: its tokens count, the prompt does not again."""
        for name in ("completion_tokens", "steps", "nodes", "drafted", "accepted", "first_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_by_depth", "accepted_by_depth"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count
        self.seconds = max(self.seconds, other.seconds)
        for phase, seconds in other.time_split.items():
            self.time_split[phase] += seconds

    def asdict(self) -> dict[str, Any]:
        """All counters and derived figures, ready for JSON."""
        derived = ("tokens_per_step", "tokens_per_second", "acceptance")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def _count_depths(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))
    for i in range(depth):
        counts[i] += 1
