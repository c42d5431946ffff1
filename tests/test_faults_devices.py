"""Faults of group N: number formats and other devices, as far as a CPU shows them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted import Bushy, HalfRight, Script
from tiny import VOCAB, TableRuntime, build, random_table, serve
from torch import Tensor

from outpace.accept import TargetRows, accept
from outpace.errors import NumericalError
from outpace.llm import LLM
from outpace.proposers.base import Method, Step
from outpace.proposers.draft import Draft
from outpace.runtimes.base import Output, Pass
from outpace.runtimes.cache import SlotCache
from outpace.runtimes.transformers import TransformersRuntime
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree

NUM = 12
PROMPT = [1, 2, 3, 4]

# 59: one request's overflow is its own


def overflowing(family: str, bad: int, **how: Any) -> LLM:
    """A model in which one token, as input, overflows; loaded before it does."""
    model = build(family, tie_word_embeddings=False, **how)
    llm = serve(model, "plain")
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = math.inf
    return llm


def check_isolated(family: str) -> None:
    """After an overflow in prefill, in decoding or in a draft, other requests have their text."""
    right = serve(build(family, tie_word_embeddings=False)).generate(PROMPT, max_new_tokens=NUM)
    bad = next(t for t in range(5, VOCAB) if t not in right.tokens)
    llm = overflowing(family, bad)
    failing: list[tuple[list[int], dict[str, Any]]] = [
        ([*PROMPT[:2], bad, 5], {}),  # shares its beginning with what follows
        (PROMPT, {"logit_bias": {bad: 100.0}}),
        ([bad], {}),
    ]
    for prompt, params in failing:
        with pytest.raises(NumericalError, match="bfloat16 or float32"):
            llm.generate(prompt, max_new_tokens=NUM, **params)
        assert llm.generate(PROMPT, max_new_tokens=NUM).tokens == right.tokens
    with pytest.raises(NumericalError):
        llm.with_method(Script([9, bad])).generate(PROMPT, max_new_tokens=NUM)
    assert llm.generate(PROMPT, max_new_tokens=NUM).tokens == right.tokens
    streams = [llm.stream(prompt, max_new_tokens=NUM) for prompt in (PROMPT, [bad, 7])]
    with pytest.raises(NumericalError):  # side by side, and the slot is used again
        next(streams[1])
    beside = [token for piece in streams[0] for token in piece.tokens]
    assert beside == right.tokens
    with pytest.raises(NumericalError):  # of these two, one slot is closed
        llm.generate_batch([[bad, *range(n, 40)] for n in (8, 9)], max_new_tokens=NUM)
    results = llm.generate_batch([PROMPT] * 3, max_new_tokens=NUM)
    assert [result.tokens for result in results] == [right.tokens] * 3


FAMILIES = ["llama", "gpt2", "mistral", "gemma3", "mixtral", "bloom"]


@pytest.mark.parametrize("family", FAMILIES)
def test_59_an_overflow_leaves_nothing_to_later_requests(family: str) -> None:
    check_isolated(family)


@pytest.mark.parametrize("by", ["rewind", "close"])
def test_59_control_keys_that_stay_in_the_slot_are_seen(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wipe = SlotCache.wipe

    def sometimes(self: SlotCache, slot: int) -> None:
        if sys._getframe(1).f_code.co_name != by:
            wipe(self, slot)

    monkeypatch.setattr(SlotCache, "wipe", sometimes)
    with pytest.raises(NumericalError):
        check_isolated("llama")


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_59_control_a_reused_beginning_is_seen(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's NaN reaches the tokens before it that ran in the same forward."""
    monkeypatch.setattr(TransformersRuntime, "_overflowed", lambda *_: False)
    with pytest.raises(NumericalError):
        check_isolated(family)


# 59: the error names the step


class Overflows(TableRuntime):
    """Gives `value` at the fifth token behind a prompt of four, whatever is drafted."""

    def __init__(self, table: Tensor, value: float) -> None:
        super().__init__(table)
        self.value = value

    def logits(self, tokens: Sequence[int]) -> Tensor:
        row = super().logits(tokens)
        if len(tokens) == len(PROMPT) + 5:
            row[3] = self.value
        return row


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_59_the_step_that_overflows_is_named(
    value: float, temperature: float, acceptance: str
) -> None:
    table = random_table(VOCAB, seed=1)
    params: dict[str, Any] = dict(temperature=temperature, seed=2, max_new_tokens=NUM)
    text = PROMPT + serve(TableRuntime(table)).generate(PROMPT, **params).tokens
    for method in ("plain", "lookahead", HalfRight(text, rights=[8, 3], vocab_size=VOCAB, k=8)):
        llm = serve(Overflows(table, value), method)
        with pytest.raises(NumericalError, match=r"position 9\b.*bfloat16 or float32"):
            llm.generate(PROMPT, acceptance=acceptance, **params)


