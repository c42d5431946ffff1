"""From measured completions to the figures of a method."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from outpace.bench.forward_cost import ForwardCost

POSITIONS = 32  # output tokens of one bucket of acceptance by position
DEGENERATE_SHARE = 0.5
NGRAM = 4

Completions = dict[int, dict[str, Any]]  # by prompt number


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Whether more than half of the text's 4-grams occurred in it before."""
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    repeated = len(ngrams) - len(set(ngrams))
    return bool(ngrams) and repeated > DEGENERATE_SHARE * len(ngrams)


def decode_rate(completion: dict[str, Any]) -> float | None:
    """Tokens a second after the first step; None where there is none."""
    elapsed = completion["seconds"] - completion["first_token_seconds"]
    count = len(completion["tokens"]) - _first_step(completion)
    return count / elapsed if count > 0 and elapsed > 0 else None


def _first_step(completion: dict[str, Any]) -> int:
    """Tokens that came first; an engine that does not tell its steps sends them one by one."""
    return int((completion["step_tokens"] or [1])[0])


def speedups(own: Completions, base: Completions) -> dict[int, float]:
    """Prompt -> ratio of the decode rates, only where both emitted the same ids."""
    found = {}
    for number in own.keys() & base.keys():
        mine, theirs = decode_rate(own[number]), decode_rate(base[number])
        if own[number]["tokens"] == base[number]["tokens"] and mine and theirs:
            found[number] = mine / theirs
    return dict(sorted(found.items()))


def divergences(own: Completions, base: Completions) -> list[dict[str, Any]]:
    """Where texts part: the prompt, the index in the output, and both tokens (None: an end)."""
    found = []
    for number in sorted(own.keys() & base.keys()):
        a, b = base[number]["tokens"], own[number]["tokens"]
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        at = min(len(a), len(b)) if at is None else at
        found.append(
            {
                "prompt": number,
                "at": at,
                "expected": a[at] if at < len(a) else None,
                "found": b[at] if at < len(b) else None,
            }
        )
    return found


def spread(values: Iterable[float]) -> dict[str, float | int | None]:
    """Median, quartiles, mean and number of ratios."""
    values = list(values)
    if not values:
        return {"median": None, "lower": None, "upper": None, "mean": None, "prompts": 0}
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {
        "median": statistics.median(values),
        "lower": quartiles[0],
        "upper": quartiles[2],
        "mean": statistics.fmean(values),
        "prompts": len(values),
    }


def method_figures(
    own: Completions,
    base: Completions,
    *,
    categories: dict[int, str],
    exact: bool,
    memory: dict[str, int],
    cost: ForwardCost | None,
) -> dict[str, Any]:
    """All figures of one method over its prompts.

    Args:
        own: its completions.
        base: those that it must reproduce.
        categories: prompt -> category.
        exact: what it promises.
        memory: bytes by part, the largest of the run.
        cost: of this runtime's forwards; None for an arm that does not run on it.
    """
    ratios = speedups(own, base)
    loops = {number for number, c in base.items() if is_degenerate(c["tokens"])}
    parted = divergences(own, base)
    all_spread = spread(ratios.values())
    figures: dict[str, Any] = {
        "tokens_per_second": _rate(own.values()),
        "speedup": all_spread["median"],
        "speedup_spread": all_spread,
        "speedup_without_degenerate": spread(r for n, r in ratios.items() if n not in loops),
        "degenerate": sorted(loops),
        "tokens_per_step": tokens_per_step(own.values()),
        "first_token_seconds": statistics.median(c["first_token_seconds"] for c in own.values()),
        "exact": exact,
        "identical": len(own) - len(parted),
        "prompts": len(own),
        "divergences": parted,
        "memory": memory,
        "acceptance": None,
        "acceptance_by_depth": [],
        "acceptance_by_position": _by_position(own.values()),
        "time_split": {},
        "categories": {},
    }
    for category in sorted(set(categories.values())):
        part = {n: c for n, c in own.items() if categories[n] == category}
        if part:
            figures["categories"][category] = {
                "prompts": len(part),
                "tokens_per_second": _rate(part.values()),
                "tokens_per_step": tokens_per_step(part.values()),
                "speedup": spread(r for n, r in ratios.items() if n in part)["median"],
            }
    stats = [c["stats"] for c in own.values() if c["stats"] is not None]
    if stats:
        drafted, accepted = (sum(s[k] for s in stats) for k in ("drafted", "accepted"))
        figures["acceptance"] = accepted / drafted if drafted else None
        figures["acceptance_by_depth"] = _by_depth(stats)
        figures["time_split"] = _time_split(stats)
        figures["break_even"] = _break_even(stats, base, cost)
    return figures


