"""A node's logits have the same bits in a tree, a chain, alone, in a batch, on every path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit_runtime import cache_text, leaves, run, run_one, text_of, token_by_token, trees
from native_kit import native
from torch import Tensor

from outpace.runtimes.native import NativeRuntime, kernel_names
from outpace.tree import Tree

pytestmark = pytest.mark.skipif(not kernel_names(), reason="built without a compiler")

FAMILIES = ["llama", "mistral", "qwen3"]
# Lengths at and across pages of 256 and strips of 32 keys; the longest ones share out their tiles.
LENGTHS = st.sampled_from([1, 5, 31, 32, 63, 250, 255, 256, 257, 511, 600])


def alone(runtime: NativeRuntime, text: Sequence[int], tree: Tree) -> Tensor:
    """`[nodes, vocab]`: each node by plain decoding of its own path."""
    rows: list[Tensor | None] = [None] * len(tree)
    sequence = cache_text(runtime, text)
    for node in reversed(range(len(tree))):
        if rows[node] is None:
            path = tree.path(node)
            runtime.rewind(sequence, text)
            found = token_by_token(runtime, sequence, [tree.tokens[i] for i in path])
            for i, row in zip(path, found, strict=True):
                rows[i] = row
    return torch.stack([row for row in rows if row is not None])


@settings(max_examples=15)
@given(tree=trees(max_nodes=14), length=LENGTHS, name=st.sampled_from(FAMILIES))
def test_a_node_in_a_tree_equals_the_node_alone(tree: Tree, length: int, name: str) -> None:
    runtime = native(name)
    text = text_of(length)
    want = alone(runtime, text, tree)
    assert torch.equal(run_one(runtime, cache_text(runtime, text), tree), want)


@settings(max_examples=8)
@given(
    forest=st.lists(st.tuples(trees(max_nodes=9), LENGTHS), min_size=2, max_size=4),
    name=st.sampled_from(FAMILIES),
)
def test_neighbours_in_a_batch_change_no_bit(forest: list[tuple[Tree, int]], name: str) -> None:
    runtime = native(name)
    solo = [
        run_one(runtime, cache_text(runtime, text_of(length, first=i)), tree)
        for i, (tree, length) in enumerate(forest)
    ]
    batch = {
        cache_text(runtime, text_of(length, first=i)): tree
        for i, (tree, length) in enumerate(forest)
    }
    for want, output in zip(solo, run(runtime, batch).values(), strict=True):
        assert torch.equal(output.logits, want)
        assert torch.equal(runtime.project(output.hidden), want), "another sequence's states"


@settings(max_examples=6)
@given(tree=trees(max_nodes=40), length=LENGTHS, name=st.sampled_from(FAMILIES))
def test_threads_and_instruction_sets_change_no_bit(tree: Tree, length: int, name: str) -> None:
    text = text_of(length)
    found = []
    for kernels in kernel_names():
        for threads in (1, 2, 5):  # more than there may be cores, too
            runtime = native(name, kernels=kernels, threads=threads)
            found.append(run_one(runtime, cache_text(runtime, text), tree))
    assert all(torch.equal(logits, found[0]) for logits in found)


@settings(max_examples=10)
@given(data=st.data(), length=LENGTHS, name=st.sampled_from(FAMILIES))
def test_a_kept_branch_leaves_the_cache_of_plain_decoding(
    data: st.DataObject, length: int, name: str
) -> None:
    runtime = native(name)
    text = text_of(length)
    tree = data.draw(trees(max_nodes=12))
    path = tree.path(data.draw(st.sampled_from(leaves(tree))))
    sequence = cache_text(runtime, text)
    run_one(runtime, sequence, tree)
    runtime.keep(sequence, path)
    after = data.draw(trees(max_nodes=6))
    plain = cache_text(runtime, text)
    token_by_token(runtime, plain, [tree.tokens[i] for i in path])
    assert torch.equal(run_one(runtime, sequence, after), run_one(runtime, plain, after))


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_the_pieces_of_a_prompt_change_no_bit(chunk: int) -> None:
    whole, parts = native(), native(prefill_chunk=chunk)
    text = text_of(290)
    tree = Tree.chain([3, 4])
    want = run_one(whole, cache_text(whole, text), tree)
    assert torch.equal(run_one(parts, cache_text(parts, text), tree), want)


def test_bits_tell_texts_apart() -> None:
    """The equalities above would fail: another ancestor, another position, another branch."""
    runtime = native()
    tree = Tree(tokens=[9, 4, 7, 4], parents=[-1, 0, 0, 2])
    rows = run_one(runtime, cache_text(runtime, text_of(40)), tree)
    assert not torch.equal(rows[1], rows[3])  # the same token one deeper
    other = run_one(runtime, cache_text(runtime, [1, *text_of(40)[1:]]), tree)
    assert not torch.equal(rows[0], other[0])
