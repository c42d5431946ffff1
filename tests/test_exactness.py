"""The suite that every method passes: the text is plain decoding's, whatever proposes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from kit_runtime import PATHS
from scripted import AlwaysWrong, Bushy, Drawn, HalfRight, Perfect, RandomTrees
from tiny import VOCAB, TableRuntime, build, random_table, serve, shared
from torch import Tensor
from transformers import PreTrainedModel

from outpace import accept as rules
from outpace.accept import Accepted, TargetRows
from outpace.heads import MedusaHeads
from outpace.llm import LLM
from outpace.proposers.draft import Draft
from outpace.proposers.lookahead import Lookahead
from outpace.proposers.lookup import Lookup
from outpace.proposers.medusa import Medusa
from outpace.runtimes.transformers import TransformersRuntime
from outpace.sampling import Sampler
from outpace.tree import Tree

Start = Callable[[LLM, PreTrainedModel, Sequence[int]], LLM]  # plain, its model, the right text


@cache
def draft_runtime(seed: int) -> TransformersRuntime:
    """Another model with the same vocabulary; seed 0 is the target "llama" itself."""
    return TransformersRuntime(shared("llama", seed), exactness="ordinary")


@cache
def random_heads(hidden_size: int, *, dependent: bool) -> MedusaHeads:
    """Untrained heads that all propose something else."""
    heads = MedusaHeads(hidden_size=hidden_size, vocab_size=VOCAB, num_heads=3, dependent=dependent)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return heads


def with_heads(llm: LLM, *, dependent: bool = False) -> LLM:
    heads = random_heads(llm.model.runtime.hidden_size, dependent=dependent)
    return llm.with_method("medusa", heads=heads)


def of_all(llm: LLM) -> LLM:
    """Every method that proposes, in one."""
    heads = random_heads(llm.model.runtime.hidden_size, dependent=True)
    members = (
        Lookup(),
        Draft(runtime=draft_runtime(1), num_branches=2),
        Medusa(heads=heads, runtime=llm.model.runtime),
        Lookahead(),
    )
    return llm.with_method("combined", methods=members)


METHODS: dict[str, Start] = {
    "plain": lambda llm, *_: llm,
    "lookup": lambda llm, *_: llm.with_method("lookup"),
    "lookahead": lambda llm, *_: llm.with_method("lookahead"),
    "combined": lambda llm, *_: llm.with_method("combined"),
    "combined of all": lambda llm, *_: of_all(llm),
    "draft": lambda llm, *_: llm.with_method("draft", draft=draft_runtime(1)),
    "draft tree": lambda llm, *_: llm.with_method("draft", draft=draft_runtime(1), num_branches=3),
    "draft itself": lambda llm, *_: llm.with_method("draft", draft=draft_runtime(0)),
    "medusa": lambda llm, *_: with_heads(llm),
    "hydra": lambda llm, *_: with_heads(llm, dependent=True),
    "perfect": lambda llm, _, text: llm.with_method(Perfect(text, k=5)),
    "always wrong": lambda llm, _, text: llm.with_method(AlwaysWrong(text, vocab_size=VOCAB, k=5)),
    "half-right": lambda llm, _, text: llm.with_method(
        HalfRight(text, rights=range(6), vocab_size=VOCAB, k=5)
    ),
    "bushy": lambda llm, _, text: llm.with_method(Bushy(text, rights=[4, 1, 3], vocab_size=VOCAB)),
    "random trees": lambda llm, _, text: llm.with_method(RandomTrees(text, vocab_size=VOCAB)),
}
methods = pytest.mark.parametrize("start", METHODS.values(), ids=METHODS)

# name -> family and attention; every family is compared logit by logit in test_faults_cache.py.
MODELS: dict[str, tuple[str, str | None]] = {
    "llama": ("llama", None),
    "llama-mqa": ("llama-mqa", None),
    "gpt2": ("gpt2", None),
    "opt": ("opt", None),
    "mistral": ("mistral", None),
    "mistral eager": ("mistral", "eager"),
    "gemma2": ("gemma2", None),
    "gemma3": ("gemma3", None),
    "bloom": ("bloom", None),
    "qwen3-moe": ("qwen3-moe", None),
}
models = pytest.mark.parametrize("name", MODELS)
PROMPTS = [[5, 6, 7] * 6, [11], [(3 + 13 * i) % VOCAB for i in range(21)]]
NUM = 32


def never_thrice(ids: Sequence[int], logits: Tensor) -> Tensor:
    """A processor that reads the path: no token three times running, and one in ten by its sum."""
    if ids[-1:] == ids[-2:-1]:
        logits[ids[-1]] = -torch.inf
    logits[sum(ids) % VOCAB] += 2.0
    return logits


SEEDED: list[dict[str, Any]] = [
    dict(temperature=0.8, seed=1),
    dict(
        temperature=0.8,
        seed=2,
        top_k=20,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        bad_words=((5, 6),),
    ),
    dict(
        temperature=0.8,
        seed=3,
        min_p=0.05,
        presence_penalty=0.5,
        logit_bias={6: 1.0, 7: -100},
        processors=(never_thrice,),
    ),
]
# Each node's row depends on its own path in all of these.
PROCESSED: list[dict[str, Any]] = [
    dict(repetition_penalty=1.5, frequency_penalty=0.7, bad_words=((5, 6), (6,))),
    dict(presence_penalty=-1.0, logit_bias={6: 2.0, 7: -100}, min_tokens=9, stop_token_ids=(11, 3)),
    dict(frequency_penalty=1.0, processors=(never_thrice,)),
]


@cache
def loaded(name: str) -> tuple[PreTrainedModel, LLM, oracle.Logits]:
    """A tiny model, plain decoding with it, and its logits by full recompute."""
    family, attention = MODELS[name]
    model = shared(family) if attention is None else build(family, attn_implementation=attention)
    llm = serve(model)
    assert llm.info()["trees"] == ("paths" if family in PATHS else "tree"), "the guard fell back"
    return model, llm, oracle.recompute(model)


@cache
def greedy_text(name: str, number: int) -> oracle.Decoded:
    return oracle.greedy(loaded(name)[2], PROMPTS[number], max_new_tokens=NUM)


@methods
@models
def test_greedy_ids_are_the_oracles(name: str, start: Start) -> None:
    model, llm, _ = loaded(name)
    for number, prompt in enumerate(PROMPTS):
        right = greedy_text(name, number)
        fast = start(llm, model, prompt + right.tokens)
        oracle.assert_same(fast.generate(prompt, max_new_tokens=NUM).tokens, right)


@methods
@models
def test_seeded_ids_are_plain_decodings(name: str, start: Start) -> None:
    model, llm, _ = loaded(name)
    for prompt, params in zip(PROMPTS, SEEDED, strict=True):
        right = llm.generate(prompt, max_new_tokens=NUM, **params)
        fast = start(llm, model, prompt + right.tokens)
        assert fast.generate(prompt, max_new_tokens=NUM, **params).tokens == right.tokens


def greedy_processed(logits: oracle.Logits, prompt: Sequence[int], how: dict[str, Any]) -> Any:
    """The oracle's text; its processors come last, where greedy decoding asks for no more."""
    how = dict(how)
    processors = how.pop("processors", ())
    end_ids = how.pop("stop_token_ids", ())
    ids: list[int] = list(prompt)
    gaps = []
    while len(ids) < len(prompt) + NUM and not set(ids[len(prompt) :]) & set(end_ids):
        row = oracle.process(logits(ids), ids, num_prompt=len(prompt), end_ids=end_ids, **how)
        for processor in processors:
            row = processor(ids, torch.from_numpy(row)).numpy()
        best, second = np.sort(row)[::-1][:2]
        gaps.append(float(best - second))
        ids.append(int(row.argmax()))
    return oracle.Decoded(ids[len(prompt) :], gaps, "")


