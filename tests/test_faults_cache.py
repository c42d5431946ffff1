"""Faults of group B: the key-value cache and positions. The numbers are the issue list's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from kit_runtime import PATHS
from scripted import Bushy, HalfRight, Scripted
from tiny import FAMILIES, VOCAB, build, serve, shared

from outpace.llm import LLM
from outpace.runtimes.base import Pass
from outpace.runtimes.cache import SlotLayer
from outpace.runtimes.transformers import TransformersRuntime
from outpace.tree import Tree

K = 4
NUM = 16
CLOSE = 1e-4


def prompt_of(length: int) -> list[int]:
    return [(5 + 11 * i) % VOCAB for i in range(length)]


def check_committed_logits(
    llm: LLM, logits: oracle.Logits, prompt: Sequence[int], right: oracle.Decoded
) -> None:
    """Ids are the oracle's, and so are the logits of every committed step, to 1e-4."""
    method = llm.method
    assert isinstance(method, Scripted)
    result = llm.generate(list(prompt), max_new_tokens=NUM)
    oracle.assert_same(result.tokens, right)
    text = list(prompt)
    for outcome in method.outcomes:
        for i, node in enumerate(outcome.path if outcome.tokens else []):
            want = logits(text + list(outcome.tokens[:i]))
            got = outcome.output.logits[outcome.tree.rows.index(node)].double().numpy()
            assert np.abs(got - want).max() < CLOSE * max(1.0, np.abs(want).max())
        text += outcome.tokens
    assert len(text) > len(prompt) + NUM // 2, "the proposer was not told what happened"


# 11: positions and cache indices after partial acceptance


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("family", FAMILIES)
def test_11_every_committed_step_is_a_fresh_computation(family: str, length: int) -> None:
    model, prompt = shared(family), prompt_of(length)
    logits = oracle.recompute(model)
    right = oracle.greedy(logits, prompt, max_new_tokens=NUM)
    text = prompt + right.tokens
    rights = [0, 3, 1, K, 2]  # partial acceptance of every size, in no simple order
    llm = serve(model, HalfRight(text, rights=rights, vocab_size=VOCAB, k=K))
    assert llm.info()["trees"] == ("paths" if family in PATHS else "tree"), "the guard fell back"
    check_committed_logits(llm, logits, prompt, right)
    llm = llm.with_method(Bushy(text, rights=rights[1:], vocab_size=VOCAB))
    check_committed_logits(llm, logits, prompt, right)


def check_caught(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Any) -> None:
    """Breaks a function after the check at load has passed, and sees the test fail."""
    model, prompt = shared("llama"), prompt_of(17)
    logits = oracle.recompute(model)
    right = oracle.greedy(logits, prompt, max_new_tokens=NUM)
    llm = serve(model, Bushy(prompt + right.tokens, rights=[3, 1, 2], vocab_size=VOCAB))
    monkeypatch.setattr(place, name, broken)
    with pytest.raises(AssertionError):
        check_committed_logits(llm, logits, prompt, right)


def test_11_control_a_cache_that_is_not_compacted_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_caught(monkeypatch, SlotLayer, "compact", lambda *_: None)


def test_11_control_a_causal_mask_over_a_tree_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(self: Tree) -> Any:
        return np.tril(np.ones((len(self), len(self)), dtype=np.bool_))

    check_caught(monkeypatch, Tree, "mask", causal)


def test_11_control_positions_by_index_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TransformersRuntime._run

    def by_index(self: Any, plan: Any, ids: Any, positions: Any, *rest: Any) -> Any:
        shifted = [list(range(row[0], row[0] + len(row))) for row in positions]
        return run(self, plan, ids, shifted, *rest)

    check_caught(monkeypatch, TransformersRuntime, "_run", by_index)


# 12: rolling back


def step(runtime: TransformersRuntime, sequence: int, tokens: Sequence[int]) -> torch.Tensor:
    """Caches a chain and gives the logits after it."""
    tree = Tree.chain(tokens)
    work = Pass(sequence=sequence, tree=tree, rows=[len(tree) - 1])
    row = runtime.forward([work])[0].logits[0].clone()
    runtime.keep(sequence, range(len(tree)))
    return row


ROLL_BACK = ["llama", "gpt2", "mistral", "gemma3", "bloom", "falcon-alibi", "mixtral"]


@pytest.mark.parametrize("family", ROLL_BACK)
@pytest.mark.parametrize(
    ("target", "left"),
    [
        ([], 0),
        ([9], 0),
        ([1], 1),
        ([1, 2, 9, 4], 2),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3, 4, 5], 4),
        ([9, 9, 9, 9, 9, 9, 9], 0),
    ],
)
def test_12_rewind_leaves_the_common_prefix_and_nothing_else(
    family: str, target: list[int], left: int
) -> None:
    runtime = TransformersRuntime(shared(family), exactness="ordinary")
    sequence = runtime.open()
    step(runtime, sequence, [1, 2, 3, 4])
    assert runtime.rewind(sequence, target) == left
    assert list(runtime.tokens(sequence)) == target[:left]
    after = step(runtime, sequence, [*target[left:], 7])
    fresh = oracle.recompute(shared(family))([*target, 7])
    assert np.abs(after.double().numpy() - fresh).max() < CLOSE


@pytest.mark.parametrize("family", ROLL_BACK)
def test_12_what_is_not_kept_is_gone(family: str) -> None:
    runtime = TransformersRuntime(shared(family), exactness="ordinary")
    sequence = runtime.open()
    step(runtime, sequence, [1, 2, 3, 4])
    tree = Tree.chain([5, 6, 7, 8, 9, 10, 11])
    runtime.forward([Pass(sequence=sequence, tree=tree, rows=[0])])
    runtime.keep(sequence, [0])
    assert list(runtime.tokens(sequence)) == [1, 2, 3, 4, 5]
    after = step(runtime, sequence, [12])
    fresh = oracle.recompute(shared(family))([1, 2, 3, 4, 5, 12])
    assert np.abs(after.double().numpy() - fresh).max() < CLOSE


@pytest.mark.parametrize("path", [[1], [0, 2], [0, 1, 3], [0, 1, 2, 3, 4], [0, 5], [-1]])
def test_12_only_a_path_of_candidates_can_be_kept(path: list[int]) -> None:
    runtime = TransformersRuntime(shared("llama"), exactness="ordinary")
    sequence = runtime.open()
    tree = Tree(tokens=[1, 2, 3, 4], parents=[-1, 0, 1, 0], num_candidates=3)
    runtime.forward([Pass(sequence=sequence, tree=tree, rows=[0])])
    with pytest.raises(ValueError):
        runtime.keep(sequence, path)


def test_12_control_a_stale_key_is_seen() -> None:
    runtime = TransformersRuntime(shared("llama"), exactness="ordinary")
    sequence = runtime.open()
    step(runtime, sequence, [1, 2, 3, 4])  # nothing is rolled back
    after = step(runtime, sequence, [7])
    fresh = oracle.recompute(shared("llama"))([7])
    assert np.abs(after.double().numpy() - fresh).max() > 100 * CLOSE


@pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized", "dynamic"])
def test_12_the_models_own_kind_of_cache_does_not_matter(implementation: str) -> None:
    model = build("llama")
    model.generation_config.cache_implementation = implementation
    prompt = prompt_of(5)
    right = oracle.greedy(oracle.recompute(model), prompt, max_new_tokens=NUM)
    method = HalfRight(prompt + right.tokens, rights=[0, 3, 1], vocab_size=VOCAB, k=K)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oracle.assert_same(serve(model, method).generate(prompt, max_new_tokens=NUM).tokens, right)
