"""Fault 57, that "off" means off: plain decoding is the model's own `generate`."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from tiny import FAMILIES, VOCAB, build, byte_tokenizer, shared
from transformers import PreTrainedModel

import outpace

NUM = 20
PROMPT = [(5 + 11 * i) % VOCAB for i in range(13)]


def own_generate(model: PreTrainedModel, prompt: list[int], **how: Any) -> list[int]:
    """What transformers itself generates, greedily."""
    how = {"max_new_tokens": NUM, "do_sample": False, "pad_token_id": 0} | how
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return output[0, len(prompt) :].tolist()


def check_equal(tokens: list[int], own: list[int], gaps: list[float]) -> None:
    """Equal, or the first difference is where recomputation's two best tokens nearly tie."""
    oracle.assert_same(tokens, oracle.Decoded(own, gaps, "length"))


@pytest.mark.parametrize("family", FAMILIES)
def test_57_plain_is_the_models_own_generate(family: str) -> None:
    model = shared(family)
    gaps = oracle.greedy(oracle.recompute(model), PROMPT, max_new_tokens=NUM).gaps
    own = own_generate(model, PROMPT)
    llm = outpace.load(model)
    check_equal(llm.generate(PROMPT, max_new_tokens=NUM).tokens, own, gaps)
    assert own_generate(model, PROMPT) == own, "loading has not changed the model"
    for method in ("lookup", "lookahead"):
        result = llm.with_method(method).generate(PROMPT, max_new_tokens=NUM)
        check_equal(result.tokens, own, gaps)


def test_57_end_tokens_are_the_models_own() -> None:
    model = build("llama")
    text = own_generate(model, PROMPT)
    end = text[7]
    for place in (model.generation_config, model.config):
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        place.eos_token_id = [end, 63]
        own = own_generate(model, PROMPT, eos_token_id=[end, 63])
        result = outpace.load(model, method="lookup").generate(PROMPT, max_new_tokens=NUM)
        assert result.tokens == own == text[: text.index(end) + 1]
        assert result.finish_reason == "stop"


def test_57_penalties_are_those_of_transformers() -> None:
    model = shared("llama")
    own = own_generate(model, PROMPT, repetition_penalty=1.4)
    llm = outpace.load(model, tokenizer=byte_tokenizer(VOCAB), method="lookup")
    assert llm.generate(PROMPT, max_new_tokens=NUM, repetition_penalty=1.4).tokens == own
    assert own != own_generate(model, PROMPT), "the control: the penalty matters"


def test_57_control_another_text_is_told_apart() -> None:
    own = own_generate(shared("llama"), PROMPT)
    with pytest.raises(AssertionError):
        check_equal([*own[:5], (own[5] + 1) % VOCAB, *own[6:]], own, [1.0] * NUM)
