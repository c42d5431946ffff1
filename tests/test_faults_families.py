"""Faults of group E: model families. The numbers are the issue list's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from kit_runtime import llama4, load, seen_inputs
from scripted import Bushy, HalfRight, Perfect
from test_guard import quantised
from tiny import RECURRENT, VOCAB, build, byte_tokenizer, serve, shared
from transformers import PreTrainedModel

import outpace
from outpace.errors import UnsupportedModel
from outpace.proposers.base import Method

NUM = 24
PROMPT = [(5 + 11 * i) % VOCAB for i in range(13)]


def drafters(text: Sequence[int], k: int = 8) -> dict[str, Method | str]:
    """All that proposes without another model, and some that know the right text."""
    return {
        "lookup": "lookup",
        "lookahead": "lookahead",
        "combined": "combined",
        "perfect": Perfect(text, k=k),
        "half-right": HalfRight(text, rights=range(k + 1), vocab_size=VOCAB, k=k),
        "bushy": Bushy(text, rights=[3, 0, 2], vocab_size=VOCAB),
    }


def check_greedy(
    model: PreTrainedModel, prompt: Sequence[int], *, context: int = 2**30, num: int = NUM
) -> oracle.Decoded:
    """Every drafter's ids are those of recomputation; gives them."""
    right = oracle.greedy(
        oracle.recompute(model), prompt, max_new_tokens=num, context=context, end_ids=()
    )
    plain = serve(model)
    for name, method in drafters([*prompt, *right.tokens]).items():
        result = plain.with_method(method).generate(list(prompt), max_new_tokens=num)
        oracle.assert_same(result.tokens, right)
        assert result.finish_reason == right.finish_reason, name
    return right


# 27: models that cannot roll back


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_27_recurrent_models_are_refused_at_load_by_name(
    family: str, role: str, tmp_path: Path
) -> None:
    model = build(family)
    tokenizer = byte_tokenizer(VOCAB)
    if role == "target":
        target, how = model, {}
    else:
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        target, how = shared("llama"), {"method": "draft", "draft": str(tmp_path)}
    with pytest.raises(UnsupportedModel, match=type(model).__name__):
        outpace.load(target, tokenizer=tokenizer, **how)


@pytest.mark.parametrize("family", RECURRENT)
def test_27_the_effect_alone_is_enough_to_refuse_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the configuration named no recurrent layer, the check on the weights would find it."""
    model = build(family)
    monkeypatch.setattr(
        "outpace.runtimes.transformers.layer_types",
        lambda config, _: ["full_attention"] * config.num_hidden_layers,
    )
    with pytest.raises(UnsupportedModel, match=f"{type(model).__name__} cannot verify"):
        load(model)


# 28: learned absolute positions


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("length", [1, 40, 57])
def test_28_learned_positions_end_with_the_table(family: str, length: int) -> None:
    model = shared(family)
    prompt = [(5 + 11 * i) % VOCAB for i in range(length)]
    with seen_inputs(model, "position_ids") as seen:
        text = serve(model).generate(prompt).tokens
        for method in drafters([*prompt, *text]).values():
            result = serve(model, method).generate(prompt)
            assert (result.finish_reason, len(result.tokens)) == ("length", 64 - length)
    assert max(int(ids.max()) for ids in seen) == 62, "the last token is only emitted"
    check_greedy(model, prompt, context=64, num=64)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_28_rows_of_a_batch_equal_their_solo_runs(family: str) -> None:
    model = shared(family)
    prompts = [[(3 * i + n) % VOCAB for i in range(n)] for n in (1, 9, 40)]
    for method in ("plain", "lookup", "lookahead"):
        llm = serve(model, method)
        results = llm.generate_batch(prompts, max_new_tokens=20)
        for prompt, result in zip(prompts, results, strict=True):
            right = oracle.greedy(oracle.recompute(model), prompt, max_new_tokens=20)
            oracle.assert_same(result.tokens, right)


def test_28_control_positions_from_zero_give_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt2")
    llm = serve(model)
    right = oracle.greedy(oracle.recompute(model), PROMPT, max_new_tokens=NUM)
    run = type(llm.model.runtime)._run  # type: ignore[attr-defined]

    def without_offset(self: Any, plan: Any, ids: Any, positions: Any, *rest: Any) -> Any:
        return run(self, plan, ids, [[p - row[0] for p in row] for row in positions], *rest)

    monkeypatch.setattr(type(llm.model.runtime), "_run", without_offset)
    with pytest.raises(AssertionError):
        oracle.assert_same(llm.generate(PROMPT, max_new_tokens=NUM).tokens, right)


# 30: grouped queries


@pytest.mark.parametrize("family", ["llama-mha", "llama", "llama-mqa", "llama-head-dim"])
def test_30_any_number_of_key_value_heads(family: str) -> None:
    check_greedy(shared(family), PROMPT)


def test_30_the_cache_holds_the_key_value_heads_only() -> None:
    sizes = {}
    for family in ("llama-mha", "llama", "llama-mqa"):
        llm = serve(shared(family))
        llm.generate(PROMPT, max_new_tokens=NUM)
        sizes[family] = llm.model.runtime.memory()["cache"]
    assert sizes["llama-mha"] == 2 * sizes["llama"] == 4 * sizes["llama-mqa"] > 0


# Windows and chunks, mixed with full layers, over many times their size


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "llama4"])
def test_windows_slide_over_a_long_text(family: str) -> None:
    model = llama4() if family == "llama4" else shared(family)
    check_greedy(model, [(5 + 11 * i) % VOCAB for i in range(50)], num=40)


# 32: quantised targets


@pytest.mark.parametrize("seed", range(3))
def test_32_one_scale_a_row_is_exact(seed: int) -> None:
    model = quantised(per_row=True, seed=seed)
    check_greedy(model, PROMPT)
    assert serve(model).info()["verify_gap"] < 1e-4


def test_32_one_scale_a_call_is_said_to_be_not_lossless() -> None:
    changed = 0
    for seed in range(3):
        model = quantised(per_row=False, seed=seed)
        llm = serve(model)
        info = llm.info()
        assert info["bit_lossless"] is False
        assert info["verify_gap"] > 1e-3
        text = llm.generate(PROMPT, max_new_tokens=NUM).tokens
        right = oracle.greedy(oracle.recompute(model), PROMPT, max_new_tokens=NUM)
        changed += text != right.tokens
    assert changed, "the control: these models do change their mind"


# 33: experts


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_33_experts_choose_by_token_and_the_text_is_the_same(family: str) -> None:
    check_greedy(shared(family), PROMPT)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_33_half_precision_claims_only_what_holds(family: str) -> None:
    model = build(family, dtype=torch.bfloat16, max_position_embeddings=512)
    llm = outpace.load(model)
    plain = llm.generate(PROMPT, max_new_tokens=NUM)
    if llm.info()["bit_lossless"]:
        for method in drafters([*PROMPT, *plain.tokens]).values():
            result = llm.with_method(method).generate(PROMPT, max_new_tokens=NUM)
            assert result.tokens == plain.tokens
    assert plain.stats.exactness == llm.info()["exactness"]
