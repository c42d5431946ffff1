"""The faults' right values on the native runtime: every method, to the bit, to every end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from kit_runtime import text_of
from native_kit import native, original, packed_of
from scripted import Bushy, HalfRight, Perfect
from test_exactness import METHODS, PROCESSED, SEEDED
from test_faults_batching import ACCEPTED, LENGTHS
from tiny import VOCAB, byte_tokenizer

from outpace.engine import Engine, Request
from outpace.errors import InvalidRequest
from outpace.llm import LLM
from outpace.proposers.base import Method
from outpace.proposers.plain import Plain
from outpace.runtimes.base import Output, Pass
from outpace.runtimes.native import NativeRuntime, kernel_names
from outpace.sampling import SamplingParams
from outpace.text import Tokenizer
from outpace.tree import Tree

pytestmark = pytest.mark.skipif(not kernel_names(), reason="built without a compiler")

Start = Callable[[LLM, Any, Sequence[int]], LLM]
methods = pytest.mark.parametrize("start", METHODS.values(), ids=METHODS)
NUM = 24
PROMPTS = [[5, 6, 7] * 6, [11], [(3 + 13 * i) % VOCAB for i in range(21)]]
HOW: list[dict[str, Any]] = [{}, *SEEDED, *PROCESSED]


@cache
def plain_of(name: str) -> LLM:
    return LLM.from_runtime(native(name), method=Plain())


@methods
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_every_method_gives_plain_decodings_ids(name: str, start: Start) -> None:
    llm = plain_of(name)
    drafted = 0
    for i, params in enumerate(HOW):
        prompt = PROMPTS[i % 3]
        right = llm.generate(prompt, max_new_tokens=NUM, **params)
        fast = start(llm, None, prompt + right.tokens)
        result = fast.generate(prompt, max_new_tokens=NUM, logprobs=2, **params)
        assert result.tokens == right.tokens
        alone = llm.generate(prompt, max_new_tokens=NUM, logprobs=2, **params)
        assert result.logprobs == alone.logprobs, "the same bits, whatever ran beside"
        drafted += result.stats.drafted
    assert drafted > 0 or start is METHODS["plain"]


@methods
def test_14_16_a_text_ends_at_every_index_of_a_block(start: Start) -> None:
    llm = plain_of("llama")
    for prompt, params in zip(PROMPTS, [{}, *SEEDED[:2]], strict=True):
        text = llm.generate(prompt, max_new_tokens=12, **params).tokens
        fast = start(llm, None, prompt + text)
        for index, token in enumerate(text):
            right = text[: text.index(token) + 1]
            stopped = fast.generate(prompt, stop_token_ids=(token,), max_new_tokens=12, **params)
            assert (stopped.tokens, stopped.finish_reason) == (right, "stop")
            cut = fast.generate(prompt, max_new_tokens=index, **params)
            assert (cut.tokens, cut.finish_reason) == (text[:index], "length")


def test_17_what_a_stop_string_cuts_off_is_not_cached() -> None:
    runtime = native()
    tokenizer = Tokenizer(byte_tokenizer(VOCAB))
    llm = LLM.from_runtime(runtime, method=Plain(), tokenizer=tokenizer)
    prompt = PROMPTS[2]
    text = llm.generate(prompt, max_new_tokens=16).tokens
    for end in (1, 4, 8, 9):
        stop = "".join(chr(48 + token) for token in text[max(end - 3, 0) : end])
        fast = llm.with_method(Perfect(prompt + text, k=7))
        result = fast.generate(prompt, stop=[stop], max_new_tokens=16)
        assert result.tokens == text[:end] and result.finish_reason == "stop"
        assert list(runtime.tokens(0)) == prompt + text[: end - 1]


@methods
def test_41_the_contexts_last_token(start: Start) -> None:
    runtime = NativeRuntime(packed_of(original("llama"), max_position_embeddings=64), threads=2)
    llm = LLM.from_runtime(runtime, method=Plain())
    for length in (55, 59, 62, 63, 64):
        prompt = text_of(length)
        right = llm.generate(prompt)
        assert (len(right.tokens), right.finish_reason) == (64 - length, "length")
        fast = start(llm, None, prompt + right.tokens)
        assert fast.generate(prompt).tokens == right.tokens
    with pytest.raises(InvalidRequest, match="the prompt has 65 tokens, the model's context is 64"):
        llm.generate(text_of(65))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_43_rows_that_accept_other_numbers_have_their_solo_bits(name: str) -> None:
    llm = plain_of(name)
    prompts = [[(n + 7 * i) % VOCAB for i in range(n)] for n in (*LENGTHS, 300)]
    texts = [p + llm.generate(p, max_new_tokens=NUM).tokens for p in prompts]
    rights = (*ACCEPTED, [3, 0])
    drafters: list[Method] = [
        HalfRight(text, rights=right, vocab_size=VOCAB, k=8)
        for text, right in zip(texts, rights, strict=True)
    ]
    drafters[2] = Bushy(texts[2], rights=[4, 1], vocab_size=VOCAB)
    engine = Engine(native(name))
    for number, (prompt, method) in enumerate(zip(prompts, drafters, strict=True)):
        params = SamplingParams(max_new_tokens=NUM)
        engine.add(Request(id=number, prompt=prompt, params=params, seed=0, method=method))
    found: list[list[int]] = [list(prompt) for prompt in prompts]
    sizes = set()
    while engine.busy:
        events = engine.step()
        sizes.add(len({len(event.tokens) for event in events}))
        for event in events:
            found[event.request] += event.tokens
    assert found == texts
    assert max(sizes) > 2, "rows were not ragged"


@pytest.mark.parametrize("left", [0, 1, 9, 256, 299])
def test_12_what_is_rolled_back_leaves_no_trace(left: int) -> None:
    llm = LLM.from_runtime(native(), method=Plain())
    text = text_of(300)
    llm.generate(text, max_new_tokens=8)
    other = [*text[:left], 60, 61, 62]
    result = llm.generate(other, max_new_tokens=NUM, logprobs=1)
    assert result.stats.reused_tokens == min(left, len(other) - 1)
    cold = LLM.from_runtime(native(), method=Plain())
    assert result.logprobs == cold.generate(other, max_new_tokens=NUM, logprobs=1).logprobs


def test_56_logits_are_computed_where_somebody_reads_them() -> None:
    runtime = native()
    rows: list[int] = []
    inner = runtime._native

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def forward(self, caches: Any, counts: Any, *arrays: Any) -> None:
            rows.append(len(arrays[2]))
            assert len(arrays[3]) == len(arrays[2])
            inner.forward(caches, counts, *arrays)

    runtime._native = Watched()  # type: ignore[assignment]
    llm = LLM.from_runtime(runtime, method=Plain())
    prompt = text_of(600)  # three pieces
    text = llm.generate(prompt, max_new_tokens=16).tokens
    assert rows == [0, 0, 0] + [1] * 16
    rows.clear()
    fast = LLM.from_runtime(native(), method=Perfect(prompt + text, k=7))
    fast.model.runtime._native = Watched()  # type: ignore[attr-defined]
    fast.generate(prompt, max_new_tokens=16)
    assert rows == [0, 0, 0, 8, 8]


def test_56_repeated_calls_and_dropped_streams_hold_one_cache() -> None:
    runtime = native()
    llm = LLM.from_runtime(runtime, method=Plain())
    sizes = set()
    for _ in range(10):
        llm.generate(text_of(20), max_new_tokens=8)
        stream = llm.stream(text_of(20), max_new_tokens=100)
        next(stream)
        del stream
        sizes.add(runtime.memory()["cache"])
    assert len(sizes) == 1 and len(runtime._sequences) == 1


def test_01_control_a_tree_that_is_run_as_a_chain_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM.from_runtime(native(), method=Plain())
    right = llm.generate(PROMPTS[2], max_new_tokens=NUM).tokens
    fast = llm.with_method(Bushy(PROMPTS[2] + right, rights=[4, 1, 3], vocab_size=VOCAB))
    assert fast.generate(PROMPTS[2], max_new_tokens=NUM).tokens == right
    forward = NativeRuntime.forward

    def as_chains(self: NativeRuntime, batch: Sequence[Pass]) -> list[Output]:
        outputs = forward(self, [replace(w, tree=Tree.chain(w.tree.tokens)) for w in batch])
        for work in batch:
            self._sequences[work.sequence].running = work
        return outputs

    monkeypatch.setattr(NativeRuntime, "forward", as_chains)
    with pytest.raises((AssertionError, ValueError)):  # other ids, or a path that is none
        assert fast.generate(PROMPTS[2], max_new_tokens=NUM).tokens == right


def test_01_control_one_more_bit_is_seen() -> None:
    """The comparison of logprobs shows what the ids do not: another rounding of the same text."""
    model = original("llama")
    result = plain_of("llama").generate(PROMPTS[2], max_new_tokens=4, logprobs=1)
    moved = NativeRuntime(packed_of(model, rms_norm_eps=1.001e-6), threads=2)
    other = LLM.from_runtime(moved, method=Plain()).generate(
        PROMPTS[2], max_new_tokens=4, logprobs=1
    )
    assert other.tokens == result.tokens
    assert other.logprobs != result.logprobs
