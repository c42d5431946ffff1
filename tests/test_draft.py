"""The draft proposes its own continuation, whatever became of the last one, and honest draws."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from scripted import play
from tiny import TableRuntime, byte_tokenizer, probs_table, random_table, serve
from torch import Tensor

from outpace import models
from outpace.accept import TargetRows, accept
from outpace.errors import IncompatibleModels, InvalidRequest, NumericalError
from outpace.models import Model
from outpace.proposers import draft as draft_module
from outpace.proposers.base import Proposer, Step, Target
from outpace.proposers.draft import Draft, check_vocabulary
from outpace.runtimes.base import Output, Pass
from outpace.sampling import DRAFT_STREAM, Sampler, SamplingParams
from outpace.text import Tokenizer
from outpace.tree import Tree

VOCAB = 16


class HistoryRuntime(TableRuntime):
    """Its next token depends on the whole text that it sees, so a wrong cache shows."""

    def __init__(self, vocab_size: int = VOCAB, **limits: Any) -> None:
        super().__init__(torch.zeros(vocab_size, vocab_size), **limits)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**40)
        return torch.randn(self.vocab_size, generator=generator)

    def continuation(self, tokens: Sequence[int], num: int, *, num_ids: int = VOCAB) -> list[int]:
        text = list(tokens)
        for _ in range(num):
            text.append(int(self.logits(text)[:num_ids].argmax()))
        return text[len(tokens) :]


def step_of(
    tokens: Sequence[int],
    *,
    max_nodes: int = 64,
    max_depth: int = 50,
    vocab_size: int = VOCAB,
    **params: Any,
) -> Step:
    sampler = Sampler(SamplingParams(**params), prompt=tokens, seed=7, vocab_size=vocab_size)
    return Step(tokens=tokens, max_nodes=max_nodes, max_depth=max_depth, sampler=sampler)


def propose(method: Draft, tokens: Sequence[int], **how: Any) -> Tree:
    proposer = method.start()
    tree = proposer.propose(step_of(tokens, **how))
    proposer.close()
    return tree


# The chain


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
def test_chains_are_the_drafts_own_continuation_after_any_rewind(num_tokens: int) -> None:
    """Rounds accept 0 to all of the proposed tokens, then something else or the same follows."""
    runtime = HistoryRuntime(max_context=2000)
    proposer = Draft(runtime=runtime, num_tokens=num_tokens).start()
    rng = random.Random(num_tokens)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    pattern = [0, num_tokens, num_tokens, 0, 0, *(rng.randint(0, num_tokens) for _ in range(25))]
    for accepted in pattern:
        tree = proposer.propose(step_of(text))
        right = runtime.continuation(text, num_tokens)
        assert tree == Tree.chain([text[-1], *right])
        text = [*text, *right[:accepted], rng.randrange(VOCAB)]
    # Each text token is computed once, and each guess but the last one of a chain at most once.
    nodes = sum(len(work.tree) for work in runtime.passes)
    assert nodes <= len(text) + len(pattern) * num_tokens
    assert all(len(work.rows) <= 1 for work in runtime.passes)


def test_a_draft_that_does_not_rewind_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HistoryRuntime, "rewind", lambda self, sequence, _: len(self.tokens(sequence))
    )
    with pytest.raises((AssertionError, IndexError, ValueError)):
        test_chains_are_the_drafts_own_continuation_after_any_rewind(4)


def test_the_same_text_twice_gives_the_same_chain() -> None:
    runtime = HistoryRuntime()
    proposer = Draft(runtime=runtime).start()
    first = proposer.propose(step_of([1, 2, 3]))
    assert proposer.propose(step_of([1, 2, 3])) == first


def test_a_long_prompt_is_cached_in_chunks_without_logits() -> None:
    runtime = HistoryRuntime()
    text = [i % VOCAB for i in range(21)]
    propose(Draft(runtime=runtime, num_tokens=2), text)
    assert [(len(work.tree), list(work.rows)) for work in runtime.passes] == [
        (8, []),
        (8, []),
        (5, [4]),
        (1, [0]),
    ]


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("max_depth", [0, 1, 3, 9])
@pytest.mark.parametrize("num_branches", [1, 2, 3])
def test_the_steps_budget_is_kept(max_nodes: int, max_depth: int, num_branches: int) -> None:
    runtime = HistoryRuntime()
    method = Draft(runtime=runtime, num_tokens=4, num_branches=num_branches)
    tree = propose(method, [1, 2], max_nodes=max_nodes, max_depth=max_depth)
    depth = min(4, max_depth, max_nodes - 1)
    assert max(tree.depths) == depth
    assert len(tree) == min(max_nodes, 1 + depth * num_branches) if depth else len(tree) == 1
    chain = [tree.tokens[0]]  # the chain goes first, whatever room branches would take
    node = 0
    while tree.children(node):
        node = tree.children(node)[0]
        chain.append(tree.tokens[node])
    assert chain == [2, *runtime.continuation([1, 2], depth)]


def test_branches_are_the_next_best_tokens_of_each_node() -> None:
    runtime = HistoryRuntime()
    tree = propose(Draft(runtime=runtime, num_tokens=3, num_branches=3), [1, 2])
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4]
    for node in (0, 1, 4):
        best = runtime.logits([1, 2, *tree.path_tokens(node)]).argsort(descending=True)
        assert [tree.tokens[child] for child in tree.children(node)] == best[:3].tolist()


def test_low_confidence_ends_the_chain() -> None:
    sure, unsure = [0.9, 0.04, 0.03, 0.03], [0.4, 0.3, 0.2, 0.1]
    table = probs_table([unsure, [0.03, 0.04, 0.9, 0.03], [0.03, 0.04, 0.03, 0.9], sure])
    runtime = TableRuntime(table)  # 1 -> 2 -> 3 -> 0, where it hesitates

    def chain(min_confidence: float, **params: Any) -> list[int]:
        method = Draft(runtime=runtime, num_tokens=6, min_confidence=min_confidence)
        return propose(method, [1], vocab_size=4, **params).tokens

    assert chain(0.0) == [1, 2, 3, 0, 0, 0, 0]
    assert chain(0.39) == chain(0.0)
    assert chain(0.5) == [1, 2, 3, 0]
    assert chain(0.95) == [1]
    assert len(chain(0.95, temperature=0.3)) > 1  # the distribution that counts is the processed


# Vocabularies


def texts(*names: str) -> dict[int, str]:
    return dict(enumerate(names))


def test_equal_vocabularies_pass_and_padding_does_no_harm() -> None:
    ours = texts("a", "b", "c")
    check_vocabulary(ours, dict(ours))
    check_vocabulary(ours, ours | {3: "<pad>", 4: "<pad2>"})
    check_vocabulary(ours | {3: "<pad>", 4: "<pad2>"}, ours)


@pytest.mark.parametrize(
    ("ours", "theirs", "match"),
    [
        (texts("a", "b", "c"), texts("a", "c", "b"), "id 1 is 'b' in the target and 'c' in the"),
        (texts("a", "b"), {1: "b"}, "id 0 is 'a' in the target and None in the draft"),
        ({1: "b"}, texts("a", "b"), "id 0 is None in the target and 'a' in the draft"),
        (texts("a"), {}, "the draft has no tokenizer"),
        ({}, texts("a"), "the target has no tokenizer"),
        ({}, {}, "no tokenizer"),
    ],
)
def test_other_vocabularies_are_refused(
    ours: dict[int, str], theirs: dict[int, str], match: str
) -> None:
    with pytest.raises(IncompatibleModels, match=match):
        check_vocabulary(ours, theirs)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records what is loaded; the name says the number of tokens in the tokenizer."""
    calls: list[dict[str, Any]] = []

    def load_model(name: str, **how: Any) -> Model:
        calls.append({"name": name, **how})
        return Model(
            name=name,
            runtime=TableRuntime(random_table(60, seed=2)),
            tokenizer=None if name == "none" else Tokenizer(byte_tokenizer(int(name))),
            eos_ids=(),
            fingerprint="",
        )

    monkeypatch.setattr(models, "load_model", load_model)
    return calls


