"""Faults of group A: losslessness and sampling. The numbers are the issue list's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from scripted import (
    AlwaysWrong,
    Bushy,
    Drawn,
    HalfRight,
    Perfect,
    Script,
    Scripted,
    draw_tree,
    play,
)
from tiny import VOCAB, TableRuntime, build, probs_table, random_table, serve, shared
from torch import Tensor

from outpace.accept import Accepted, accept
from outpace.errors import InvalidRequest, NumericalError
from outpace.proposers.base import Method, Step
from outpace.runtimes.transformers import TransformersRuntime
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree

EXACT = ["coupled", "rejection"]
SEEDS = 2000


def chain(*tokens: int, q: Sequence[float] | None = None) -> Callable[[Sampler], Tree]:
    """Proposes the same tokens at every step, drawn from `q` or picked."""

    def tree_of(sampler: Sampler) -> Tree:
        rows = None if q is None else torch.tensor([q] * (len(tokens) + 1))
        return Tree.chain([sampler.tokens[-1], *tokens], draft_probs=rows)

    return tree_of


def drawn(*branching: int, q: Sequence[float]) -> Callable[[Sampler], Tree]:
    """Draws a tree from `q` at every step."""
    table = probs_table([q])
    return lambda sampler: draw_tree(table, sampler.tokens, sampler, branching=branching)


def first_tokens(
    p: Sequence[float],
    tree_of: Callable[[Sampler], Tree],
    *,
    num: int,
    seeds: int = SEEDS,
    **how: Any,
) -> list[np.ndarray]:
    """Counts `[vocab]` of each of the first `num` tokens over seeds, where p holds everywhere."""
    rule = how.pop("rule", accept)
    params = SamplingParams(**{"temperature": 1.0} | how)
    counts = [np.zeros(len(p)) for _ in range(num)]
    for seed in range(seeds):
        added = play(probs_table([p]), tree_of, seed=seed, num=num, params=params, rule=rule)
        for count, token in zip(counts, [t for step in added for t in step], strict=False):
            count[token] += 1
    return counts


def close(rows: Sequence[float], right: Sequence[float], *, to: float) -> None:
    assert np.allclose(rows, right, atol=to), f"{rows} is not {right}"


# 03: temperature, top_p and top_k reach the verification

P03 = [0.5, 0.25, 0.15, 0.10]
SHARP = [0.7246, 0.1812, 0.0652, 0.0290]
Q03 = [0.1, 0.4, 0.1, 0.4]


def check_three_positions(p: Sequence[float], right: Sequence[float], **how: Any) -> None:
    """Positions 1 and 2, and the bonus token after two accepted drafts, each alone."""
    params = SamplingParams(**{"temperature": 1.0} | how)
    tree_of = drawn(1, 1, q=Q03)
    first, second, bonus = (np.zeros(4) for _ in range(3))
    for seed in range(SEEDS):
        added = play(probs_table([p]), tree_of, seed=seed, num=2, params=params)
        tokens = [t for step in added for t in step]
        first[tokens[0]] += 1
        second[tokens[1]] += 1
        if len(added[0]) == 3:
            bonus[added[0][2]] += 1
    assert bonus.sum() > 200
    for counts in (first, second, bonus):
        oracle.assert_distribution(counts, np.array(right) / sum(right))


@pytest.mark.parametrize("acceptance", EXACT)
def test_03_temperature_reaches_every_position(acceptance: str) -> None:
    exact = np.array(P03) ** 2 / np.square(P03).sum()
    close(exact, SHARP, to=5e-5)
    check_three_positions(P03, exact.tolist(), temperature=0.5, acceptance=acceptance)


@pytest.mark.parametrize("acceptance", EXACT)
def test_03_top_p_reaches_every_position(acceptance: str) -> None:
    right = [2 / 3, 1 / 3, 0.0, 0.0]
    check_three_positions(P03, right, top_p=0.7, acceptance=acceptance)


@pytest.mark.parametrize("acceptance", EXACT)
def test_03_top_k_reaches_every_position(acceptance: str) -> None:
    right = [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.0]
    check_three_positions(P03, right, top_k=3, acceptance=acceptance)


def test_03_control_ignored_temperature_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_three_positions(P03, SHARP, temperature=1.0)
    with pytest.raises(AssertionError):
        check_three_positions(P03, P03, temperature=0.5)


# 04: the residual after a rejection

P04, Q04 = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
WRONG04 = [0.321, 0.390, 0.290]


def test_04_a_rejected_token_is_replaced_by_the_only_one_that_the_draft_lacks() -> None:
    params = SamplingParams(temperature=1.0, acceptance="rejection")
    rejected = 0
    for seed in range(SEEDS):
        trees: list[Tree] = []

        def tree_of(sampler: Sampler, trees: list[Tree] = trees) -> Tree:
            trees.append(drawn(1, q=Q04)(sampler))
            return trees[-1]

        added = play(probs_table([P04]), tree_of, seed=seed, num=1, params=params)
        if len(added[0]) == 1:
            rejected += 1
            assert added[0] == [0] and trees[0].tokens[1] != 0
    oracle.assert_rate(rejected, SEEDS, 0.3)


@pytest.mark.parametrize("acceptance", EXACT)
@pytest.mark.parametrize("branching", [(1,), (2,), (3,), (1, 1)])
def test_04_the_marginal_is_the_targets(branching: tuple[int, ...], acceptance: str) -> None:
    counts = first_tokens(P04, drawn(*branching, q=Q04), num=2, acceptance=acceptance)
    for count in counts:
        oracle.assert_distribution(count, P04)


def test_04_control_the_softmax_of_the_difference_is_caught() -> None:
    p, q = np.array(P04), np.array(Q04)
    kept = np.minimum(p, q)
    wrong = kept + (1 - kept.sum()) * oracle.softmax(np.maximum(p - q, 0))
    close(wrong, WRONG04, to=6e-4)
    counts = np.random.default_rng(0).multinomial(SEEDS, wrong)
    with pytest.raises(AssertionError):
        oracle.assert_distribution(counts, P04)


@pytest.mark.parametrize("acceptance", EXACT)
def test_04_the_same_distribution_is_always_accepted(acceptance: str) -> None:
    params = SamplingParams(temperature=1.0, acceptance=acceptance)
    for seed in range(500):
        for branching in ((1, 1, 1), (3, 3)):
            tree_of = drawn(*branching, q=P04)
            (step,) = play(probs_table([P04]), tree_of, seed=seed, num=1, params=params)
            assert len(step) == len(branching) + 1


def covering_draft() -> int:
    """Runs drafts whose q is p, but for one token that they say twice as often; counts residuals
    of nothing at all, after which p itself is what remains.
    """
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.0, acceptance="rejection")
    rejected = 0
    for seed in range(300):
        sampler = Sampler(params, prompt=[0], seed=seed, vocab_size=1000)
        q = torch.softmax(sampler.process(logits[0], []), dim=-1)
        q[5] *= 2
        got = accept(Tree.chain([0, 5], draft_probs=q.expand(2, -1)), logits, sampler)
        assert 0 <= got.token < 1000
        rejected += got.path == [0]
    return rejected


def test_04_a_draft_that_covers_the_target_leaves_no_nan() -> None:
    assert 100 < covering_draft() < 200, "half of the drafts are rejected"


def test_04_control_a_division_by_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def divided(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
        rest = (p - q).clamp_min(0.0)
        return rest / rest.sum(), q

    monkeypatch.setattr("outpace.accept._residual", divided)
    with pytest.raises(NumericalError):
        covering_draft()


# 05: temperature zero and near zero, deterministic drafters


@pytest.mark.parametrize("acceptance", [*EXACT, "typical"])
def test_05_greedy_gives_the_targets_favourite_not_the_drafts(acceptance: str) -> None:
    p, q = [0.3, 0.5, 0.2], [0.2, 0.4, 0.4]
    for tree_of in (chain(0, q=q), chain(0), chain(0, 0, q=q)):
        counts = first_tokens(p, tree_of, num=1, seeds=50, temperature=0.0, acceptance=acceptance)
        assert counts[0].tolist() == [0, 50, 0]


P05 = [0.3, 0.5, 0.2]


@pytest.mark.parametrize("acceptance", EXACT)
@pytest.mark.parametrize("tokens", [(0,), (0, 0), (2, 1)])
def test_05_a_deterministic_drafter_does_not_bias(tokens: tuple[int, ...], acceptance: str) -> None:
    for count in first_tokens(P05, chain(*tokens), num=3, acceptance=acceptance):
        oracle.assert_distribution(count, P05)


def test_05_control_a_soft_score_for_a_picked_token_is_caught() -> None:
    soft = chain(0, q=[0.4, 0.3, 0.3])
    (count,) = first_tokens(P05, soft, num=1, acceptance="rejection")
    oracle.assert_distribution(count, [0.75, 0.25, 0.0])
    with pytest.raises(AssertionError):
        oracle.assert_distribution(count, P05)


@pytest.mark.parametrize("acceptance", EXACT)
@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-9, 5e-324])
def test_05_a_tiny_temperature_is_greedy(temperature: float, acceptance: str) -> None:
    for scale in (1.0, 1e4):  # logits of this size overflow when divided in a smaller dtype
        table = torch.log(torch.tensor(P05)).roll(1).expand(3, -1) * scale
        params = SamplingParams(temperature=temperature, acceptance=acceptance)
        for seed in range(50):
            for tree_of in (drawn(1, 1, q=P05), chain(0, 1), chain(2, 2)):
                added = play(table, tree_of, seed=seed, num=4, params=params)
                assert {t for step in added for t in step} == {2}


def test_05_a_negative_temperature_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="temperature must be at least 0"):
        SamplingParams(temperature=-0.5)


# 07: several candidates a step

TREE07 = Tree(
    tokens=[5, 0, 1, 2, 3, 4, 5], parents=[-1, 0, 1, 1, 1, 0, 5]
)  # a-b, a-c, a-d, e-f with a=0 and e=4
P07 = [0.5, 0.0, 0.0, 0.0, 0.5, 0.0]


def share_of_a(
    rule: Callable[[Tree, Tensor, Sampler], Accepted], *, seeds: int = 12_000, **fields: Any
) -> float:
    table = probs_table([P07])
    params = SamplingParams(**{"temperature": 1.0} | fields)
    hits = 0
    for seed in range(seeds):
        sampler = Sampler(params, prompt=[5], seed=seed, vocab_size=6)
        got = rule(TREE07, table[TREE07.tokens], sampler)
        hits += [*TREE07.path_tokens(got.path[-1]), got.token][0] == 0
    return hits / seeds


@pytest.mark.parametrize("acceptance", EXACT)
def test_07_branches_that_share_a_prefix_are_not_preferred(acceptance: str) -> None:
    assert abs(share_of_a(accept, acceptance=acceptance) - 0.5) < 0.01


def test_07_control_independent_draws_for_each_path_are_caught() -> None:
    def longest_of_independent_draws(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
        best = Accepted([0], 4)
        for i, leaf in enumerate((2, 3, 4, 6)):
            own = Sampler(sampler.params, prompt=[5], seed=sampler.seed * 4 + i, vocab_size=6)
            single = Tree.chain([tree.tokens[node] for node in tree.path(leaf)[:2]])
            if len(accept(single, logits, own).path) > len(best.path):
                best = Accepted(tree.path(leaf)[:2], 0)
        return best

    share = share_of_a(longest_of_independent_draws, seeds=3000)
    assert abs(share - 0.875) < 0.02  # 1 - 0.5**3
    with pytest.raises(AssertionError):
        oracle.assert_rate(round(share * 3000), 3000, 0.5)


def test_07_the_tree_at_temperature_zero_is_the_oracles() -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    right = oracle.greedy(oracle.lookup(table), [5], max_new_tokens=5).tokens

    def tree_of(sampler: Sampler) -> Tree:
        return Tree(tokens=[sampler.tokens[-1], *TREE07.tokens[1:]], parents=TREE07.parents)

    for acceptance in EXACT:
        params = SamplingParams(acceptance=acceptance)
        added = play(table, tree_of, seed=0, num=5, params=params, prompt=[5])
        assert [t for step in added for t in step][:5] == right


# The same through the engine


def deterministic_table(vocab_size: int, successor: dict[int, int]) -> Tensor:
    table = torch.zeros(vocab_size, vocab_size)
    for token in range(vocab_size):
        table[token, successor.get(token, 0)] = 5.0
    return table


# 08: the first drafted token is checked


def check_first_token(method: Method | str, *, accepted: int) -> None:
    table = deterministic_table(10, {9: 3, 3: 7, 7: 7})
    result = serve(TableRuntime(table), method).generate([9, 9, 9, 9], max_new_tokens=2)
    assert result.tokens == [3, 7]
    assert result.stats.drafted >= 1 and result.stats.accepted == accepted


@pytest.mark.parametrize("draft", [[9], [9, 9, 9], [9, 3], [7], [3], [3, 9]])
def test_08_the_first_drafted_token_is_checked(draft: list[int]) -> None:
    check_first_token(Script(draft), accepted=draft[0] == 3)


def test_08_a_repeated_prompt_is_not_repeated_by_lookup() -> None:
    check_first_token("lookup", accepted=0)


def test_08_control_an_unchecked_first_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
        got = accept(tree, logits, sampler)
        return got if len(tree) == 1 else Accepted([0, 1], got.token)

    monkeypatch.setattr("outpace.engine.accept", unchecked)
    with pytest.raises(AssertionError):
        check_first_token(Script([9]), accepted=0)


# 09: nothing is lost or doubled at the joints


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_09_exactly_five_tokens_and_the_first_is_the_one_after_the_prompt(
    length: int, k: int
) -> None:
    table = random_table(16, seed=3)
    prompt = [(3 * i + 1) % 16 for i in range(length)]
    right = oracle.greedy(oracle.lookup(table), prompt, max_new_tokens=5).tokens
    for method in (
        "plain",
        "lookup",
        Perfect(prompt + right, k=k),
        AlwaysWrong(prompt + right, vocab_size=16, k=k),
        HalfRight(prompt + right, rights=range(k + 1), vocab_size=16, k=k),
    ):
        llm = serve(TableRuntime(table), method)
        assert llm.generate(prompt, max_new_tokens=5).tokens == right
        ended = serve(TableRuntime(table), method, eos_ids=[right[0]]).generate(prompt)
        assert ended.tokens == right[:1] and ended.finish_reason == "stop"


def check_audit(tokens: Sequence[int], table: Tensor, last: int) -> None:
    """Every token is one of the three likeliest after the one before it."""
    for token in tokens:
        assert token in table[last].topk(3).indices, f"{token} after {last}"
        last = token


def least_likely(table: Tensor, k: int) -> Scripted:
    def guess(step: Step, _: int) -> list[int]:
        tokens = [step.tokens[-1]]
        for _ in range(k):
            tokens.append(int(table[tokens[-1]].argmin()))
        return tokens[1:]

    return Scripted(guess)


@pytest.mark.parametrize("acceptance", EXACT)
def test_09_every_token_fits_its_own_prefix(acceptance: str) -> None:
    table = random_table(16, seed=3)
    runtime = TableRuntime(table)
    mixed = Drawn(random_table(16, seed=4), branching=(2, 2, 1))
    for method in (least_likely(table, 4), mixed):
        llm = serve(runtime, method)
        for seed in range(200):
            result = llm.generate(
                [5], max_new_tokens=12, temperature=1.0, top_k=3, seed=seed, acceptance=acceptance
            )
            assert len(result.tokens) == 12
            check_audit(result.tokens, table, 5)


def test_09_control_a_lost_or_a_doubled_token_is_caught() -> None:
    table = random_table(16, seed=3)
    params: dict[str, Any] = dict(temperature=1.0, top_k=3, seed=0, max_new_tokens=12)
    tokens = serve(TableRuntime(table)).generate([5], **params).tokens
    check_audit(tokens, table, 5)
    lost = [tokens[:i] + tokens[i + 1 :] for i in range(11)]
    doubled = [tokens[:i] + tokens[i : i + 1] + tokens[i:] for i in range(12)]
    for wrong in (lost, doubled):
        caught = 0
        for text in wrong:
            try:
                check_audit(text, table, 5)
            except AssertionError:
                caught += 1
        assert caught > len(wrong) // 2


# 05 and 03 on a real model


@pytest.mark.parametrize("acceptance", EXACT)
def test_05_a_tiny_temperature_is_greedy_on_a_real_model(acceptance: str) -> None:
    llm = serve(shared("llama"))
    right = llm.generate([1, 2, 3], max_new_tokens=16).tokens
    for temperature in (1e-4, 1e-6, 1e-9):
        for method in ("plain", HalfRight([1, 2, 3, *right], rights=[2, 0, 4], vocab_size=VOCAB)):
            result = llm.with_method(method).generate(
                [1, 2, 3], max_new_tokens=16, temperature=temperature, acceptance=acceptance, seed=1
            )
            assert result.tokens == right


# 01: near-ties


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_01_fp32_ids_are_the_oracles_but_for_near_ties(k: int) -> None:
    model = shared("llama")
    llm, logits = serve(model), oracle.recompute(model)
    for start in range(4):
        prompt = [(start + 7 * i) % VOCAB for i in range(3 + start)]
        right = oracle.greedy(logits, prompt, max_new_tokens=128)
        text = prompt + right.tokens
        for method in (
            Perfect(text, k=k),
            HalfRight(text, rights=range(k + 1), vocab_size=VOCAB, k=k),
            Bushy(text, rights=[k, 1, 2], vocab_size=VOCAB),
        ):
            result = llm.with_method(method).generate(prompt, max_new_tokens=128)
            oracle.assert_same(result.tokens, right)


def test_01_control_a_difference_that_is_no_near_tie_is_caught() -> None:
    right = oracle.greedy(oracle.recompute(shared("llama")), [1, 2, 3], max_new_tokens=16)
    for i, gap in enumerate(right.gaps):
        wrong = [*right.tokens]
        wrong[i] = (wrong[i] + 1) % VOCAB
        assert gap > oracle.NEAR_TIE
        with pytest.raises(AssertionError):
            oracle.assert_same(wrong, right)


WIDE: dict[str, Any] = dict(  # wide enough for kernels that differ with the number of rows
    vocab_size=4096,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
)


def bf16_runs(exactness: str) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Prompt, plain decoding's ids and a drafter's ids, of one bf16 model."""
    model = build("llama", dtype=torch.bfloat16, **WIDE)
    llm = serve(TransformersRuntime(model, exactness=exactness))
    for start in (6, 7, 8):
        prompt = [31 * start + 7 * i for i in range(3 + start)]
        plain = llm.generate(prompt, max_new_tokens=64).tokens
        drafter = HalfRight(prompt + plain, rights=[6, 5], vocab_size=4096, k=6)
        yield prompt, plain, llm.with_method(drafter).generate(prompt, max_new_tokens=64).tokens


def test_01_bf16_differs_first_at_a_near_tie_only() -> None:
    logits = oracle.recompute(build("llama", dtype=torch.bfloat16, **WIDE))
    for prompt, plain, got in bf16_runs("ordinary"):
        first = next((i for i in range(64) if plain[i] != got[i]), None)
        if first is not None:
            best, second = np.sort(logits(prompt + plain[:first]))[-2:][::-1]
            assert best - second <= 4 * 2.0**-8 * abs(best), "bf16 keeps eight bits"


def test_01_bf16_with_same_shape_forwards_does_not_differ_at_all() -> None:
    for _, plain, got in bf16_runs("same-shape"):
        assert got == plain
