"""Faults of group G: the last tokens before the context's end. The numbers are the issue list's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import oracle
import pytest
from kit_runtime import seen_inputs
from scripted import AlwaysWrong, Bushy, HalfRight, Perfect, Scripted
from tiny import VOCAB, TableRuntime, build, random_table, serve, shared
from transformers import PreTrainedModel

from outpace.errors import InvalidRequest
from outpace.llm import LLM
from outpace.proposers.base import Method, Step
from outpace.proposers.draft import Draft
from outpace.runtimes.transformers import TransformersRuntime
from outpace.tree import Tree

CONTEXT = 64
K = 16
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: build("llama", max_position_embeddings=CONTEXT),
    "gpt2": lambda: shared("gpt2"),
    "opt": lambda: shared("opt"),
    "gemma3": lambda: build("gemma3", max_position_embeddings=CONTEXT),
    "falcon-alibi": lambda: build("falcon-alibi", max_position_embeddings=CONTEXT),
}
METHODS = [
    "plain",
    "lookup",
    "lookahead",
    "combined",
    "draft",
    "perfect",
    "half-right",
    "always wrong",
    "bushy",
]


@cache
def model_of(name: str) -> PreTrainedModel:
    return MODELS[name]()


@cache
def logits_of(name: str) -> oracle.Logits:
    return oracle.recompute(model_of(name))


def prompt_of(length: int) -> list[int]:
    return [(5 + 11 * i) % VOCAB for i in range(length)]


def method_of(name: str, text: list[int]) -> Method | str:
    if name == "draft":  # a draft whose context is even shorter
        draft = build("llama", seed=1, max_position_embeddings=32)
        return Draft(runtime=TransformersRuntime(draft, exactness="ordinary"), num_tokens=K)
    made: dict[str, Method] = {
        "perfect": Perfect(text, k=K),
        "half-right": HalfRight(text, rights=[0, 3, 1], vocab_size=VOCAB, k=K),
        "always wrong": AlwaysWrong(text, vocab_size=VOCAB, k=K),
        "bushy": Bushy(text, rights=[4, 2], vocab_size=VOCAB),
    }
    return made.get(name, name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_41_generation_runs_to_the_contexts_last_token(name: str, method: str) -> None:
    plain = serve(model_of(name))
    for length in (55, 59, 62, 63, 64):
        prompt = prompt_of(length)
        right = oracle.greedy(logits_of(name), prompt, max_new_tokens=10**6, context=CONTEXT)
        llm = plain.with_method(method_of(method, [*prompt, *right.tokens]))
        result = llm.generate(prompt)
        oracle.assert_same(result.tokens, right)
        assert len(result.tokens) == CONTEXT - length, "the room left, to the last token"
        assert result.finish_reason == "length"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("length", range(55, 64))
def test_41_no_position_behind_the_end_is_read(name: str, length: int) -> None:
    model, prompt = model_of(name), prompt_of(length)
    text = serve(model).generate(prompt).tokens
    with seen_inputs(model, "position_ids") as seen:
        method = Perfect([*prompt, *text], k=K)
        result = serve(model, method).generate(prompt)
    assert result.tokens == text
    assert max(int(ids.max()) for ids in seen) == CONTEXT - 2
    assert all(depth <= CONTEXT - length - 1 for depth, _ in method.steps)


@pytest.mark.parametrize("exactness", ["ordinary", "same-shape"])
def test_41_in_every_kind_of_forward(exactness: str) -> None:
    runtime = TransformersRuntime(model_of("llama"), exactness=exactness)
    for length in (55, 60, 63):
        prompt = prompt_of(length)
        right = oracle.greedy(logits_of("llama"), prompt, max_new_tokens=99, context=CONTEXT)
        llm = LLM.from_runtime(runtime, method=Perfect([*prompt, *right.tokens], k=K))
        oracle.assert_same(llm.generate(prompt).tokens, right)


def test_41_requests_near_the_end_and_far_from_it_share_a_batch() -> None:
    model = model_of("gpt2")
    prompts = [prompt_of(length) for length in (62, 3, 64, 55)]
    for method in ("plain", "lookup", "lookahead"):
        results = serve(model, method).generate_batch(prompts)
        for prompt, result in zip(prompts, results, strict=True):
            right = oracle.greedy(logits_of("gpt2"), prompt, max_new_tokens=99, context=CONTEXT)
            oracle.assert_same(result.tokens, right)


@pytest.mark.parametrize("length", [65, 66, 200])
def test_41_a_longer_prompt_is_refused_before_any_forward(length: int) -> None:
    runtime = TableRuntime(random_table(VOCAB, seed=1), max_context=CONTEXT)
    llm = serve(runtime, "lookup")
    message = f"the prompt has {length} tokens, the model's context is 64: shorten the prompt"
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt_of(length))
    assert runtime.num_forwards == 0


def test_41_a_full_prompt_gives_no_token_and_costs_nothing() -> None:
    runtime = TableRuntime(random_table(VOCAB, seed=1), max_context=CONTEXT)
    result = serve(runtime, "lookup").generate(prompt_of(64))
    assert (result.tokens, result.finish_reason) == ([], "length")
    assert runtime.num_forwards == 0


def test_41_a_budget_beyond_the_context_is_cut_to_it() -> None:
    result = serve(model_of("gpt2")).generate(prompt_of(60), max_new_tokens=1000)
    assert len(result.tokens) == 4


def test_41_control_a_draft_that_is_not_clipped_fails_loudly() -> None:
    def greedy_for_more(step: Step, _: int) -> Tree:
        return Tree.chain([step.tokens[-1], *range(K)])

    llm = serve(model_of("gpt2"), Scripted(greedy_for_more))
    with pytest.raises(ValueError, match="does not fit"):
        llm.generate(prompt_of(60))