def test_load_compares_the_vocabularies(loads: list[dict[str, Any]]) -> None:
    runtime = TableRuntime(random_table(64, seed=1))
    words = Tokenizer(byte_tokenizer(57)).token_texts
    target = Target(runtime=runtime, token_texts=words, fingerprint="")
    method = Draft.load(target, draft="57", num_tokens=7, min_confidence=0.25)
    assert loads == [{"name": "57", "device": "cpu", "exactness": "ordinary", "cache": None}]
    assert (method.num_ids, method.num_tokens, method.min_confidence) == (57, 7, 0.25)
    assert method.runtime.vocab_size == 60
    assert Draft.load(target, draft="58").num_ids == 57
    assert Draft.load(target, draft="56").num_ids == 56
    with pytest.raises(IncompatibleModels, match="id 0 is '0' in the target and"):
        Draft.load(target, draft="256")
    with pytest.raises(IncompatibleModels, match="the draft has no tokenizer"):
        Draft.load(target, draft="none")
    bare = Target(runtime=runtime, token_texts={}, fingerprint="")
    with pytest.raises(IncompatibleModels, match="the target has no tokenizer"):
        Draft.load(bare, draft="57")
    own = TableRuntime(random_table(64, seed=3))
    assert Draft.load(bare, draft=own, num_branches=2).runtime is own
    with pytest.raises(InvalidRequest, match="needs draft"):
        Draft.load(target)
    assert set(Draft.options()) == {"draft", "num_tokens", "num_branches", "min_confidence"}


