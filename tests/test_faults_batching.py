"""Faults of group H, and 38: rows that accept different numbers of tokens, several choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from kit_runtime import PATHS, poison
from scripted import Bushy, HalfRight, Scripted
from tiny import FAMILIES, VOCAB, TableRuntime, build, probs_table, serve, shared

from outpace.engine import Engine, Event, Request
from outpace.llm import LLM
from outpace.proposers.base import Method
from outpace.runtimes.transformers import TransformersRuntime
from outpace.sampling import SamplingParams

NUM = 20
LENGTHS = (1, 5, 9, 30)
ACCEPTED = ([0], [1], [4], [8])  # per step, of drafts of eight


def prompt_of(length: int) -> list[int]:
    return [(length + 7 * i) % VOCAB for i in range(length)]


PROMPTS = [prompt_of(length) for length in LENGTHS]


def ragged(texts: Sequence[Sequence[int]]) -> list[Method]:
    """A drafter a row: none, one, four, eight tokens of it are right."""
    return [
        HalfRight(text, rights=rights, vocab_size=VOCAB, k=8)
        for text, rights in zip(texts, ACCEPTED, strict=True)
    ]


def run(engine: Engine, methods: Sequence[Method], nums: Sequence[int]) -> list[list[int]]:
    """All prompts side by side, each with its own method and budget."""
    for number, (prompt, method, num) in enumerate(zip(PROMPTS, methods, nums, strict=True)):
        params = SamplingParams(max_new_tokens=num)
        engine.add(Request(id=number, prompt=prompt, params=params, seed=0, method=method))
    texts: list[list[int]] = [[] for _ in PROMPTS]
    steps: list[list[Event]] = []
    while engine.busy:
        steps.append(engine.step())
        for event in steps[-1]:
            texts[event.request] += event.tokens
    assert any(len({len(e.tokens) for e in step}) > 2 for step in steps), "rows were not ragged"
    return texts


def check_rows(family: str, engine: Engine, nums: Sequence[int] = (NUM,) * 4) -> None:
    logits = oracle.recompute(shared(family))
    rights = [
        oracle.greedy(logits, prompt, max_new_tokens=num)
        for prompt, num in zip(PROMPTS, nums, strict=True)
    ]
    texts = [[*prompt, *right.tokens] for prompt, right in zip(PROMPTS, rights, strict=True)]
    for tokens, right in zip(run(engine, ragged(texts), nums), rights, strict=True):
        oracle.assert_same(tokens, right)


def engine_of(family: str) -> Engine:
    runtime = TransformersRuntime(shared(family), exactness="ordinary")
    assert runtime.mode == ("paths" if family in PATHS else "tree"), "the guard fell back"
    return Engine(runtime)


@pytest.mark.parametrize("family", FAMILIES)
def test_43_each_row_is_its_solo_run(family: str) -> None:
    check_rows(family, engine_of(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "bloom"])
def test_43_rows_that_end_early_leave_the_others_alone(family: str) -> None:
    check_rows(family, engine_of(family), nums=(3, 20, 1, 12))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "bloom", "mixtral"])
def test_43_rejected_slots_may_hold_anything(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, poisoned = TransformersRuntime.forward, []

    def into_poison(self: TransformersRuntime, batch: Any) -> Any:
        poison(self, 1e4)
        poisoned.append(len(batch))
        return forward(self, batch)

    engine = engine_of(family)
    monkeypatch.setattr(TransformersRuntime, "forward", into_poison)
    check_rows(family, engine)
    assert max(poisoned) == 4


def test_43_control_poison_that_is_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    forward = TransformersRuntime.forward

    def into_poison(self: TransformersRuntime, batch: Any) -> Any:
        cut = {s: state.tokens.pop() for s, state in self._sequences.items() if state.tokens}
        poison(self, 1e4)  # the newest committed key too
        for sequence, token in cut.items():
            self._sequences[sequence].tokens.append(token)
        return forward(self, batch)

    monkeypatch.setattr(TransformersRuntime, "forward", into_poison)
    with pytest.raises(AssertionError):
        check_rows("llama", engine)


def test_43_control_one_start_for_all_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    run_model = TransformersRuntime._run

    def as_the_first(self: Any, plan: Any, ids: Any, positions: Any, *rest: Any) -> Any:
        moved = [[p - row[0] + positions[0][0] for p in row] for row in positions]
        return run_model(self, plan, ids, moved, *rest)

    monkeypatch.setattr(TransformersRuntime, "_run", as_the_first)
    with pytest.raises(AssertionError):
        check_rows("llama", engine)


@pytest.mark.parametrize("method", ["plain", "lookup", "lookahead", "combined"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_43_generate_batch_equals_generate(method: str, params: dict[str, Any]) -> None:
    llm = serve(shared("llama"), method)
    solo = [llm.generate(p, max_new_tokens=NUM, **params).tokens for p in PROMPTS]
    results = llm.generate_batch(PROMPTS, max_new_tokens=NUM, **params)
    assert [result.tokens for result in results] == solo
    assert [result.stats.completion_tokens for result in results] == [NUM] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_43_same_shapes_give_every_row_its_solo_bits(dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype, max_position_embeddings=1024)
    runtime = TransformersRuntime(model, exactness="same-shape")
    llm = LLM.from_runtime(runtime, method=Scripted(lambda *_: []))
    prompts = [*PROMPTS, prompt_of(120), prompt_of(130)]  # in another bucket of keys
    params: dict[str, Any] = dict(max_new_tokens=12, logprobs=2)
    texts = [[*p, *llm.generate(p, **params).tokens] for p in prompts]
    method = Bushy(*texts, rights=[2, 0, 3], vocab_size=VOCAB)
    for prompt, result in zip(
        prompts, llm.with_method(method).generate_batch(prompts, **params), strict=True
    ):
        assert result.choices[0].logprobs == llm.generate(prompt, **params).choices[0].logprobs


# 38: several choices


def test_38_choices_stop_on_their_own_and_are_summed_up() -> None:
    llm = serve(TableRuntime(probs_table([[0.1, 0.3, 0.3, 0.3]])), "lookup", eos_ids=[0])
    how: dict[str, Any] = dict(n=3, temperature=1.0, seed=7, max_new_tokens=40)
    result = llm.generate([1, 2, 3], **how)
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    lengths = [len(choice.tokens) for choice in result.choices]
    assert len(set(lengths)) > 1, "they ended at different tokens"
    for choice in result.choices:
        assert choice.finish_reason == ("stop" if choice.tokens[-1] == 0 else "length")
        assert 0 not in choice.tokens[:-1]
    assert result.stats.completion_tokens == sum(lengths)
    assert result.stats.prompt_tokens == 3
    again = llm.generate([1, 2, 3], **how)
    assert [c.tokens for c in again.choices] == [c.tokens for c in result.choices]
    pieces = list(llm.stream([1, 2, 3], **how))
    for index, choice in enumerate(result.choices):
        streamed = [token for piece in pieces if piece.index == index for token in piece.tokens]
        assert streamed == choice.tokens


def test_38_greedy_choices_are_equal() -> None:
    llm = serve(shared("llama"), "lookahead")
    result = llm.generate(PROMPTS[2], n=3, max_new_tokens=NUM)
    right = oracle.greedy(oracle.recompute(shared("llama")), PROMPTS[2], max_new_tokens=NUM)
    for choice in result.choices:
        oracle.assert_same(choice.tokens, right)