class Elsewhere(torch.Tensor):
    """A tensor that says it lives on an accelerator."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def rows_elsewhere(tree: Tree, logits: Tensor, **params: Any) -> TargetRows:
    sampler = Sampler(SamplingParams(**params), prompt=[0], seed=0, vocab_size=VOCAB)
    return TargetRows(tree, logits.as_subclass(Elsewhere), sampler)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_59_an_overflow_is_told_of_the_node_that_has_it(bad: float) -> None:
    """Where all rows are read at once, each one that is used is still checked."""
    logits = torch.zeros(4, VOCAB)
    logits[[0, 1, 2, 3], [5, 6, 7, 8]] = 9.0
    tree = Tree(tokens=[0, 5, 6, 9], parents=[-1, 0, 1, 0])
    assert [rows_elsewhere(tree, logits).token(node) for node in range(4)] == [5, 6, 7, 8]
    logits[2, 3] = bad
    rows = rows_elsewhere(tree, logits)
    assert [rows.token(node) for node in (0, 1, 3)] == [5, 6, 8]
    with pytest.raises(NumericalError):
        rows.token(2)
    with pytest.raises(NumericalError):  # the walk comes to it
        accept(tree, logits.as_subclass(Elsewhere), rows.sampler)
    logits[2], logits[3, 3] = logits[1], bad  # here it does not
    assert accept(tree, logits.as_subclass(Elsewhere), rows.sampler).path == [0, 1, 2]


# 58: where the logits are not on the CPU, they are read in another way, once a step


class FarRuntime(TableRuntime):
    """Its logits say that they live on an accelerator."""

    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        return [
            Output(logits=out.logits.as_subclass(Elsewhere), hidden=out.hidden)
            for out in super().forward(batch)
        ]


@pytest.mark.parametrize("name", ["plain", "lookup", "lookahead", "combined", "bushy", "half"])
def test_58_logits_of_another_device_give_the_same_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = random_table(VOCAB, seed=1)
    text = PROMPT + serve(TableRuntime(table)).generate(PROMPT, max_new_tokens=40).tokens
    made: dict[str, Method] = {
        "bushy": Bushy(text, rights=[3, 0, 2], vocab_size=VOCAB),
        "half": HalfRight(text, rights=[2, 0, 4], vocab_size=VOCAB, k=4),
    }
    near = serve(TableRuntime(table), made.get(name, name))
    far = serve(FarRuntime(table), made.get(name, name))
    syncs = []
    read = TargetRows._all_tokens
    monkeypatch.setattr(TargetRows, "_all_tokens", lambda rows: syncs.append(1) or read(rows))
    result = far.generate(PROMPT, max_new_tokens=40, logprobs=2)
    assert PROMPT + result.tokens == text
    assert len(syncs) == result.stats.steps, "one a step, whatever was accepted"
    right = near.generate(PROMPT, max_new_tokens=40, logprobs=2)
    assert result.logprobs == right.logprobs and result.stats.nodes == right.stats.nodes


# 59: distributions are formed in single precision


def test_59_p_and_q_of_a_large_vocabulary_sum_to_one_from_half_precision() -> None:
    size = 150_000
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    params = SamplingParams(temperature=0.7, acceptance="rejection", logit_bias={3: -100.0})
    sampler = Sampler(params, prompt=[0], seed=0, vocab_size=size)
    p = TargetRows(Tree.chain([0]), logits, sampler).probs(0)

    class Half(TableRuntime):
        def forward(self, batch: Sequence[Pass]) -> list[Output]:
            out = super().forward(batch)[0]
            return [Output(logits=logits[:1], hidden=out.hidden)]

    runtime = Half(torch.zeros(1, 1))
    step = Step(tokens=[0], max_nodes=8, max_depth=1, sampler=sampler)
    tree = Draft(runtime=runtime, num_tokens=1).start().propose(step)
    assert tree.draft_probs is not None
    for row in (p, tree.draft_probs[0]):
        assert row.dtype == torch.float32
        assert abs(float(row.double().sum()) - 1.0) < 1e-6
        assert float(row[3]) == 0.0
    rounded = torch.softmax(logits[0] / 0.7, dim=-1)
    assert abs(float(rounded.double().sum()) - 1.0) > 1e-6, "the control: bf16 would not"