# 22: the target has 64 rows, the draft 60, the tokenizer 57 tokens; and the other way round

PADDED = {"draft narrower": (64, 60), "draft wider": (60, 64), "same width": (64, 64)}
padded = pytest.mark.parametrize(("wide", "narrow"), PADDED.values(), ids=PADDED)


def padding_wins(vocab_size: int, seed: int) -> Tensor:
    """A draft whose padding rows, never trained, have the largest logits."""
    table = random_table(vocab_size, seed=seed)
    table[:, 57:] += 8.0
    return table


@padded
def test_22_padding_is_never_proposed(wide: int, narrow: int) -> None:
    runtime = TableRuntime(padding_wins(narrow, 2))
    method = Draft(runtime=runtime, num_ids=57, num_tokens=6, num_branches=3)
    careless = Draft(runtime=runtime, num_tokens=6, num_branches=3)
    for params in (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "acceptance": "rejection"},
        {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {58: 5.0}},
    ):
        tree = propose(method, [3, 4], vocab_size=wide, **params)
        assert len(tree) == 19 and max(tree.tokens) < 57
        assert max(propose(careless, [3, 4], vocab_size=wide, **params).tokens) >= 57
        if tree.draft_probs is not None:
            assert tree.draft_probs.shape == (19, wide)
            assert not tree.draft_probs[:, 57:].any()


@padded
def test_22_the_text_is_the_targets(wide: int, narrow: int) -> None:
    table = random_table(wide, seed=1)
    draft = TableRuntime(random_table(narrow, seed=1))  # agrees often
    plain = serve(TableRuntime(table))
    fast = plain.with_method(Draft(runtime=draft, num_ids=57))
    for params in (
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.5, "top_k": 9, "seed": 1},
    ):
        right = plain.generate([1, 2], max_new_tokens=60, **params)
        assert fast.generate([1, 2], max_new_tokens=60, **params).tokens == right.tokens


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_22_marginals_with_padding_are_the_targets(acceptance: str) -> None:
    """Targets and drafts of 6 and 5 rows over a tokenizer of 4 tokens."""
    table, draft = random_table(6, seed=1), random_table(5, seed=2)
    draft[:, 4] += 5.0
    llm = serve(TableRuntime(table)).with_method(
        Draft(runtime=TableRuntime(draft), num_ids=4, num_tokens=3, num_branches=2)
    )
    check_marginals(llm, table, acceptance=acceptance)