@methods
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_every_node_is_processed_with_its_own_path(name: str, start: Start) -> None:
    model, llm, logits = loaded(name)
    for prompt, params in zip(PROMPTS, PROCESSED, strict=True):
        right = greedy_processed(logits, prompt, params)
        fast = start(llm, model, prompt + right.tokens)
        oracle.assert_same(fast.generate(prompt, max_new_tokens=NUM, **params).tokens, right)


@methods
def test_a_processor_sees_each_prefix_once_whatever_proposes(start: Start) -> None:
    model, llm, _ = loaded("llama")
    seen: list[list[int]] = []

    def record(ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(ids))
        return never_thrice(ids, logits)

    for params in ({}, SEEDED[0]):
        how: dict[str, Any] = dict(params, processors=(record,), max_new_tokens=NUM)
        text = PROMPTS[0] + llm.generate(PROMPTS[0], **how).tokens
        seen.clear()
        fast = start(llm, model, text)
        assert PROMPTS[0] + fast.generate(PROMPTS[0], **how).tokens == text
        assert seen[:NUM] == [text[:i] for i in range(len(PROMPTS[0]), len(text))]
        assert all(ids[: len(text)] == text for ids in seen[NUM:])


@cache
def same_shape(dtype: torch.dtype) -> LLM:
    model = build("llama", dtype=dtype, max_position_embeddings=1024)
    llm = serve(TransformersRuntime(model, exactness="same-shape"))
    assert llm.model.runtime.same_shape
    return llm


@methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_shapes_leave_no_excuse(dtype: torch.dtype, start: Start) -> None:
    llm = same_shape(dtype)
    for i, params in enumerate([{}, *SEEDED, *PROCESSED]):
        prompt = PROMPTS[i % 3]
        right = llm.generate(prompt, max_new_tokens=24, **params).tokens
        fast = start(llm, shared("llama"), prompt + right)
        assert fast.generate(prompt, max_new_tokens=24, **params).tokens == right


@methods
def test_a_text_ends_at_every_index_of_a_block(start: Start) -> None:
    model, llm, _ = loaded("llama")
    for prompt, params in zip(PROMPTS, [{}, *SEEDED[:2]], strict=True):
        text = llm.generate(prompt, max_new_tokens=14, **params).tokens
        fast = start(llm, model, prompt + text)
        for index, token in enumerate(text):
            right = text[: text.index(token) + 1]
            stopped = fast.generate(prompt, stop_token_ids=(token,), max_new_tokens=14, **params)
            assert (stopped.tokens, stopped.finish_reason) == (right, "stop")
            cut = fast.generate(prompt, max_new_tokens=index, **params)
            assert (cut.tokens, cut.finish_reason) == (text[:index], "length")


@methods
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bloom"])
def test_a_batch_gives_each_prompt_its_solo_text(name: str, start: Start) -> None:
    model, llm, _ = loaded(name)
    for params in ({}, SEEDED[1]):
        alone = [llm.generate(prompt, max_new_tokens=20, **params).tokens for prompt in PROMPTS]
        fast = start(llm, model, PROMPTS[2] + alone[2])
        together = fast.generate_batch(PROMPTS, max_new_tokens=20, **params)
        assert [result.tokens for result in together] == alone


