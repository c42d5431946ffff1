"""The order of a run: interleaved by prompt, from cold caches, each result on disk at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.bench.arms import Arm
    from outpace.journal import Journal

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt as ids, with its number and category."""

    number: int
    category: str
    prompt: list[int]


def run(
    arms: Sequence[Arm],
    items: Sequence[Item],
    journal: Journal,
    *,
    max_new_tokens: int,
    concurrency: Sequence[int] = (1,),
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Measures what the journal does not hold yet; groups run A B C, then B C A, and so on.

    Every arm first generates a little that is not counted, so that no one pays for what is set up
    at first use.
    """
    have = {(e["concurrency"], e["group"], e["arm"]) for e in journal.entries}
    plan = [step for c in concurrency for step in _order(arms, items, c)]
    todo = [step for step in plan if (step[0], step[1], step[2].name) not in have]
    warm: set[str] = set()
    for done, (num, group, arm, members) in enumerate(todo, start=len(plan) - len(todo)):
        if progress is not None:
            progress(done, len(plan), "Measuring")
        if arm.name not in warm:
            arm.run([item.prompt[:WARM_UP_TOKENS] for item in members], WARM_UP_TOKENS)
            warm.add(arm.name)
        measured = arm.run([item.prompt for item in members], max_new_tokens)
        journal.add(
            {
                "concurrency": num,
                "group": group,
                "arm": arm.name,
                "numbers": [item.number for item in members],
                "seconds": measured.seconds,
                "memory": measured.memory,
                "completions": [completion.asdict() for completion in measured.completions],
            }
        )
    if progress is not None:
        progress(len(plan), len(plan), "Measuring")


def _order(
    arms: Sequence[Arm], items: Sequence[Item], num: int
) -> Iterator[tuple[int, int, Arm, Sequence[Item]]]:
    arms = [arm for arm in arms if num == 1 or arm.batches]
    for group, start in enumerate(range(0, len(items), num)):
        shift = group % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            yield num, group, arm, items[start : start + num]


def completions_of(
    entries: Sequence[dict[str, Any]], arm: str, concurrency: int
) -> dict[int, dict[str, Any]]:
    """Prompt number -> the arm's completion."""
    return {
        number: completion
        for entry in entries
        if entry["arm"] == arm and entry["concurrency"] == concurrency
        for number, completion in zip(entry["numbers"], entry["completions"], strict=True)
    }