@pytest.mark.parametrize("bias", [{62: 30.0}, {58: 30.0}, {}], ids=["62", "58", "free"])
def test_22_an_id_that_the_draft_lacks_ends_what_it_sees(bias: dict[int, float]) -> None:
    runtime = HistoryRuntime(60)
    table = random_table(64, seed=1)
    plain = serve(TableRuntime(table))
    fast = plain.with_method(Draft(runtime=runtime, num_ids=57))
    params: dict[str, Any] = dict(max_new_tokens=20, logit_bias=bias, bad_words=((62, 62),))
    for prompt in ([1, 2, 62, 3], [62], [63, 5]):
        right = plain.generate(prompt, **params)
        assert fast.generate(prompt, **params).tokens == right.tokens
    tree = propose(Draft(runtime=runtime, num_ids=57), [1, 62, 3, 4], vocab_size=64)
    assert tree.tokens == [4, *runtime.continuation([3, 4], 4, num_ids=57)]
    assert propose(Draft(runtime=runtime, num_ids=57), [1, 2, 62], vocab_size=64).tokens == [62]


# A draft context shorter than the target's


@pytest.mark.parametrize("context", [1, 2, 3, 8, 16, 17])
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_a_shorter_context_sees_the_newest_part_of_the_text(context: int, num_tokens: int) -> None:
    """The runtime asserts that no position is past its context."""
    runtime = HistoryRuntime(max_context=context)
    proposer = Draft(runtime=runtime, num_tokens=num_tokens).start()
    rng = random.Random(0)
    text = [rng.randrange(VOCAB) for _ in range(3)]
    for _ in range(60):
        tree = proposer.propose(step_of(text))
        seen = len(runtime.tokens(0)) - (len(tree) - 2)  # what it holds without its own guesses
        assert seen >= min(len(text), max(context // 2, 1))
        assert tree.tokens[1:] == runtime.continuation(text[-seen:], len(tree) - 1)
        assert len(tree) - 1 == min(num_tokens, max(context // 2, 1))
        text = [*text, *tree.tokens[1 : rng.randint(1, len(tree))], rng.randrange(VOCAB)]


def test_a_shorter_context_still_helps_and_is_not_read_again_in_every_step() -> None:
    table = random_table(VOCAB, seed=3)
    target, runtime = TableRuntime(table, max_context=400), TableRuntime(table, max_context=32)
    llm = serve(target, Draft(runtime=runtime))
    result = llm.generate([1, 2, 3], max_new_tokens=300)
    assert result.stats.acceptance == 1.0 and result.stats.tokens_per_step == 5.0
    # Every 12 tokens or so half a context is read again; once a step would be 60 * 16 more.
    nodes = sum(len(work.tree) for work in runtime.passes)
    assert nodes < 300 + 60 * 3 + 300 // 10 * 16


# Sampling


def test_coupled_drafts_draw_with_the_targets_noise() -> None:
    table = random_table(VOCAB, seed=3)
    step = step_of([1, 2], temperature=0.8, top_k=9)
    tree = Draft(runtime=TableRuntime(table)).start().propose(step)
    assert tree.draft_probs is None
    for depth in range(4):
        path = tree.tokens[1 : depth + 1]
        weights = step.sampler.process(table[tree.tokens[depth]], path)
        noise = step.sampler.noise(2 + depth)
        assert noise is not None
        assert tree.tokens[depth + 1] == int((weights + noise).argmax())


def test_rejection_drafts_draw_with_their_own_noise_and_say_from_what() -> None:
    table = random_table(VOCAB, seed=3)
    step = step_of([1, 2], temperature=0.8, top_k=9, acceptance="rejection")
    tree = Draft(runtime=TableRuntime(table), num_branches=2).start().propose(step)
    assert tree.draft_probs is not None and tree.draft_probs.shape == (9, VOCAB)
    inner = [0, 1, 3, 5]
    for depth, node in enumerate(inner):
        weights = step.sampler.process(table[tree.tokens[node]], tree.path_tokens(node))
        torch.testing.assert_close(tree.draft_probs[node], torch.softmax(weights, dim=-1))
        noise = step.sampler.noise(2 + depth, stream=DRAFT_STREAM)
        assert noise is not None
        best = (weights + noise).topk(2).indices.tolist()
        assert [tree.tokens[child] for child in tree.children(node)] == best
    assert not tree.draft_probs[[2, 4, 6, 7, 8]].any()


def test_greedy_requests_have_no_draft_probs_under_rejection() -> None:
    runtime = HistoryRuntime()
    tree = propose(Draft(runtime=runtime), [1, 2], acceptance="rejection")
    assert tree == Tree.chain([2, *runtime.continuation([1, 2], 4)])


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 0.5},
        {"temperature": 0.7, "repetition_penalty": 1.3, "min_tokens": 20, "stop_token_ids": (3,)},
    ],
)
def test_04_a_draft_equal_to_the_target_is_always_accepted(
    params: dict[str, Any], acceptance: str
) -> None:
    table = random_table(VOCAB, seed=3)
    llm = serve(TableRuntime(table), Draft(runtime=TableRuntime(table)))
    for seed in range(5):
        result = llm.generate([1, 2], max_new_tokens=50, seed=seed, acceptance=acceptance, **params)
        stats = result.stats
        if result.finish_reason == "length":
            assert stats.acceptance == 1.0 and stats.tokens_per_step == 5.0
        assert stats.accepted >= stats.completion_tokens * 4 // 5 - 4


def test_04_noise_of_its_own_would_be_accepted_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_module, "TOKEN_STREAM", DRAFT_STREAM)
    with pytest.raises(AssertionError):
        test_04_a_draft_equal_to_the_target_is_always_accepted({"temperature": 1.0}, "coupled")


