"""Faults of group L: what is computed and kept beside the weights. The numbers are the list's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit_runtime import head_rows
from scripted import Bushy, HalfRight, Perfect, Scripted
from tiny import VOCAB, build, serve, shared
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.llm import LLM
from outpace.proposers.base import Method
from outpace.proposers.draft import Draft
from outpace.runtimes.transformers import TransformersRuntime

FAMILIES = ["llama", "llama-tied", "gpt2", "gemma3", "bloom", "mixtral"]


def prompt_of(length: int) -> list[int]:
    return [(5 + 11 * i) % VOCAB for i in range(length)]


# 56: rows of logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [2, 40])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_56_the_head_computes_the_rows_that_somebody_reads(
    family: str, length: int, k: int
) -> None:
    model, prompt = shared(family), prompt_of(length)
    text = serve(model).generate(prompt, max_new_tokens=16).tokens
    llm = serve(model, HalfRight([*prompt, *text], rights=[1, 0, k], vocab_size=VOCAB, k=k))
    with head_rows(model) as rows:
        result = llm.generate(prompt, max_new_tokens=16)
    assert result.tokens == text
    verified = rows[1:]
    assert rows[0] == 0, "a prompt's rows choose no token: its last one is the first root"
    assert len(verified) == result.stats.steps
    assert verified[0] == k + 1
    assert sum(verified) == result.stats.drafted + result.stats.steps


def test_56_lookaheads_scratch_has_one_row_of_logits_a_column() -> None:
    model = shared("llama")
    llm = serve(model, "lookahead", window_size=5, ngram_size=4)
    with head_rows(model) as rows:
        result = llm.generate(prompt_of(10), max_new_tokens=16)
    # Candidates and the root, and of the window's (ngram - 2) deeper levels the last one only.
    assert sum(rows) <= result.stats.drafted + result.stats.steps * (1 + 5)


@contextmanager
def largest_float() -> Iterator[list[int]]:
    """Elements of the largest floating-point tensor that any operation makes."""
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    largest[0] = max(largest[0], leaf.numel())
            return out

    with Watch():
        yield largest


def test_56_no_logits_of_a_whole_prompt() -> None:
    """A prompt of 200 tokens and a vocabulary of 5000: never a tensor of 200 x 5000."""
    model = build("llama", vocab_size=5000)
    llm = serve(model, "lookup")
    with largest_float() as largest:
        llm.generate([(7 * i) % 5000 for i in range(200)], max_new_tokens=4)
    assert largest[0] <= model.lm_head.weight.numel() == 32 * 5000
    with largest_float() as largest, torch.inference_mode():
        model(torch.tensor([[(7 * i) % 5000 for i in range(200)]]), use_cache=False)
    assert largest[0] >= 200 * 5000, "the control: transformers does so unless it is asked not to"


# 56: what is kept


def tensor_bytes(*models: torch.nn.Module) -> int:
    return sum(
        p.numel() * p.element_size() for m in models for p in (*m.parameters(), *m.buffers())
    )


def test_56_reported_memory_is_that_of_the_tensors() -> None:
    target, small = build("llama"), build("llama", seed=1, hidden_size=16)
    draft = TransformersRuntime(small, exactness="ordinary")
    llm = serve(target, Draft(runtime=draft))
    llm.generate(prompt_of(20), max_new_tokens=20)
    memory = llm.info()["memory"]
    assert memory["weights"] == pytest.approx(tensor_bytes(target), rel=0.1)
    cache = draft.memory()["cache"]
    assert cache > 0
    assert memory["method"] == pytest.approx(tensor_bytes(small) + cache, rel=0.01)
    # One slot, 64 keys, 2 layers, keys and values, 2 heads of 8, fp32.
    assert memory["cache"] == 64 * 2 * 2 * 2 * 8 * 4
    assert draft.memory()["cache"] == 64 * 2 * 2 * 2 * 4 * 4


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def methods(text: list[int]) -> dict[str, Method | str]:
    small = build("llama", seed=1, hidden_size=16)
    return {
        "plain": "plain",
        "lookup": "lookup",
        "lookahead": "lookahead",
        "draft": Draft(runtime=TransformersRuntime(small, exactness="ordinary")),
        "perfect": Perfect(text),
        "bushy": Bushy(text, rights=[3, 1], vocab_size=VOCAB),
    }


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("name", methods([]))
def test_56_repeated_calls_need_no_more_memory(family: str, name: str) -> None:
    prompt = prompt_of(20)
    llm = serve(shared(family))
    text = llm.generate(prompt, max_new_tokens=20).tokens
    method = methods([*prompt, *text])[name]
    llm = llm.with_method(method)
    sizes = []
    for calls in (2, 8):
        for _ in range(calls):
            llm.generate(prompt, max_new_tokens=20)
            if isinstance(method, Scripted):  # the test's own recording
                method.outcomes.clear()
        sizes.append(live_bytes())
    assert sizes[0] == sizes[1], "it grows"
    llm.close()
    cache = llm.model.runtime.memory()["cache"]
    llm.generate(prompt, max_new_tokens=20)
    assert llm.model.runtime.memory()["cache"] == cache, "slots are used again"


def test_56_control_a_leak_is_seen() -> None:
    llm: LLM = serve(shared("llama"), Perfect())
    sizes, kept = [], []
    for _ in range(2):
        llm.generate(prompt_of(20), max_new_tokens=5)
        kept.append(torch.ones(1000))
        sizes.append(live_bytes())
    assert sizes[0] + 4000 <= sizes[1]
    assert len(kept) == 2


def test_56_dropped_streams_leave_nothing() -> None:
    llm = serve(shared("llama"), "lookahead")
    sizes = []
    for streams in (2, 50):
        for _ in range(streams):
            stream = llm.stream(prompt_of(20), max_new_tokens=100)
            for _ in range(3):
                next(stream)
            del stream
        sizes.append(live_bytes())
    assert sizes[0] == sizes[1]
