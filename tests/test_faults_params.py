"""Faults of group F: sampling parameters. The numbers are the issue list's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from scripted import AlwaysWrong, Bushy, Drawn, HalfRight, Perfect
from tiny import (
    VOCAB,
    TableRuntime,
    byte_tokenizer,
    probs_table,
    random_table,
    serve,
    shared,
)
from torch import Tensor

from outpace.errors import InvalidRequest
from outpace.llm import Result
from outpace.proposers.base import Method
from outpace.sampling import SamplingParams

PROMPT = [1, 2, 3]
NUM = 40


def methods(text: Sequence[int], vocab_size: int) -> dict[str, Method | str]:
    """Drafters of one to eight tokens that know the right text."""
    sizes = (1, 2, 4, 8)
    return {
        "plain": "plain",
        "lookup": "lookup",
        "bushy": Bushy(text, rights=[4, 1, 8, 2], vocab_size=vocab_size),
        "always wrong": AlwaysWrong(text, vocab_size=vocab_size),
        **{f"perfect {k}": Perfect(text, k=k) for k in sizes},
        **{
            f"half-right {k}": HalfRight(text, rights=range(k + 1), vocab_size=vocab_size, k=k)
            for k in sizes
        },
    }


METHODS = list(methods([], 1))


def looping_table() -> Tensor:
    """Greedy text runs 0 1 2 0 1 2 ..., with other tokens close behind; 1 follows PROMPT."""
    table = random_table(16, seed=4, scale=0.5)
    loop = torch.tensor([1, 2, 0, 1])
    table[torch.arange(4), loop] = table[:4].amax(dim=1) + 0.2
    return table


# 34: penalties

PENALTIES: dict[str, dict[str, float]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.0},
    "presence below zero": {"presence_penalty": -1.0},
    "frequency": {"frequency_penalty": 2.0},
    "frequency below zero": {"frequency_penalty": -2.0},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def check_against_oracle(
    logits: oracle.Logits,
    target: Callable[[], Any],
    *,
    vocab_size: int,
    num: int = NUM,
    prompt: Sequence[int] = PROMPT,
    use: dict[str, Any] | None = None,
    names: Sequence[str] = METHODS,
    **params: Any,
) -> list[int]:
    """Every drafter's greedy ids are the oracle's with the same processors.

    `use` are other parameters for the project's side: the control.
    """
    right = oracle.greedy(logits, prompt, max_new_tokens=num, **params)
    for name in names:
        method = methods([*prompt, *right.tokens], vocab_size)[name]
        given = params if use is None else use
        result = serve(target(), method).generate(list(prompt), max_new_tokens=num, **given)
        oracle.assert_same(result.tokens, right)
    return right.tokens


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_34_penalties_act_on_every_row(penalty: dict[str, float]) -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16)
    without = oracle.greedy(oracle.lookup(table), PROMPT, max_new_tokens=NUM).tokens
    assert without[:6] == [1, 2, 0, 1, 2, 0]
    with_it = check_against_oracle(oracle.lookup(table), **how, **penalty)
    if penalty not in (PENALTIES["repetition below one"], PENALTIES["presence below zero"]):
        assert with_it != without, "the penalty breaks the loop"


def test_34_opposite_signs_give_different_text() -> None:
    table = looping_table()
    llm = serve(TableRuntime(table))
    texts = [
        llm.generate(PROMPT, max_new_tokens=NUM, frequency_penalty=value).tokens
        for value in (-2.0, 2.0)
    ]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_34_penalties_on_a_real_model(penalty: dict[str, float]) -> None:
    model = shared("llama")
    llm = serve(model)
    names = ["plain", "lookup", "bushy", "half-right 4"]
    logits = oracle.recompute(model)
    right = oracle.greedy(logits, PROMPT, max_new_tokens=NUM, **penalty)
    for name in names:
        method = methods(PROMPT + right.tokens, VOCAB)[name]
        result = llm.with_method(method).generate(PROMPT, max_new_tokens=NUM, **penalty)
        oracle.assert_same(result.tokens, right)


def test_34_repetition_sees_the_prompt_and_the_others_the_output_only() -> None:
    table = probs_table([[0.4, 0.35, 0.25]])
    for penalty, first in {
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }.items():
        llm = serve(TableRuntime(table))
        assert llm.generate([0], max_new_tokens=1, **{penalty: 1.9}).tokens == [first]


def test_34_a_row_sees_what_is_drafted_before_it() -> None:
    # Without a penalty 0 0 0 0 is right; with it each token of the block hinders itself.
    table = probs_table([[0.4, 0.3, 0.2, 0.1]])
    llm = serve(TableRuntime(table), Perfect([3, 0, 1, 2, 3, 0, 1, 2, 3], k=8))
    result = llm.generate([3], max_new_tokens=8, frequency_penalty=2.0)
    assert result.tokens == [0, 1, 2, 3, 0, 1, 2, 3]
    assert result.stats.steps == 1


def test_34_control_an_ignored_or_weaker_penalty_is_caught() -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16)
    for use in ({}, {"frequency_penalty": 0.5}, {"presence_penalty": 2.0}):
        with pytest.raises(AssertionError):
            check_against_oracle(oracle.lookup(table), **how, use=use, frequency_penalty=2.0)


# 36: logit_bias, min_p, bad words, processors


def test_36_a_banned_token_never_appears_and_the_rest_is_the_oracles() -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16, num=200)
    for bias in (-100, -1e9):
        tokens = check_against_oracle(oracle.lookup(table), **how, logit_bias={1: bias})
        assert 1 not in tokens and len(tokens) == 200
    model = shared("llama")
    favourite = oracle.greedy(oracle.recompute(model), PROMPT, max_new_tokens=3).tokens[0]
    tokens = check_against_oracle(
        oracle.recompute(model),
        target=lambda: model,
        vocab_size=VOCAB,
        names=["lookup", "bushy", "half-right 4"],
        logit_bias={favourite: -100},
    )
    assert favourite not in tokens


def test_36_a_token_with_a_large_bias_is_the_only_one() -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16)
    tokens = check_against_oracle(oracle.lookup(table), **how, logit_bias={9: 100})
    assert tokens == [9] * NUM


@pytest.mark.parametrize("bias", [{3: 0.7, 5: -0.4}, {0: -2.0, 1: 1.0, 15: 2.5}])
def test_36_a_mild_bias(bias: dict[int, float]) -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16)
    check_against_oracle(oracle.lookup(table), **how, logit_bias=bias)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("branching", [(), (1, 1), (3, 2)])
def test_36_min_p_on_every_position(acceptance: str, branching: tuple[int, ...]) -> None:
    p = [0.5, 0.3, 0.2]
    draft = Drawn(probs_table([[0.2, 0.3, 0.5]]), branching=branching)
    llm = serve(TableRuntime(probs_table([p])), draft)
    counts = np.zeros((3, 3))
    for seed in range(600):
        tokens = llm.generate(
            [0], max_new_tokens=3, temperature=1.0, min_p=0.5, seed=seed, acceptance=acceptance
        ).tokens
        counts[range(3), tokens] += 1
    for count in counts:
        oracle.assert_distribution(count, [0.625, 0.375, 0.0])


BAD = {
    "one token": ((1,),),
    "two tokens": ((1, 2),),
    "three tokens": ((0, 1, 2),),
    "several": ((1, 2), (2, 0), (0, 1, 5), (7,)),
    "the same twice": ((0, 0), (1, 1)),
}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD)
def test_36_bad_words_are_never_completed(words: tuple[tuple[int, ...], ...]) -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16, num=100)
    tokens = check_against_oracle(oracle.lookup(table), **how, bad_words=words)
    for word in words:
        found = [tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens))]
        assert not any(found)


def test_36_bad_words_over_the_border_of_prompt_and_of_blocks() -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16, prompt=[5, 0])
    tokens = check_against_oracle(oracle.lookup(table), **how, bad_words=((0, 1), (2, 0)))
    assert tokens[0] != 1


def test_36_control_rules_that_reach_only_some_tokens_are_caught() -> None:
    table = looping_table()
    how: dict[str, Any] = dict(target=lambda: TableRuntime(table), vocab_size=16)
    for params in ({"logit_bias": {1: -100}}, {"bad_words": ((1, 2),)}):
        with pytest.raises(AssertionError):
            check_against_oracle(oracle.lookup(table), **how, use={}, **params)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_36_a_processor_sees_every_committed_prefix_once_and_in_order(
    name: str, temperature: float
) -> None:
    table = random_table(16, seed=4)
    params: dict[str, Any] = dict(temperature=temperature, seed=5, max_new_tokens=NUM)
    text = PROMPT + serve(TableRuntime(table)).generate(PROMPT, **params).tokens
    seen: list[list[int]] = []

    def record(ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(ids))
        return logits

    method = methods(text, 16)[name]
    llm = serve(TableRuntime(table), method)
    assert PROMPT + llm.generate(PROMPT, processors=(record,), **params).tokens == text
    assert seen[:NUM] == [text[:i] for i in range(len(PROMPT), len(text))]
    # Rows behind the last delivered token may be looked at, but are never committed.
    assert all(ids[: len(text)] == text for ids in seen[NUM:])


@pytest.mark.parametrize("name", METHODS)
def test_36_a_processor_decides(name: str) -> None:
    def only_even(ids: Sequence[int], logits: Tensor) -> Tensor:
        logits[1 - len(ids) % 2 :: 2] = -torch.inf
        return logits

    table = looping_table()
    rows = oracle.lookup(table)

    def right_logits(ids: list[int]) -> Any:
        row = rows(ids).copy()
        row[1 - len(ids) % 2 :: 2] = -np.inf
        return row

    right = oracle.greedy(right_logits, PROMPT, max_new_tokens=NUM)
    llm = serve(TableRuntime(table), methods(PROMPT + right.tokens, 16)[name])
    result = llm.generate(PROMPT, max_new_tokens=NUM, processors=(only_even,))
    oracle.assert_same(result.tokens, right)


# 38: several choices


def check_choices(result: Result, *, prompt: Sequence[int], n: int) -> None:
    assert [choice.index for choice in result.choices] == list(range(n))
    assert result.stats.prompt_tokens == len(prompt)
    delivered = [len(choice.tokens) for choice in result.choices]
    assert result.stats.completion_tokens == sum(delivered)
    assert [choice.stats.completion_tokens for choice in result.choices] == delivered
    assert result.text == result.choices[0].text and result.tokens == result.choices[0].tokens


@pytest.mark.parametrize("method", ["plain", "lookup", "drawn"])
def test_38_three_choices_differ_repeat_and_stop_on_their_own(method: str) -> None:
    table = random_table(16, seed=4)
    end = 9
    how: Any = Drawn(random_table(16, seed=5), branching=(2, 2)) if method == "drawn" else method
    params: dict[str, Any] = dict(n=3, temperature=1.0, seed=7, max_new_tokens=60)
    results = [
        serve(TableRuntime(table), how, eos_ids=[end]).generate(PROMPT, **params) for _ in range(2)
    ]
    for result in results:
        check_choices(result, prompt=PROMPT, n=3)
    texts = [choice.tokens for choice in results[0].choices]
    assert texts == [choice.tokens for choice in results[1].choices]
    assert len({tuple(text) for text in texts}) == 3
    assert len({len(text) for text in texts}) > 1
    for choice in results[0].choices:
        stopped = choice.tokens[-1] == end
        assert choice.finish_reason == ("stop" if stopped else "length")
        assert end not in choice.tokens[:-1] and (stopped or len(choice.tokens) == 60)
        alone = serve(TableRuntime(table), how, eos_ids=[end]).generate(
            PROMPT, **params | {"n": 1, "seed": choice.seed}
        )
        assert alone.tokens == choice.tokens


def test_38_choices_are_independent_draws() -> None:
    p = [0.5, 0.3, 0.2]
    llm = serve(TableRuntime(probs_table([p])))
    counts = np.zeros((3, 3))
    for seed in range(1500):
        result = llm.generate([0], n=2, temperature=1.0, seed=seed, max_new_tokens=1)
        counts[tuple(choice.tokens[0] for choice in result.choices)] += 1
    oracle.assert_distribution(counts, np.outer(p, p))


def test_38_greedy_choices_are_equal() -> None:
    result = serve(TableRuntime(looping_table()), "lookup").generate(
        PROMPT, n=3, max_new_tokens=NUM
    )
    check_choices(result, prompt=PROMPT, n=3)
    assert result.choices[0].tokens == result.choices[1].tokens == result.choices[2].tokens


def test_38_a_stream_says_which_choice_a_piece_belongs_to() -> None:
    llm = serve(TableRuntime(random_table(16, seed=4)), "lookup")
    params: dict[str, Any] = dict(n=3, temperature=1.0, seed=7, max_new_tokens=20)
    pieces = list(llm.stream(PROMPT, **params))
    result = pieces[-1].result
    assert result is not None and all(piece.result is None for piece in pieces[:-1])
    check_choices(result, prompt=PROMPT, n=3)
    for choice in result.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert [token for piece in own for token in piece.tokens] == choice.tokens
        assert [piece.finish_reason is not None for piece in own] == [False] * (len(own) - 1) + [
            True
        ]


def test_38_control_a_prompt_that_is_counted_thrice_is_caught() -> None:
    result = serve(TableRuntime(looping_table())).generate(PROMPT, n=3, max_new_tokens=4)
    wrong = dataclasses.replace(result.stats, prompt_tokens=9)
    with pytest.raises(AssertionError):
        check_choices(dataclasses.replace(result, stats=wrong), prompt=PROMPT, n=3)


# 40: settings are refused or have an effect (their ranges: test_sampling.py)


@pytest.mark.parametrize(
    "params",
    [
        {"num_beams": 4},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -5},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"logit_bias": {16: 1.0}},
        {"stop_token_ids": (16,)},
        {"bad_words": ((3, 16),)},
        {"min_tokens": 9, "max_new_tokens": 8},
        {"stop": ("x",)},  # there is no tokenizer
    ],
    ids=str,
)
def test_40_a_bad_request_names_the_field_and_runs_nothing(params: dict[str, Any]) -> None:
    runtime = TableRuntime(looping_table())
    llm = serve(runtime, "lookup")
    with pytest.raises(InvalidRequest, match=next(iter(params))):
        llm.generate(PROMPT, **params)
    with pytest.raises(InvalidRequest):
        list(llm.stream(PROMPT, **params))
    assert runtime.num_forwards == 0
    assert llm.generate(PROMPT, max_new_tokens=3).tokens == [1, 2, 0]


@pytest.mark.parametrize("prompt", [[], [16], [-1], [0] * 300])
def test_40_a_bad_prompt_runs_nothing(prompt: list[int]) -> None:
    runtime = TableRuntime(looping_table())
    with pytest.raises(InvalidRequest):
        serve(runtime).generate(prompt)
    assert runtime.num_forwards == 0


def ban_nine(ids: Sequence[int], logits: Tensor) -> Tensor:
    logits[9] = -torch.inf
    return logits


HOT: dict[str, Any] = {"temperature": 1.0}
# field -> (what stands beside it, a value that changes the outcome)
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "max_new_tokens": ({}, 7),
    "temperature": ({}, 1.0),
    "top_k": (HOT, 1),
    "top_p": (HOT, 0.1),
    "min_p": (HOT, 0.9),
    "repetition_penalty": ({}, 1.5),
    "presence_penalty": ({}, 2.0),
    "frequency_penalty": ({}, 2.0),
    "logit_bias": ({}, {9: 100.0}),
    "bad_words": ({}, ((0, 1),)),
    "min_tokens": ({"stop_token_ids": (1,)}, 9),
    "seed": (HOT, 12),
    "n": ({}, 2),
    "stop": ({}, ("2",)),
    "stop_token_ids": ({}, (2,)),
    "ignore_eos": ({"logit_bias": {15: 100.0}}, True),
    "include_stop": ({"stop": ("2",)}, True),
    "logprobs": ({}, 2),
    "acceptance": (HOT, "rejection"),
    "typical_threshold": (HOT | {"acceptance": "typical"}, 0.0),
    "typical_alpha": (HOT | {"acceptance": "typical", "typical_threshold": 0.9}, 0.01),
    "processors": (HOT, (ban_nine,)),
}


def test_40_every_field_has_an_effect_to_show() -> None:
    assert set(EFFECTS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", EFFECTS)
def test_40_what_is_accepted_has_an_effect(name: str) -> None:
    beside, value = EFFECTS[name]
    draft = Drawn(looping_table().flip(0), branching=(2, 2))

    def outcome(**params: Any) -> Any:
        llm = serve(
            TableRuntime(looping_table()), draft, tokenizer=byte_tokenizer(16), eos_ids=(15,)
        )
        result = llm.generate(PROMPT, **{"max_new_tokens": 30, "seed": 11} | beside | params)
        return [(choice.text, choice.tokens, choice.logprobs) for choice in result.choices]

    assert outcome() == outcome()
    assert outcome(**{name: value}) != outcome()


def test_07_lossy_acceptance_is_named_in_the_result() -> None:
    llm = serve(TableRuntime(looping_table()), "lookup")
    for acceptance, exact in {"coupled": True, "rejection": True, "typical": False}.items():
        result = llm.generate(PROMPT, acceptance=acceptance, temperature=1.0, max_new_tokens=4)
        assert result.exact is exact and result.stats.exact is exact