def check_marginals(llm: Any, table: Tensor, *, seeds: int = 600, **params: Any) -> None:
    """Three tokens after 0 have the target's exact marginals."""
    right = oracle.marginals(oracle.probabilities(table, temperature=1.0), 0, 3)
    counts = np.zeros((3, table.shape[0]))
    for seed in range(seeds):
        tokens = llm.generate([0], max_new_tokens=3, temperature=1.0, seed=seed, **params).tokens
        counts[range(3), tokens] += 1
    for count, probs in zip(counts, right, strict=True):
        oracle.assert_distribution(count, probs)


CONFIDENT = Draft(
    runtime=TableRuntime(probs_table([[0.6, 0.3, 0.1]])), num_tokens=1, min_confidence=0.5
)


def test_stopping_at_low_confidence_keeps_the_distribution() -> None:
    """The draft says 0.6, 0.3, 0.1 and would stop after a look at an unlikely draw."""
    target = probs_table([[0.2, 0.5, 0.3]])
    llm = serve(TableRuntime(target), CONFIDENT)
    check_marginals(llm, target, seeds=1500, acceptance="rejection")
    unsure = probs_table([[0.4, 0.3, 0.3], [0.7, 0.2, 0.1], [0.1, 0.45, 0.45]])
    method = Draft(runtime=TableRuntime(unsure), num_branches=2, min_confidence=0.43)
    llm = serve(TableRuntime(target), method)
    check_marginals(llm, target, seeds=1000, acceptance="rejection")