def tokens_per_step(completions: Iterable[dict[str, Any]]) -> float | None:
    """Emitted tokens a forward."""
    steps = [count for c in completions for count in c["step_tokens"]]
    return sum(steps) / len(steps) if steps else None


def _rate(completions: Iterable[dict[str, Any]]) -> float | None:
    tokens, seconds = 0, 0.0
    for completion in completions:
        if decode_rate(completion) is not None:
            tokens += len(completion["tokens"]) - _first_step(completion)
            seconds += completion["seconds"] - completion["first_token_seconds"]
    return tokens / seconds if seconds > 0 else None


def _by_depth(stats: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each depth, steps whose tree reached it and the share of them that accepted so deep."""
    drafted: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for entry in stats:
        for depth, count in enumerate(entry["drafted_by_depth"], start=1):
            drafted[depth] += count
        for depth, count in enumerate(entry["accepted_by_depth"], start=1):
            accepted[depth] += count
    return [
        {"depth": depth, "drafted": drafted[depth], "acceptance": accepted[depth] / drafted[depth]}
        for depth in sorted(drafted)
    ]


def _by_position(completions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accepted candidates a step, by where in the output the step began."""
    buckets: dict[int, list[int]] = defaultdict(list)
    for completion in completions:
        at = 0
        for count in completion["step_tokens"]:
            buckets[at // POSITIONS].append(count - 1)
            at += count
    return [
        {
            "from": bucket * POSITIONS,
            "to": (bucket + 1) * POSITIONS - 1,
            "steps": len(counts),
            "accepted_per_step": statistics.fmean(counts),
        }
        for bucket, counts in sorted(buckets.items())
    ]


def _time_split(stats: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds in each phase, prefill included in the forward."""
    phases = stats[0]["time_split"]
    return {phase: sum(s["time_split"][phase] for s in stats) for phase in phases}


def _break_even(
    stats: Sequence[dict[str, Any]], base: Completions, cost: ForwardCost | None
) -> dict[str, Any] | None:
    """What a step must bring so that it pays, from the cost of a forward over its nodes."""
    plain = [c["stats"] for c in base.values() if c["stats"] is not None]
    steps, plain_steps = sum(s["steps"] for s in stats), sum(s["steps"] for s in plain)
    if cost is None or not steps or not plain_steps:
        return None
    nodes = sum(s["nodes"] for s in stats) / steps
    own = _own_work(stats) / steps
    plain_own = _own_work(plain) / plain_steps
    needed = (cost.at(nodes) + own) / (cost.at(1) + plain_own)
    drafted = sum(s["drafted"] for s in stats) / steps
    emitted = sum(s["completion_tokens"] for s in stats) / steps
    return {
        "nodes_per_step": nodes,
        "forward_seconds": cost.at(nodes),
        "plain_forward_seconds": cost.at(1),
        "own_work_seconds": own,
        "tokens_per_step_needed": needed,
        "acceptance_needed": (needed - 1) / drafted if drafted else None,
        "acceptance": (emitted - 1) / drafted if drafted else None,
        "why": _why(nodes, cost, own, needed=needed, emitted=emitted),
    }


def _own_work(stats: Sequence[dict[str, Any]]) -> float:
    return float(
        sum(
            seconds
            for s in stats
            for phase, seconds in s["time_split"].items()
            if phase != "forward"
        )
    )


def _why(nodes: float, cost: ForwardCost, own: float, *, needed: float, emitted: float) -> str:
    step = (
        f"a step runs {nodes:.1f} nodes in {1e3 * cost.at(nodes):.1f} ms where one takes "
        f"{1e3 * cost.at(1):.1f} ms, with {1e3 * own:.1f} ms of work around it"
    )
    verdict = "pays" if emitted > needed else "does not pay"
    return f"{step}: it must bring {needed:.2f} tokens, brings {emitted:.2f}, and so {verdict}"