@methods
def test_01_fifty_prompts_of_128_tokens_among_the_methods(start: Start) -> None:
    model, llm, logits = loaded("llama")
    number = list(METHODS.values()).index(start)
    rng = np.random.default_rng(number)
    for length in rng.integers(1, 30, -(-50 // len(METHODS))):
        prompt = rng.integers(0, VOCAB, length).tolist()
        right = oracle.greedy(logits, prompt, max_new_tokens=128)
        fast = start(llm, model, prompt + right.tokens)
        oracle.assert_same(fast.generate(prompt, max_new_tokens=128).tokens, right)


# The distribution, through the engine

TABLE = random_table(VOCAB, seed=1)
TABLE[:, 4:] = -torch.inf  # four tokens are left
DRAFT = random_table(VOCAB, seed=2)
DRAFT[:, 4:] = -torch.inf
PROMPT = [0, 1, 2, 3, 2, 1, 0, 0, 2]  # something for lookup to find
TABLE_METHODS: dict[str, Callable[[LLM], LLM]] = {
    "plain": lambda llm: llm,
    "lookup": lambda llm: llm.with_method("lookup"),
    "lookahead": lambda llm: llm.with_method("lookahead"),
    "combined": lambda llm: llm.with_method("combined"),
    "draft": lambda llm: llm.with_method("draft", draft=TableRuntime(DRAFT)),
    "draft tree": lambda llm: llm.with_method("draft", draft=TableRuntime(DRAFT), num_branches=2),
    "medusa": with_heads,
    "hydra": lambda llm: with_heads(llm, dependent=True),
    "combined of drawn and picked": lambda llm: llm.with_method(
        "combined", methods=(Draft(runtime=TableRuntime(DRAFT), num_branches=2), Lookup())
    ),
    "drawn chain": lambda llm: llm.with_method(Drawn(DRAFT, branching=(1, 1))),
    "drawn tree": lambda llm: llm.with_method(Drawn(DRAFT, branching=(2, 2))),
}


def check_distribution(start: Callable[[LLM], LLM], *, seeds: int = 500, **params: Any) -> None:
    """Three tokens after PROMPT have the exact marginals of the target, position by position."""
    llm = start(serve(TableRuntime(TABLE)))
    right = oracle.marginals(oracle.probabilities(TABLE, temperature=1.0)[:4, :4], PROMPT[-1], 3)
    counts = np.zeros((3, 4))
    for seed in range(seeds):
        tokens = llm.generate(PROMPT, max_new_tokens=3, temperature=1.0, seed=seed, **params).tokens
        counts[range(3), tokens] += 1
    for count, probs in zip(counts, right, strict=True):
        oracle.assert_distribution(count, probs)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("start", TABLE_METHODS.values(), ids=TABLE_METHODS)
def test_the_distribution_is_the_targets(start: Callable[[LLM], LLM], acceptance: str) -> None:
    check_distribution(start, acceptance=acceptance)


# Controls: what is broken on purpose must be caught by the checks above.


def first_unchecked(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    node = next(iter(tree.children(0)), 0)
    path = [0, node] if node else [0]
    return Accepted(path, TargetRows(tree, logits, sampler).token(node))


def noise_by_step(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    rows = TargetRows(tree, logits, sampler)
    rows.position = lambda node: len(sampler.tokens)  # type: ignore[method-assign]
    return rules.accept_coupled(tree, rows)


def no_own_path(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    rows = TargetRows(tree, logits, sampler)
    rows.weights = lambda node: sampler.process(logits[node], [])  # type: ignore[method-assign]
    return rules.accept_coupled(tree, rows)


@pytest.mark.parametrize("broken", [first_unchecked, noise_by_step, no_own_path])
def test_control_a_broken_acceptance_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    model, llm, _ = loaded("llama")
    params = dict(SEEDED[1], repetition_penalty=1.8)
    right = llm.generate(PROMPTS[0], max_new_tokens=NUM, **params).tokens
    monkeypatch.setattr("outpace.engine.accept", broken)
    wrong = [
        start(llm, model, PROMPTS[0] + right)
        .generate(PROMPTS[0], max_new_tokens=NUM, **params)
        .tokens
        for start in METHODS.values()
    ]
    assert any(tokens != right for tokens in wrong)


def test_control_a_biased_rule_is_caught_by_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.engine.accept", first_unchecked)
    for name in ("lookup", "drawn chain"):
        with pytest.raises(AssertionError):
            check_distribution(TABLE_METHODS[name], seeds=300)


def shifted_positions(self: Any, plan: Any, ids: Any, positions: Any, *rest: Any) -> Any:
    moved = [[position + (i > 0) for i, position in enumerate(row)] for row in positions]
    return RUN(self, plan, ids, moved, *rest)


def causal(self: Tree) -> Any:
    return np.tril(np.ones((len(self), len(self)), dtype=np.bool_))


RUN = TransformersRuntime._run


@pytest.mark.parametrize(
    ("place", "function", "broken"),
    [(TransformersRuntime, "_run", shifted_positions), (Tree, "mask", causal)],
    ids=["positions", "mask"],
)
def test_control_broken_positions_and_masks_are_caught(
    monkeypatch: pytest.MonkeyPatch, place: Any, function: str, broken: Any
) -> None:
    right = greedy_text("llama", 2)
    model, llm, _ = loaded("llama")
    monkeypatch.setattr(place, function, broken)
    fast = METHODS["bushy"](llm, model, PROMPTS[2] + right.tokens)
    with pytest.raises(AssertionError):
        oracle.assert_same(fast.generate(PROMPTS[2], max_new_tokens=NUM).tokens, right)


# What the suite rests on: drafts are really made, and really accepted.

MOST: dict[str, float] = {
    "perfect": 5.0,
    "half-right": 2.5,
    "bushy": 3.0,
    "lookup": 1.3,
    "draft itself": 4.0,
}


@pytest.mark.parametrize("name", MOST)
def test_the_drafters_of_this_suite_are_accepted(name: str) -> None:
    model, llm, _ = loaded("llama")
    text = PROMPTS[0] + greedy_text("llama", 0).tokens
    stats = METHODS[name](llm, model, text).generate(PROMPTS[0], max_new_tokens=NUM).stats
    assert stats.tokens_per_step is not None and stats.tokens_per_step >= MOST[name]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_draft_with_the_same_weights_is_always_accepted(acceptance: str) -> None:
    _, llm, _ = loaded("llama")
    fast = llm.with_method("draft", draft=draft_runtime(0), num_tokens=4)
    result = fast.generate(PROMPTS[2], max_new_tokens=30, acceptance=acceptance, **SEEDED[0])
    assert result.stats.acceptance == 1.0 and result.stats.tokens_per_step == 5.0


@methods
def test_nothing_is_left_behind(start: Start) -> None:
    model, llm, _ = loaded("llama")
    fast = start(llm, model, PROMPTS[0])
    for _ in range(3):
        fast.generate(PROMPTS[0], max_new_tokens=6)
        stream = fast.stream(PROMPTS[2], max_new_tokens=60)
        next(stream)
        stream.close()
    assert len(llm.model.runtime._sequences) == 1, "one idle sequence is kept for its prefix"
    assert not draft_runtime(0)._sequences and not draft_runtime(1)._sequences