def test_leaving_out_unlikely_draws_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = draft_module.DraftProposer.propose

    def choosy(self: Any, step: Step) -> Tree:
        tree = honest(self, step)
        if len(tree) == 2 and tree.tokens[1] != 0:
            return Tree.chain(tree.tokens[:1])
        return tree

    monkeypatch.setattr(draft_module.DraftProposer, "propose", choosy)
    target = probs_table([[0.2, 0.5, 0.3]])
    with pytest.raises(AssertionError):
        check_marginals(
            serve(TableRuntime(target), CONFIDENT), target, seeds=1500, acceptance="rejection"
        )


@pytest.mark.parametrize("num_branches", [1, 2, 4])
def test_the_distribution_with_branches_is_the_targets(num_branches: int) -> None:
    """Four tokens, of which the draft bans one: with four branches, its rows run out."""
    table, draft = random_table(4, seed=1), random_table(4, seed=2)
    draft[:, 3] = -math.inf
    method = Draft(runtime=TableRuntime(draft), num_tokens=2, num_branches=num_branches)
    llm = serve(TableRuntime(table), method)
    check_marginals(llm, table, acceptance="rejection")
    tree = propose(method, [0], vocab_size=4, temperature=1.0, acceptance="rejection")
    assert len(tree) == 1 + 2 * min(num_branches, 3)
    assert 3 not in tree.tokens


def test_picks_passed_off_as_draws_would_not_be() -> None:
    """Top-k children with a q are not what the rule takes them for: the check above sees it."""
    table, draft = random_table(4, seed=1), random_table(4, seed=2)
    proposers: list[Proposer] = []

    def tree_of(sampler: Sampler) -> Tree:
        proposer = Draft(runtime=TableRuntime(draft), num_tokens=2).start()
        proposers.append(proposer)
        picks = Sampler(SamplingParams(), prompt=sampler.tokens, seed=0, vocab_size=4)
        step = Step(tokens=sampler.tokens, max_nodes=9, max_depth=9, sampler=picks)
        tree = proposer.propose(step)
        return Tree.chain(tree.tokens, draft_probs=torch.softmax(draft[tree.tokens], dim=-1))

    params = SamplingParams(temperature=1.0, acceptance="rejection")
    counts = np.zeros(4)
    for seed in range(600):
        added = play(table, tree_of, seed=seed, num=1, params=params)
        counts[added[0][0]] += 1
    with pytest.raises(AssertionError):
        oracle.assert_distribution(counts, oracle.probabilities(table, temperature=1.0)[0])


def test_the_drafts_rows_are_processed_like_the_targets() -> None:
    """Penalties, bans and bad words hold for a draft too, along its own path."""
    table = random_table(VOCAB, seed=3)
    runtime = TableRuntime(table)
    step = step_of([1, 2], logit_bias={4: -100.0}, frequency_penalty=2.0, bad_words=((5,), (2, 6)))
    chain = Draft(runtime=runtime, num_tokens=8).start().propose(step)
    tree = Tree.chain(chain.tokens)
    rows = TargetRows(tree, table[tree.tokens], step.sampler)
    assert tree.tokens[1:] == [rows.token(node) for node in range(8)]
    assert tree.tokens != propose(Draft(runtime=runtime, num_tokens=8), [1, 2]).tokens


def test_a_users_processor_is_not_asked_about_drafts() -> None:
    def record(ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(ids))
        logits[::2] = -math.inf
        return logits

    table = random_table(VOCAB, seed=3)
    for params in ({}, {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 4}):
        texts = []
        for llm in (
            serve(TableRuntime(table)),
            serve(TableRuntime(table), Draft(runtime=TableRuntime(table))),
        ):
            seen: list[list[int]] = []
            result = llm.generate([1, 2], max_new_tokens=20, processors=(record,), **params)
            assert seen[:20] == [[1, 2, *result.tokens[:i]] for i in range(20)]
            texts.append(result.tokens)
        assert texts[0] == texts[1]


