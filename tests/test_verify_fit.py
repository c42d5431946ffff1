"""Goodness of fit: right rules pass, broken ones fail, and a blind test says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from scipy import stats
from scripted import Drawn, Empty
from tiny import TableRuntime, probs_table, random_table, serve
from torch import Tensor

from outpace import accept as rules
from outpace.errors import InvalidRequest
from outpace.llm import LLM
from outpace.proposers.base import Step
from outpace.sampling import SamplingParams
from outpace.tree import Tree
from outpace.verify.fit import FITS, NO_POWER, WRONG, Fit, Partition, choose_prefix, measure_fit
from outpace.verify.fit import p_value as chance

SIZE, SAMPLES = 16, 300
PARAMS = SamplingParams(temperature=0.8, seed=7)
REJECTION = replace(PARAMS, acceptance="rejection")


@cache
def target() -> tuple[LLM, list[Partition]]:
    llm = serve(TableRuntime(random_table(SIZE, seed=1)))
    prefixes = [choose_prefix(llm, prompt, params=PARAMS) for prompt in ([1, 2, 3], [4, 5])]
    build = Partition.build
    return llm, [
        build(llm.model.runtime, prefix, params=PARAMS, samples=SAMPLES) for prefix in prefixes
    ]


def fit(method: Drawn | Empty, params: SamplingParams) -> Fit:
    llm, partitions = target()
    return measure_fit(llm.with_method(method), partitions, params=params, samples=SAMPLES)


def drawn() -> Drawn:
    return Drawn(random_table(SIZE, seed=2), branching=[2, 1])


def reported(change: Callable[[Tensor], Tensor]) -> Drawn:
    """Draws honestly, and reports `change(q)` instead of q."""
    method = drawn()
    guess = method.guess

    def lie(step: Step, number: int) -> Tree:
        tree = guess(step, number)
        assert isinstance(tree, Tree) and tree.draft_probs is not None
        return replace(tree, draft_probs=change(tree.draft_probs))

    method.guess = lie
    return method


@pytest.mark.parametrize("params", [PARAMS, REJECTION], ids=["coupled", "rejection"])
@pytest.mark.parametrize("method", [drawn, Empty], ids=["drawn", "nothing proposed"])
def test_right_rules_fit(params: SamplingParams, method: Callable[[], Drawn | Empty]) -> None:
    found = fit(method(), params)
    assert found.verdict == FITS and found.p_value > 0.01
    assert found.control_p_value < found.level < found.p_value
    assert found.samples == 2 * SAMPLES and found.acceptance == params.acceptance
    assert (found.accepted > 0) == (found.drafted > 0) == (method is drawn)
    assert fit(method(), params) == found  # seeds are fixed


def test_a_draw_reported_with_another_q_is_wrong() -> None:
    assert fit(reported(lambda q: q), REJECTION).verdict == FITS
    assert fit(reported(lambda q: torch.full_like(q, 1 / SIZE)), REJECTION).verdict == WRONG


def test_a_forgotten_residual_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_residual", lambda p, q, token: (p, q))
    assert fit(drawn(), REJECTION).verdict == WRONG
    assert fit(drawn(), PARAMS).verdict == FITS  # the coupled rule has no residual


def test_a_rule_for_another_distribution_is_wrong() -> None:
    assert fit(Empty(), replace(PARAMS, temperature=1.2)).verdict == WRONG


def test_a_target_that_is_nearly_certain_leaves_no_power() -> None:
    llm = serve(TableRuntime(probs_table([[0.9999, 0.0001 / 3, 0.0001 / 3, 0.0001 / 3]])))
    partition = Partition.build(llm.model.runtime, [0], params=PARAMS, samples=50)
    found = measure_fit(llm, [partition], params=PARAMS, samples=50)
    assert found.verdict == NO_POWER and found.p_value == found.control_p_value == 1.0


def test_cells_divide_all_texts_and_their_probability() -> None:
    llm, (partition, _) = target()
    table = llm.model.runtime.table  # type: ignore[attr-defined]
    probs = torch.softmax(table / PARAMS.temperature, dim=-1).double()
    totals = dict.fromkeys(partition.probs, 0.0)
    for a in range(SIZE):
        for b in range(SIZE):
            for c in range(SIZE):
                p = probs[partition.prefix[-1], a] * probs[a, b] * probs[b, c]
                totals[partition.cell([a, b, c])] += float(p)
    assert totals == pytest.approx(partition.probs, abs=1e-6)
    assert sum(partition.control.values()) == pytest.approx(1.0)
    assert max(map(len, partition.probs)) > 1, "only first tokens are tested"


@pytest.mark.parametrize(("statistic", "dof"), [(0.0, 3), (2.5, 1), (40.0, 12), (200.0, 150)])
def test_p_values_are_scipys(statistic: float, dof: int) -> None:
    assert chance(statistic, dof) == pytest.approx(stats.chi2.sf(statistic, dof), rel=1e-9)


def test_the_prefix_ends_where_the_target_is_least_certain() -> None:
    # 0 -> 1 -> 2 -> 0 almost surely, but after 2 anything may come.
    rows = torch.full((4, 4), 1e-6)
    rows[0, 1] = rows[1, 2] = rows[3, 0] = 1.0
    rows[2] = 0.25
    llm = serve(TableRuntime((rows / rows.sum(dim=1, keepdim=True)).log()))
    prefix = choose_prefix(llm, [0, 1, 2, 0], params=PARAMS)
    assert prefix[:4] == [0, 1, 2, 0] and prefix[-1] == 2
    with pytest.raises(InvalidRequest, match="no room"):
        choose_prefix(serve(TableRuntime(rows, max_context=6)), [0] * 4, params=PARAMS)
