"""Faults of group C: stopping and streaming. The numbers are the issue list's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from scripted import AlwaysWrong, Bushy, Empty, HalfRight, Perfect, Script, Scripted
from tiny import PlannedRuntime, TableRuntime, byte_tokenizer, serve, shared

from outpace.llm import LLM, Result
from outpace.proposers.base import Method

VOCAB = 64
PROMPT = [1, 2, 3]
PLAN = list(range(10, 50))  # no token comes twice
DRAFTERS: dict[str, Callable[..., Method | str]] = {
    "plain": lambda *_: "plain",
    "perfect": lambda text, k: Perfect(text, k=k),
    "half-right": lambda text, k: HalfRight(text, rights=range(k + 1), vocab_size=VOCAB, k=k),
    "bushy": lambda text, k: Bushy(text, rights=[k, 1, 0, 2], vocab_size=VOCAB),
    "always wrong": lambda text, k: AlwaysWrong(text, vocab_size=VOCAB, k=k),
    "empty": lambda *_: Empty(),
}
drafters = pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)


def planned(plan: Sequence[int] = PLAN, **how: Any) -> PlannedRuntime:
    return PlannedRuntime(plan, **{"num_prompt": len(PROMPT), "vocab_size": VOCAB} | how)


def check(result: Result, tokens: Sequence[int], reason: str, *, text: str | None = None) -> None:
    assert list(result.tokens) == list(tokens)
    assert result.finish_reason == reason
    assert result.stats.completion_tokens == len(tokens)
    if text is not None:
        assert result.text == text


def claiming(result: Result, tokens: Sequence[int]) -> Result:
    """The same result with other ids: for controls."""
    choice = dataclasses.replace(result.choices[0], tokens=list(tokens))
    return dataclasses.replace(result, choices=(choice,))


def streamed(llm: LLM, prompt: Any, **params: Any) -> Result:
    """Streams, and checks the pieces against the result that the last one carries."""
    pieces = list(llm.stream(prompt, **params))
    result = pieces[-1].result
    assert [token for piece in pieces for token in piece.tokens] == list(result.tokens)
    assert "".join(piece.text for piece in pieces) == result.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == result.finish_reason
    return result


# 14: an end token in the middle of a block


@drafters
@pytest.mark.parametrize("index", range(17))
def test_14_the_end_token_ends_the_text_at_every_index(
    drafter: Callable[..., Method | str], index: int
) -> None:
    method = drafter(PROMPT + PLAN, 7)  # blocks of eight
    runtime = planned()
    llm = serve(runtime, method, tokenizer=byte_tokenizer(VOCAB), eos_ids=[PLAN[index]])
    right = PLAN[: index + 1]
    text = "".join(chr(48 + token) for token in PLAN[:index])
    check(llm.generate(PROMPT), right, "stop", text=text)
    check(streamed(llm, PROMPT), right, "stop", text=text)
    assert runtime.tokens(0) == PROMPT + right[:-1], "the cache holds what was delivered"
    check(llm.generate(PROMPT, ignore_eos=True, max_new_tokens=20), PLAN[:20], "length")
    check(llm.generate(PROMPT), right, "stop", text=text)


@pytest.mark.parametrize("index", range(9))
def test_14_blocks_are_really_cut(index: int) -> None:
    method = Perfect(PROMPT + PLAN, k=7)
    stats = serve(planned(), method, eos_ids=[PLAN[index]]).generate(PROMPT).stats
    assert stats.steps == index // 8 + 1
    assert stats.accepted == min(index + 1, 7) + (index == 8)


def test_14_control_a_block_appended_whole_is_caught() -> None:
    result = serve(planned(), Perfect(PROMPT + PLAN, k=7), eos_ids=[PLAN[3]]).generate(PROMPT)
    broken = claiming(result, PLAN[:8])
    with pytest.raises(AssertionError):
        check(broken, PLAN[:4], "stop")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_14_retro_fitted_to_a_real_model(temperature: float) -> None:
    model = shared("llama")
    params: dict[str, Any] = dict(temperature=temperature, seed=3)
    text = serve(model).generate(PROMPT, max_new_tokens=24, **params).tokens
    llm = serve(model, Perfect(PROMPT + text, k=7))
    for index, token in enumerate(text):
        right = text[: text.index(token) + 1]
        check(llm.generate(PROMPT, stop_token_ids=(token,), **params), right, "stop")
        assert llm.generate(PROMPT, max_new_tokens=index + 1, **params).tokens == text[: index + 1]


# 16: the token budget

LOOP = [5, 6, 7]


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
@pytest.mark.parametrize("name", ["plain", "perfect", "half-right", "always wrong", "lookup"])
def test_16_exactly_the_budget(name: str, max_new_tokens: int) -> None:
    prompt, plan = LOOP * 6, LOOP * 10
    method = name if name == "lookup" else DRAFTERS[name](prompt + plan, 8)
    llm = serve(planned(plan, num_prompt=18), method)
    check(llm.generate(prompt, max_new_tokens=max_new_tokens), plan[:max_new_tokens], "length")
    check(streamed(llm, prompt, max_new_tokens=max_new_tokens), plan[:max_new_tokens], "length")
    if isinstance(method, Scripted):
        steps = method.steps
        assert steps[0][0] == max_new_tokens - 1
        for outcome, (depth, _) in zip(
            [o for o in method.outcomes if o.tokens], steps, strict=False
        ):
            assert len(outcome.tokens) <= depth + 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_16_a_budget_of_nothing_runs_nothing(name: str) -> None:
    runtime = planned()
    llm = serve(runtime, DRAFTERS[name](PROMPT + PLAN, 8))
    check(llm.generate(PROMPT, max_new_tokens=0), [], "length")
    assert runtime.num_forwards == 0


def test_16_control_an_overshot_block_is_caught() -> None:
    result = serve(planned()).generate(PROMPT, max_new_tokens=5)
    with pytest.raises(AssertionError):
        check(claiming(result, PLAN[:9]), PLAN[:5], "length")
    with pytest.raises(AssertionError):  # delivered less than usage says
        check(claiming(result, PLAN[:4]), PLAN[:4], "length")


# 17: stop strings

TEXT = "".join(chr(48 + token) for token in PLAN)


def check_stop_string(
    drafter: Callable[..., Method | str], k: int, start: int, end: int, **params: Any
) -> None:
    """The stop string TEXT[start:end] ends the text, its ids, its logprobs and its cache."""
    runtime = planned()
    llm = serve(runtime, drafter(PROMPT + PLAN, k), tokenizer=byte_tokenizer(VOCAB))
    params = {"stop": (TEXT[start:end],), "logprobs": 1, **params}
    text = TEXT[: end if params.get("include_stop") else start]
    for result in (llm.generate(PROMPT, **params), streamed(llm, PROMPT, **params)):
        check(result, PLAN[:end], "stop", text=text)
        assert [entry.token for entry in result.logprobs] == PLAN[:end]
    assert runtime.tokens(0) == PROMPT + PLAN[: end - 1]


@drafters
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("end", [1, 2, 8, 16, 17, 18, 30])
def test_17_a_stop_string_is_found_wherever_it_ends_in_a_block(
    drafter: Callable[..., Method | str], end: int, include_stop: bool
) -> None:
    for size in {1, min(2, end), min(5, end)}:
        check_stop_string(drafter, 16, end - size, end, include_stop=include_stop)


@drafters
def test_17_a_stop_string_over_the_border_of_blocks(drafter: Callable[..., Method | str]) -> None:
    for k in (1, 2, 3):
        check_stop_string(drafter, k, 2, 9)


@drafters
def test_17_the_prompt_is_not_searched(drafter: Callable[..., Method | str]) -> None:
    llm = serve(planned(), drafter(PROMPT + PLAN, 8), tokenizer=byte_tokenizer(VOCAB))
    prompt_text = "".join(chr(48 + token) for token in PROMPT)
    stops = (prompt_text, prompt_text[-1] + TEXT[0], prompt_text[-1])
    result = llm.generate(PROMPT, stop=stops, max_new_tokens=20)
    check(result, PLAN[:20], "length", text=TEXT[:20])


@drafters
def test_17_the_first_of_several_stop_strings_wins(drafter: Callable[..., Method | str]) -> None:
    llm = serve(planned(), drafter(PROMPT + PLAN, 8), tokenizer=byte_tokenizer(VOCAB))
    stops = (TEXT[9:12], TEXT[4:6], TEXT[20])
    check(llm.generate(PROMPT, stop=stops), PLAN[:6], "stop", text=TEXT[:4])
    inside = (TEXT[2:9], TEXT[4:6])  # the longer one starts earlier, but is complete later
    check(llm.generate(PROMPT, stop=inside), PLAN[:6], "stop", text=TEXT[:4])


@drafters
def test_17_a_beginning_that_comes_to_nothing_is_delivered(
    drafter: Callable[..., Method | str],
) -> None:
    plan = [ord(c) - 48 for c in "AAAABAAC"]
    runtime = planned(plan)
    llm = serve(runtime, drafter(PROMPT + plan, 3), tokenizer=byte_tokenizer(VOCAB))
    for stop, right in {"AAB": "AA", "AAAAA": None, "AAC": "AAAAB", "ACX": None}.items():
        result = streamed(llm, PROMPT, stop=(stop,), max_new_tokens=8)
        if right is None:
            check(result, plan, "length", text="AAAABAAC")
        else:
            check(result, plan[: len(right) + 3], "stop", text=right)


def test_17_control_text_that_is_cut_without_its_ids_is_caught() -> None:
    llm = serve(planned(), Perfect(PROMPT + PLAN, k=16), tokenizer=byte_tokenizer(VOCAB))
    result = llm.generate(PROMPT, stop=(TEXT[5:7],))
    with pytest.raises(AssertionError):
        check(claiming(result, PLAN[:17]), PLAN[:7], "stop", text=TEXT[:5])


def test_17_logprobs_are_of_the_raw_distribution_under_every_drafter() -> None:
    model = shared("llama")
    logits = oracle.recompute(model)
    params: dict[str, Any] = dict(temperature=0.7, top_k=5, seed=1, max_new_tokens=20, logprobs=3)
    text = PROMPT + serve(model).generate(PROMPT, **params).tokens
    for drafter in DRAFTERS.values():
        result = serve(model, drafter(text, 7)).generate(PROMPT, **params)
        assert PROMPT + result.tokens == text and len(result.logprobs) == 20
        for i, entry in enumerate(result.logprobs):
            row = np.log(oracle.softmax(logits(text[: len(PROMPT) + i])))
            best = np.argsort(-row)[:3]
            assert abs(entry.logprob - row[entry.token]) < 1e-3
            assert [token for token, _ in entry.top] == best.tolist()
            assert np.allclose([value for _, value in entry.top], row[best], atol=1e-3)


def test_17_more_alternatives_than_there_are_tokens() -> None:
    result = serve(planned()).generate(PROMPT, max_new_tokens=2, logprobs=100)
    for entry in result.logprobs:
        assert sorted(token for token, _ in entry.top) == list(range(VOCAB))


# 20: min_tokens

END = 63


def eager_to_end() -> TableRuntime:
    """After token t it wants END first, then t + 1."""
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % (VOCAB - 1)] = 5.0
    table[:, END] = 9.0
    return TableRuntime(table)


def min_tokens_drafters() -> dict[str, Method | str]:
    text = [*PROMPT, 4, 5, 6, 7, END, 0]
    return {name: drafter(text, 8) for name, drafter in DRAFTERS.items()} | {
        "only ends": Script(*[[END] * 8] * 9),
        "ends too early": Script([4, 5, END, 6], [END, 7], [7, END]),
        "ends too late": Script([4, 5, 6, 7, 8, 9, END]),
    }


@pytest.mark.parametrize("name", min_tokens_drafters())
@pytest.mark.parametrize("stop_by", ["eos_ids", "stop_token_ids"])
def test_20_exactly_min_tokens_other_tokens_then_the_end(name: str, stop_by: str) -> None:
    runtime = eager_to_end()
    how: dict[str, Any] = {stop_by: (END,)}
    llm = serve(runtime, min_tokens_drafters()[name], eos_ids=how.pop("eos_ids", ()))
    for least in (0, 1, 4, 9):
        right = oracle.greedy(
            oracle.lookup(runtime.table),
            PROMPT,
            max_new_tokens=20,
            end_ids=[END],
            min_tokens=least,
        )
        assert len(right.tokens) == least + 1
        result = llm.generate(PROMPT, min_tokens=least, max_new_tokens=20, **how)
        check(result, right.tokens, "stop")


def test_20_control_a_mask_that_is_one_row_too_long_is_caught() -> None:
    runtime = eager_to_end()
    result = serve(runtime, eos_ids=(END,)).generate(PROMPT, min_tokens=5)
    with pytest.raises(AssertionError):
        check(result, [4, 5, 6, 7, END], "stop")


@pytest.mark.parametrize("seed", range(5))
def test_20_the_same_under_a_seed(seed: int) -> None:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    table[:, END] = 4.0
    params: dict[str, Any] = dict(temperature=1.0, seed=seed, min_tokens=6, max_new_tokens=40)
    right = serve(TableRuntime(table), eos_ids=(END,)).generate(PROMPT, **params)
    assert len(right.tokens) > 6 and END not in right.tokens[:6]
    for drafter in DRAFTERS.values():
        llm = serve(TableRuntime(table), drafter(PROMPT + right.tokens, 8), eos_ids=(END,))
        check(llm.generate(PROMPT, **params), right.tokens, right.finish_reason)


@drafters
def test_20_stop_strings_are_not_looked_for_before(drafter: Callable[..., Method | str]) -> None:
    llm = serve(planned(), drafter(PROMPT + PLAN, 8), tokenizer=byte_tokenizer(VOCAB))
    params: dict[str, Any] = dict(min_tokens=6, max_new_tokens=20)
    early = llm.generate(PROMPT, stop=(TEXT[2:4],), **params)
    check(early, PLAN[:20], "length", text=TEXT[:20])
    late = llm.generate(PROMPT, stop=(TEXT[9:11],), **params)
    check(late, PLAN[:11], "stop", text=TEXT[:9])
    plain = serve(planned(), tokenizer=byte_tokenizer(VOCAB))
    for end in range(4, 9):  # around the border: one rule, whatever proposes
        right = plain.generate(PROMPT, stop=(TEXT[end - 2 : end],), **params)
        result = llm.generate(PROMPT, stop=(TEXT[end - 2 : end],), **params)
        check(result, right.tokens, right.finish_reason, text=right.text)


# 21: characters of several bytes

FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
SPOKEN = f"a\N{GRINNING FACE}\ud55c\uae00e\N{COMBINING ACUTE ACCENT}{FAMILY}z"


def speaking(data: bytes, k: int) -> LLM:
    """A model that says these bytes, one a token, in blocks of k + 1."""
    runtime = PlannedRuntime(list(data), num_prompt=3, vocab_size=256)
    return serve(runtime, Perfect(PROMPT + list(data), k=k), tokenizer=byte_tokenizer(256))


@pytest.mark.parametrize("k", range(8))
def test_21_no_chunk_breaks_a_character(k: int) -> None:
    data = SPOKEN.encode()
    for shift in range(4):  # moves every block border over every byte
        spoken = "x" * shift + SPOKEN
        llm = speaking(spoken.encode(), k)
        pieces = list(llm.stream(PROMPT, max_new_tokens=len(data) + shift))
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(piece.text for piece in pieces)
        assert "".join(piece.text for piece in pieces) == spoken


@pytest.mark.parametrize("k", [0, 3])
def test_21_the_limit_may_fall_inside_a_character(k: int) -> None:
    data = SPOKEN.encode()
    llm = speaking(data, k)
    for limit in range(1, len(data) + 1):
        result = streamed(llm, PROMPT, max_new_tokens=limit)
        check(result, list(data[:limit]), "length")
        whole = data[:limit].decode(errors="ignore")
        assert result.text.encode().decode() == result.text
        assert result.text.rstrip("\N{REPLACEMENT CHARACTER}") == whole


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize(
    "data",
    [b"ab\xff\xfecd", b"\x80\x80\x80\x80\x80\x80", b"a\xf0\x9f\x98", b"\xc3(", b"\xed\xa0\x80!"],
)
def test_21_invalid_bytes_are_replaced(data: bytes, k: int) -> None:
    result = streamed(speaking(data, k), PROMPT, max_new_tokens=len(data))
    check(result, list(data), "length")
    assert result.text == byte_tokenizer(256).decode(list(data))
    assert "\N{REPLACEMENT CHARACTER}" in result.text


STOPS = [
    "\ud55c",
    "\uae00e",
    "\N{GRINNING FACE}",
    "\N{COMBINING ACUTE ACCENT}",
    FAMILY,
    FAMILY[1:4],
]


def check_stop_of_bytes(spoken: str, stop: str, k: int, **params: Any) -> None:
    """Found at the byte that completes it, if that one comes behind `min_tokens`."""
    data = spoken.encode()
    at = spoken.index(stop)
    end = len(spoken[:at].encode()) + len(stop.encode())
    for least in (0, end - 1, end):
        result = streamed(speaking(data, k), PROMPT, stop=(stop,), min_tokens=least, **params)
        if least == end:
            check(result, list(data), "length", text=spoken)
        else:
            text = spoken[: at + len(stop) if params.get("include_stop") else at]
            check(result, list(data[:end]), "stop", text=text)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 7])
def test_21_a_stop_string_of_several_bytes_over_every_border(k: int, stop: str) -> None:
    for shift in range(4):
        spoken = "x" * shift + SPOKEN
        for include_stop in (False, True):
            num = len(spoken.encode())
            check_stop_of_bytes(spoken, stop, k, include_stop=include_stop, max_new_tokens=num)


def test_21_control_a_stop_string_that_is_sought_token_by_token_is_missed() -> None:
    tokenizer = byte_tokenizer(256)
    texts = [tokenizer.decode([token]) for token in SPOKEN.encode()]
    assert not any(stop in "".join(texts) for stop in STOPS)


def test_21_a_long_run_of_invalid_bytes_does_not_stall_the_stream() -> None:
    data = b"ok" + b"\x80" * 40 + b"end"
    pieces = list(speaking(data, 0).stream(PROMPT, max_new_tokens=len(data)))
    assert "".join(piece.text for piece in pieces).endswith("end")
    delivered = [i for i, piece in enumerate(pieces) if piece.text]
    assert delivered[:2] == [0, 1] and len(delivered) >= 4, "text was held back"


def test_21_control_decoding_token_by_token_breaks_characters() -> None:
    tokenizer = byte_tokenizer(256)
    text = "".join(tokenizer.decode([token]) for token in SPOKEN.encode())
    assert "\N{REPLACEMENT CHARACTER}" in text