# What goes wrong


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_59_a_draft_that_overflows_says_so(value: float, params: dict[str, Any]) -> None:
    table = random_table(VOCAB, seed=3)
    proposer = Draft(runtime=TableRuntime(table)).start()
    third = proposer.propose(step_of([1, 2], **params)).tokens[2]
    table[third, 5] = value
    proposer = Draft(runtime=TableRuntime(table)).start()
    with pytest.raises(NumericalError, match=r"the draft.s logits are .* position 4.*bfloat16"):
        proposer.propose(step_of([1, 2], **params))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_a_draft_that_may_say_nothing_proposes_nothing(params: dict[str, Any]) -> None:
    bans = {token: -100.0 for token in range(8)}
    runtime = TableRuntime(random_table(8, seed=3))
    assert propose(Draft(runtime=runtime), [1, 2], logit_bias=bans, **params).tokens == [2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", 0),
        ("num_tokens", 2.5),
        ("num_branches", 0),
        ("num_ids", 0),
        ("min_confidence", -0.1),
        ("min_confidence", 1.5),
        ("min_confidence", math.nan),
    ],
)
def test_a_parameter_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Draft(runtime=HistoryRuntime(), **{field: value})  # type: ignore[arg-type]


def test_a_sequence_is_opened_late_and_closed_once() -> None:
    runtime = HistoryRuntime()
    method = Draft(runtime=runtime)
    first, second = method.start(), method.start()
    assert runtime.num_open == 0
    for text in ([1, 2], [1, 2, 3], [4]):
        for proposer in (first, second):
            tokens = [*text, 5 if proposer is first else 6]
            right = runtime.continuation(tokens, 4)
            assert proposer.propose(step_of(tokens)).tokens[1:] == right
    assert runtime.num_open == 2
    for _ in range(2):
        first.close()
    assert runtime.num_open == 1
    second.close()
    method.start().close()
    assert runtime.num_open == 0
    assert method.memory() == VOCAB * VOCAB * 4


# 58: draft and target on different devices


class Elsewhere(torch.Tensor):
    """A tensor of another device: it works with its like, and with others once it is moved."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = [*args, *kwargs.values()]
        moves = func is torch.Tensor.to and any(isinstance(a, torch.device) for a in flat)
        if func is torch.Tensor.cpu or moves:
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0].as_subclass(torch.Tensor), *args[1:], **kwargs)
        tensors = [a for a in flat if isinstance(a, torch.Tensor)]
        assert all(isinstance(a, Elsewhere) for a in tensors), f"{func} on two devices"
        return super().__torch_function__(func, types, args, kwargs)


class FarRuntime(TableRuntime):
    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        return [
            Output(logits=out.logits.as_subclass(Elsewhere), hidden=out.hidden)
            for out in super().forward(batch)
        ]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_58_every_tensor_is_moved_to_the_targets_device(
    temperature: float, acceptance: str
) -> None:
    table = random_table(VOCAB, seed=3)
    far, near = (Draft(runtime=kind(table), num_branches=2) for kind in (FarRuntime, TableRuntime))
    with pytest.raises(AssertionError, match="on two devices"):
        table[0] + table[0].as_subclass(Elsewhere)
    step = step_of([1, 2], temperature=temperature, acceptance=acceptance, repetition_penalty=1.3)
    moved, right = far.start().propose(step), near.start().propose(step)
    assert moved.tokens == right.tokens
    if right.draft_probs is None:
        assert moved.draft_probs is None
    else:
        assert moved.draft_probs is not None
        assert type(moved.draft_probs) is torch.Tensor
        assert moved.draft_probs.equal(right.draft_probs)
        logits = table[right.tokens]
        assert accept(moved, logits, step.sampler) == accept(right, logits, step.sampler)
