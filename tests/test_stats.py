"""Counters: what a step adds, what a truncated block leaves, what several choices sum up to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from scripted import Bushy, HalfRight, Perfect
from tiny import PlannedRuntime, serve

from outpace.engine import Engine, Request
from outpace.llm import Result
from outpace.sampling import SamplingParams
from outpace.stats import PHASES, Stats
from outpace.tree import Tree

PROMPT = [1, 2, 3]
PLAN = [(7 * i) % 60 for i in range(200)]


def stats_of(accepted: Sequence[int], *, k: int = 4) -> Stats:
    """Counters after steps of a chain of k that accepted so many each."""
    stats = Stats(method="m", exact=True, exactness="ordinary")
    for number in accepted:
        stats.count_step(Tree.chain([0] * (k + 1)), range(number + 1), number + 1)
    return stats


def run(method: Any, **params: Any) -> Result:
    runtime = PlannedRuntime(PLAN, num_prompt=len(PROMPT), vocab_size=64)
    return serve(runtime, method).generate(PROMPT, **params)


# 52 of the fault list: the numbers are its own


def check_the_lists_numbers(stats: Stats) -> None:
    assert stats.completion_tokens == 32
    assert stats.tokens_per_step == pytest.approx(3.20)
    assert (stats.accepted, stats.drafted) == (22, 40)
    assert stats.acceptance == pytest.approx(0.550)
    assert stats.accepted_by_depth == [7, 6, 5, 4]
    assert stats.drafted_by_depth == [10, 10, 10, 10]
    marginal = [n / stats.steps for n in stats.accepted_by_depth]
    assert marginal == pytest.approx([0.7, 0.6, 0.5, 0.4])
    reached = [stats.steps, *stats.accepted_by_depth]
    conditional = [b / a for a, b in zip(reached, stats.accepted_by_depth, strict=False)]
    assert conditional == pytest.approx([0.700, 0.857, 0.833, 0.800], abs=5e-4)


ACCEPTED = [4, 4, 0, 1, 2, 4, 0, 0, 3, 4]


def test_52_known_steps() -> None:
    check_the_lists_numbers(stats_of(ACCEPTED))


def test_52_known_steps_of_the_engine() -> None:
    engine = Engine(PlannedRuntime(PLAN, num_prompt=len(PROMPT), vocab_size=64))
    method = HalfRight([*PROMPT, *PLAN], rights=ACCEPTED, vocab_size=64, k=4)
    engine.add(Request(id=0, prompt=PROMPT, params=SamplingParams(), seed=0, method=method))
    events = [engine.step()[0] for _ in ACCEPTED]  # ten steps, far from any budget
    assert [len(event.tokens) - 1 for event in events] == ACCEPTED
    check_the_lists_numbers(events[-1].stats)


def test_52_control_another_denominator_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_the_lists_numbers(stats_of(ACCEPTED, k=5))
    with pytest.raises(AssertionError):
        check_the_lists_numbers(stats_of([*ACCEPTED[:-1], 3]))


@pytest.mark.parametrize("budget", range(1, 12))
def test_52_a_truncated_block_counts_what_was_proposed_and_delivered(budget: int) -> None:
    stats = run(Perfect([*PROMPT, *PLAN], k=4), max_new_tokens=budget).stats
    assert stats.completion_tokens == budget
    assert stats.steps == -(-budget // 5)
    assert stats.drafted == stats.accepted == budget - stats.steps, "no more than fits was asked"
    assert stats.acceptance == (1.0 if stats.drafted else None)


@pytest.mark.parametrize("index", range(6))
def test_52_an_end_inside_a_block_delivers_what_stands_before_it(index: int) -> None:
    result = run(Perfect([*PROMPT, *PLAN], k=4), stop_token_ids=[PLAN[index]])
    stats = result.stats
    assert stats.completion_tokens == len(result.tokens) == index + 1
    assert stats.accepted == (index + 1 if index < 4 else 4 + (index - 4))
    assert stats.drafted == 4 * stats.steps
    assert stats.acceptance is not None
    assert stats.acceptance <= 1.0


def test_52_nothing_proposed_is_no_number() -> None:
    stats = run("plain", max_new_tokens=5).stats
    assert stats.acceptance is None
    assert stats.tokens_per_step == 1.0
    assert stats.drafted_by_depth == stats.accepted_by_depth == []
    empty = Stats(method="m", exact=True, exactness="ordinary")
    assert empty.tokens_per_step is empty.acceptance is empty.tokens_per_second is None


def test_trees_count_every_candidate_and_their_depth() -> None:
    stats = Stats(method="m", exact=True, exactness="ordinary")
    #  r - a - b        a and b are accepted; s is scratch
    #    - c - s
    tree = Tree(tokens=[0] * 5, parents=[-1, 0, 1, 0, 3], num_candidates=4)
    stats.count_step(tree, [0, 1, 2], 3)
    assert (stats.drafted, stats.accepted) == (3, 2)
    assert (stats.drafted_by_depth, stats.accepted_by_depth) == ([1, 1], [1, 1])
    stats.count_step(tree, [0, 1, 2], 1)  # the first of three tokens ended the text
    assert (stats.accepted, stats.completion_tokens, stats.steps) == (3, 4, 2)
    assert (stats.drafted_by_depth, stats.accepted_by_depth) == ([2, 2], [2, 1])


def test_counts_are_those_of_the_engines_trees() -> None:
    method = Bushy([*PROMPT, *PLAN], rights=[3, 0, 1], vocab_size=64)
    stats = run(method, max_new_tokens=20).stats
    assert stats.steps == len(method.trees)
    assert stats.drafted == sum(len(tree) - 1 for tree in method.trees)
    accepted = [len(outcome.path) - 1 for outcome in method.outcomes if outcome.tokens]
    assert sum(accepted) <= stats.accepted <= sum(accepted) + 3, "the last step has no outcome"
    assert stats.completion_tokens == 20 == stats.accepted + stats.steps


# Time


def test_time_is_split_and_adds_up() -> None:
    stats = run(Perfect([*PROMPT, *PLAN], k=4), max_new_tokens=50).stats
    assert tuple(stats.time_split) == PHASES
    assert all(seconds > 0.0 for seconds in stats.time_split.values())
    assert sum(stats.time_split.values()) <= stats.seconds
    assert stats.first_token_seconds is not None
    assert 0.0 < stats.first_token_seconds < stats.seconds
    assert stats.first_tokens == 5


def test_speed_leaves_the_first_tokens_out() -> None:
    stats = stats_of([4, 4])
    stats.seconds, stats.first_token_seconds, stats.first_tokens = 3.0, 1.0, 5
    assert stats.tokens_per_second == pytest.approx(5 / 2.0)
    stats.seconds = 1.0  # all in the first step: no time to speak of
    assert stats.tokens_per_second is None


def test_one_token_has_no_speed() -> None:
    assert run("plain", max_new_tokens=1).stats.tokens_per_second is None
    assert run("plain", max_new_tokens=3).stats.tokens_per_second is not None


# Sums


def test_choices_add_up_and_the_prompt_counts_once() -> None:
    total, other = stats_of([4, 2]), stats_of([1, 0, 0], k=6)
    for stats, seconds in ((total, 2.0), (other, 3.0)):
        stats.prompt_tokens, stats.seconds = 7, seconds
        stats.time_split["forward"] = seconds
    total.add(other)
    assert total.prompt_tokens == 7
    assert total.completion_tokens == 8 + 4
    assert (total.steps, total.drafted, total.accepted) == (5, 8 + 18, 7)
    assert total.drafted_by_depth == [5, 5, 5, 5, 3, 3]
    assert total.accepted_by_depth == [3, 2, 1, 1]
    assert total.seconds == 3.0, "they ran side by side"
    assert total.time_split["forward"] == 5.0


def test_all_of_it_goes_into_json() -> None:
    stats = run(Perfect([*PROMPT, *PLAN], k=4), max_new_tokens=10).stats
    again = json.loads(json.dumps(stats.asdict()))
    assert again["completion_tokens"] == 10
    assert again["tokens_per_step"] == 5.0
    assert again["acceptance"] == 1.0
    assert {*Stats.__dataclass_fields__, "tokens_per_second"} <= set(again)
