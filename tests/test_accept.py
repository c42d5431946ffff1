from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import draw_tree, play
from tiny import probs_table, random_table
from torch import Tensor

from outpace import accept as rules
from outpace.accept import Accepted, TargetRows, accept
from outpace.errors import NumericalError
from outpace.sampling import DRAFT_STREAM, TOKEN_STREAM, Sampler, SamplingParams
from outpace.tree import Tree

VOCAB = 4
SEEDS = 3000
TABLE = random_table(VOCAB, seed=1)
DRAFT = random_table(VOCAB, seed=2)  # as far from the target as one random table from another

Rule = Callable[[Tree, Tensor, Sampler], Accepted]


def sampler_of(seed: int, tokens: Sequence[int] = (0,), **fields: Any) -> Sampler:
    params = SamplingParams(**{"temperature": 1.0} | fields)
    return Sampler(params, prompt=list(tokens), seed=seed, vocab_size=VOCAB)


def emit(
    seed: int,
    num: int,
    *,
    drawn: bool,
    branching: Sequence[int],
    rule: Rule = accept,
    table: Tensor = TABLE,
    draft: Tensor = DRAFT,
    **fields: Any,
) -> tuple[list[int], list[int]]:
    """The first `num` tokens after token 0, and how many nodes each step accepted."""
    added = play(
        table,
        lambda s: draw_tree(draft, s.tokens, s, branching=branching, drawn=drawn),
        seed=seed,
        num=num,
        params=SamplingParams(**{"temperature": 1.0} | fields),
        rule=rule,
    )
    return [token for step in added for token in step][:num], [len(step) - 1 for step in added]


def check_joint(
    num: int = 3, *, seeds: int = SEEDS, table: Tensor = TABLE, expected: Any = None, **how: Any
) -> None:
    """The first `num` tokens have the target's joint distribution, so also each position's."""
    processing = {
        name: how[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in how
    }
    matrix = oracle.probabilities(table, **{"temperature": 1.0} | processing)
    counts = np.zeros((VOCAB,) * num)
    for seed in range(seeds):
        counts[tuple(emit(seed, num, table=table, **how)[0])] += 1
    for axis, right in enumerate(oracle.marginals(matrix, 0, num)):
        others = tuple(i for i in range(num) if i != axis)
        oracle.assert_distribution(counts.sum(axis=others), right)
    oracle.assert_distribution(counts, oracle.joint(lambda ids: matrix[ids[-1]], [0], num))


SHAPES = {
    "drawn chain": dict(drawn=True, branching=(1, 1)),
    "drawn tree": dict(drawn=True, branching=(3, 2)),
    "drawn full tree": dict(drawn=True, branching=(4, 4)),
    "picked chain": dict(drawn=False, branching=(1, 1)),
    "picked tree": dict(drawn=False, branching=(3, 2)),
    "no draft": dict(drawn=True, branching=()),
}


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_distribution_is_the_targets(shape: dict[str, Any], acceptance: str) -> None:
    check_joint(acceptance=acceptance, **shape)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_distribution_is_the_targets_after_truncation(acceptance: str) -> None:
    check_joint(
        acceptance=acceptance, drawn=True, branching=(2, 2), temperature=0.6, top_k=3, top_p=0.95
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_coupled_text_is_plain_decodings_under_the_same_seed(shape: dict[str, Any]) -> None:
    for seed in range(200):
        plain, _ = emit(seed, 6, drawn=False, branching=())
        assert emit(seed, 6, **shape)[0] == plain


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_is_the_argmax_chain(shape: dict[str, Any], acceptance: str) -> None:
    right = oracle.greedy(oracle.lookup(TABLE), [0], max_new_tokens=6).tokens
    for seed in range(20):
        assert emit(seed, 6, temperature=0.0, acceptance=acceptance, **shape)[0] == right


# Controls: broken rules that the checks above must catch.


def softmax_residual(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """Chain rejection with the old transformers fault: the residual is soft-maxed."""
    node, path, rng = 0, [0], np.random.default_rng([sampler.seed, len(sampler.tokens)])
    for child in range(1, len(tree)):
        p, q = torch.softmax(logits[node], -1), tree.draft_probs[node]  # type: ignore[index]
        token = tree.tokens[child]
        if rng.random() >= float(p[token] / q[token]):
            rest = torch.softmax((p - q).clamp_min(0), -1).double()
            return Accepted(path, int(rng.choice(VOCAB, p=rest / rest.sum())))
        node = child
        path.append(child)
    p = torch.softmax(logits[node], -1).double()
    return Accepted(path, int(rng.choice(VOCAB, p=p / p.sum())))


def picks_as_draws(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """Top-k picks scored as if they had been drawn from the draft's distribution."""
    q = torch.softmax(DRAFT[tree.tokens], dim=-1)
    return accept(Tree(tokens=tree.tokens, parents=tree.parents, draft_probs=q), logits, sampler)


def sibling_stays(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """A rejected sibling is not taken out of p and q before the next one is tried."""
    old = rules._residual
    rules._residual = lambda p, q, token: (p, q)
    try:
        return accept(tree, logits, sampler)
    finally:
        rules._residual = old


def same_noise_everywhere(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """Noise keyed by the step: all nodes of a tree share it."""
    rows = TargetRows(tree, logits, sampler)
    rows.position = lambda node: len(sampler.tokens)  # type: ignore[method-assign]
    return rules.accept_coupled(tree, rows)


def first_unchecked(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """The first drafted token is taken as it is."""
    if len(tree) == 1:
        return accept(tree, logits, sampler)
    node = tree.children(0)[0]
    return Accepted([0, node], TargetRows(tree, logits, sampler).token(node))


def raw_logits(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """Verification forgets temperature and truncation."""
    plain = Sampler(
        SamplingParams(temperature=1.0), prompt=sampler.tokens, seed=sampler.seed, vocab_size=VOCAB
    )
    return accept(tree, logits, plain)


CONTROLS: dict[str, tuple[Rule, dict[str, Any]]] = {
    "softmax of the residual": (
        softmax_residual,
        dict(acceptance="rejection", drawn=True, branching=(1, 1)),
    ),
    "picks scored as draws": (
        picks_as_draws,
        dict(acceptance="rejection", drawn=False, branching=(2, 2)),
    ),
    "a rejected sibling stays": (
        sibling_stays,
        dict(acceptance="rejection", drawn=True, branching=(3, 2)),
    ),
    "noise keyed by the step": (
        same_noise_everywhere,
        dict(acceptance="coupled", drawn=False, branching=(3, 2)),
    ),
    "the first token unchecked": (
        first_unchecked,
        dict(acceptance="coupled", drawn=False, branching=(1, 1)),
    ),
    "raw logits in verification": (
        raw_logits,
        dict(acceptance="coupled", drawn=False, branching=(2, 2), temperature=0.6, top_k=3),
    ),
}


@pytest.mark.parametrize(("rule", "how"), CONTROLS.values(), ids=CONTROLS)
def test_control_a_broken_rule_is_caught(rule: Rule, how: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_joint(rule=rule, **how)


def test_control_a_right_rule_written_here_passes() -> None:
    def rejection(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
        node, rng = 0, np.random.default_rng([sampler.seed, len(sampler.tokens)])
        for child in range(1, len(tree)):
            p, q = torch.softmax(logits[node], -1), tree.draft_probs[node]  # type: ignore[index]
            if rng.random() >= float(p[tree.tokens[child]] / q[tree.tokens[child]]):
                p = (p - q).clamp_min(0)
                break
            node = child
        else:
            p = torch.softmax(logits[node], -1)
        p = p.double() / p.double().sum()
        return Accepted(tree.path(node), int(rng.choice(VOCAB, p=p)))

    check_joint(rule=rejection, acceptance="rejection", drawn=True, branching=(1, 1))


# The replacement of a rejected token has noise of its own

SKEWED_P = probs_table([[0.01, 0.50, 0.48, 0.01]])
SKEWED_Q = probs_table([[0.60, 0.38, 0.01, 0.01]])  # mostly says 0, and 1 nearly as often


def check_replacements() -> None:
    how: dict[str, Any] = dict(drawn=True, branching=(1,), acceptance="rejection")
    check_joint(1, table=SKEWED_P, draft=SKEWED_Q, **how)


def test_a_replacement_is_independent_of_the_drafts_draw() -> None:
    check_replacements()


@pytest.mark.parametrize("stream", [TOKEN_STREAM, DRAFT_STREAM])
def test_control_noise_that_draft_and_replacement_share_is_caught(
    monkeypatch: pytest.MonkeyPatch, stream: int
) -> None:
    """A token that the draft did not draw has little noise, so the replacement avoids it too."""
    noise = Sampler.noise
    monkeypatch.setattr(Sampler, "noise", lambda self, at, **_: noise(self, at, stream=stream))
    with pytest.raises(AssertionError):
        check_replacements()


def test_control_a_chance_that_shares_the_drafts_noise_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft's own draws decide whether they are accepted."""
    monkeypatch.setattr(rules, "ACCEPT_STREAM", DRAFT_STREAM)
    with pytest.raises(AssertionError):
        check_replacements()


# How much is accepted


def test_rejection_accepts_a_drawn_token_with_the_overlap_of_p_and_q() -> None:
    p, q = oracle.probabilities(TABLE)[0], oracle.probabilities(DRAFT)[0]
    how: dict[str, Any] = dict(drawn=True, branching=(1,), acceptance="rejection")
    hits = sum(emit(seed, 1, **how)[1][0] for seed in range(SEEDS))
    oracle.assert_rate(hits, SEEDS, float(np.minimum(p, q).sum()))


def test_coupled_accepts_a_drawn_token_as_often_as_two_gumbel_races_agree() -> None:
    p, q = oracle.probabilities(TABLE)[0], oracle.probabilities(DRAFT)[0]
    agree = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(VOCAB))
    hits = sum(emit(seed, 1, drawn=True, branching=(1,))[1][0] for seed in range(SEEDS))
    oracle.assert_rate(hits, SEEDS, float(agree))


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_picked_token_is_accepted_with_its_probability(acceptance: str) -> None:
    p = oracle.probabilities(TABLE)[0]
    how: dict[str, Any] = dict(drawn=False, branching=(1,), acceptance=acceptance)
    hits = sum(emit(seed, 1, **how)[1][0] for seed in range(SEEDS))
    oracle.assert_rate(hits, SEEDS, p[int(DRAFT[0].argmax())])


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2)])
def test_a_perfect_draft_is_always_accepted(acceptance: str, branching: tuple[int, ...]) -> None:
    for seed in range(300):
        _, accepted = emit(
            seed, 1, drawn=True, branching=branching, draft=TABLE, acceptance=acceptance
        )
        assert accepted == [len(branching)]


# The walk over one tree


def one_hot(tokens: Sequence[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 50


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_walk_takes_the_branch_that_the_target_takes(
    acceptance: str, temperature: float
) -> None:
    #        0 -> 1 -> 2
    #          -> 3 -> 1 -> 0
    tree = Tree(tokens=[0, 1, 2, 3, 1, 0], parents=[-1, 0, 1, 0, 3, 4])
    sampler = sampler_of(5, temperature=temperature, acceptance=acceptance)
    walks = {
        (1, 2, 3, 0, 0, 0): ([0, 1, 2], 3),
        (1, 0, 3, 0, 0, 0): ([0, 1], 0),
        (3, 0, 0, 1, 0, 2): ([0, 3, 4, 5], 2),
        (3, 0, 0, 1, 2, 2): ([0, 3, 4], 2),
        (2, 0, 0, 0, 0, 0): ([0], 2),
    }
    for wanted, (path, token) in walks.items():
        assert accept(tree, one_hot(wanted), sampler) == Accepted(path, token)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
def test_scratch_is_never_accepted(acceptance: str) -> None:
    tree = Tree(tokens=[0, 1, 1, 2], parents=[-1, 0, 1, 2], num_candidates=2)
    sampler = sampler_of(5, acceptance=acceptance)
    assert accept(tree, one_hot([1, 1]), sampler) == Accepted([0, 1], 1)


@given(st.integers(0, 10**6), st.integers(1, 10), st.booleans())
def test_only_rows_on_the_way_are_processed_and_each_once_and_in_order(
    seed: int, n: int, greedy: bool
) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree(
        tokens=rng.integers(0, VOCAB, n).tolist(),
        parents=[-1] + [int(rng.integers(0, i)) for i in range(1, n)],
    )
    seen: list[list[int]] = []

    def record(ids: Any, x: Tensor) -> Tensor:
        seen.append(list(ids))
        return x

    sampler = sampler_of(
        seed, [1, 2, tree.tokens[0]], temperature=0.0 if greedy else 1.0, processors=(record,)
    )
    path = accept(tree, TABLE[tree.tokens], sampler).path
    drafted = tree.path_tokens(path[-1])
    assert seen == [[1, 2, tree.tokens[0], *drafted[:i]] for i in range(len(path))]


# Typical acceptance: lossy, by its formula


def test_typical_keeps_the_deepest_path_above_the_entropy_border() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    border = min(0.09, 0.3 * math.exp(float((p * np.log(p)).sum())))
    assert 0.05 < border < 0.15
    table = probs_table([p.tolist()])
    tree = Tree(tokens=[0, 3, 2, 3, 1], parents=[-1, 0, 0, 2, 2])
    for seed in range(50):
        got = accept(tree, table[tree.tokens], sampler_of(seed, acceptance="typical"))
        assert got.path == [0, 2, 4]
    loose = sampler_of(0, acceptance="typical", typical_threshold=0.04)
    assert accept(tree, table[tree.tokens], loose).path == [0, 2, 3]
    strict = sampler_of(0, acceptance="typical", typical_threshold=1.0, typical_alpha=10.0)
    assert accept(tree, table[tree.tokens], strict).path == [0]


def test_control_typical_is_seen_to_change_the_distribution() -> None:
    with pytest.raises(AssertionError):
        check_joint(acceptance="typical", drawn=False, branching=(2, 2), typical_threshold=0.05)


# Numbers that are none


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_names_the_position(
    bad: float, temperature: float, acceptance: str
) -> None:
    logits = one_hot([1, 2])
    logits[0, 3] = bad
    sampler = sampler_of(0, [0, 0, 0], temperature=temperature, acceptance=acceptance)
    with pytest.raises(NumericalError, match=r"position 3.*bfloat16"):
        accept(Tree.chain([0, 1]), logits, sampler)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_tokens_banned_is_an_error_that_says_so(temperature: float, acceptance: str) -> None:
    words = tuple((token,) for token in range(VOCAB))
    sampler = sampler_of(0, temperature=temperature, acceptance=acceptance, bad_words=words)
    with pytest.raises(NumericalError, match="every token is banned"):
        accept(Tree.chain([0, 1]), one_hot([1, 2]), sampler)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_rows_with_one_token_left_are_handled(temperature: float) -> None:
    words = tuple((token,) for token in range(VOCAB) if token != 2)
    for acceptance in ("coupled", "rejection"):
        for tokens in ([0], [0, 1], [0, 2]):
            sampler = sampler_of(0, temperature=temperature, acceptance=acceptance, bad_words=words)
            got = accept(Tree.chain(tokens), one_hot([1] * len(tokens)), sampler)
            assert got.token == 2 and len(got.path) == (2 if tokens[1:] == [2] else 1)


def test_rows_of_half_precision_decide_in_fp32() -> None:
    # 1 + 2**-8 rounds to 1 in bf16, so a temperature applied there would lose the order.
    logits = torch.tensor([[1.0, 1.0078125, 0.5, 0.0]], dtype=torch.bfloat16)
    for temperature in (0.0, 1e-4):
        got = accept(Tree.chain([0]), logits, sampler_of(3, temperature=temperature))
        assert got.token == 1
