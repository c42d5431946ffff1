from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.tree import Tree


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    n = draw(st.integers(1, 12))
    m = draw(st.integers(1, n))
    parents = [-1] + [draw(st.integers(0, min(i, m) - 1 if i < m else i - 1)) for i in range(1, n)]
    return Tree(
        tokens=draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
        parents=parents,
        num_candidates=m,
        num_scratch_rows=draw(st.integers(0, n - m)),
    )


def ancestors(tree: Tree, node: int) -> set[int]:
    return set() if node == -1 else {node} | ancestors(tree, tree.parents[node])


def check_mask(tree: Tree, mask: Callable[[], np.ndarray]) -> None:
    seen = mask()
    assert seen.shape == (len(tree), len(tree))
    for row in range(len(tree)):
        assert set(np.flatnonzero(seen[row])) == ancestors(tree, row)


def test_mask_of_the_docstring() -> None:
    tree = Tree(tokens=[7, 1, 2, 3], parents=[-1, 0, 1, 0])
    picture = ["x...", "xx..", "xxx.", "x..x"]
    assert ["".join(".x"[int(v)] for v in row) for row in tree.mask()] == picture


@given(trees())
def test_mask_shows_ancestors_and_self(tree: Tree) -> None:
    check_mask(tree, tree.mask)


def test_control_a_causal_mask_over_branches_is_caught() -> None:
    tree = Tree(tokens=[7, 1, 2], parents=[-1, 0, 0])
    with pytest.raises(AssertionError):
        check_mask(tree, lambda: np.tril(np.ones((3, 3), dtype=np.bool_)))


@given(trees())
def test_depths_paths_and_children_agree(tree: Tree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node
        assert [tree.parents[i] for i in path[1:]] == path[:-1]
        assert tree.depths[node] == len(path) - 1
        assert tree.path_tokens(node) == [tree.tokens[i] for i in path[1:]]
        children = tree.children(node)
        assert children == sorted(children)
        candidates = range(1, tree.num_candidates)
        assert set(children) == {i for i in candidates if tree.parents[i] == node}


@given(trees())
def test_rows_are_the_candidates_and_the_last_scratch_nodes(tree: Tree) -> None:
    n, m, k = len(tree), tree.num_candidates, tree.num_scratch_rows
    assert tree.rows == list(range(m)) + list(range(n - k, n))


def test_a_chain_is_a_tree_with_one_branch() -> None:
    q = torch.full((3, 4), 0.25)
    tree = Tree.chain([5, 6, 7], draft_probs=q)
    assert tree == Tree(tokens=[5, 6, 7], parents=[-1, 0, 1], draft_probs=q)
    assert tree.depths == [0, 1, 2] and tree.num_candidates == 3
    assert len(Tree.chain([5])) == 1
    assert tree.draft_probs is q


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), st.integers(1, 40))
def test_from_paths_merges_prefixes_within_the_budget(
    paths: list[list[int]], max_nodes: int
) -> None:
    tree = Tree.from_paths(9, paths, max_nodes=max_nodes)
    assert tree.tokens[0] == 9
    spelled = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
    assert len(set(spelled)) == len(spelled), "a prefix stands twice"
    wanted = list(dict.fromkeys(tuple(p[:i]) for p in [[], *paths] for i in range(len(p) + 1)))
    assert spelled == wanted[:max_nodes]


BROKEN = {
    "empty": dict(tokens=[], parents=[]),
    "fewer parents": dict(tokens=[1, 2], parents=[-1]),
    "no root": dict(tokens=[1], parents=[0]),
    "two roots": dict(tokens=[1, 2], parents=[-1, -1]),
    "its own parent": dict(tokens=[1, 2], parents=[-1, 1]),
    "a later parent": dict(tokens=[1, 2, 3], parents=[-1, 2, 0]),
    "no candidates": dict(tokens=[1], parents=[-1], num_candidates=0),
    "more candidates than nodes": dict(tokens=[1], parents=[-1], num_candidates=2),
    "more scratch rows than scratch": dict(
        tokens=[1, 2], parents=[-1, 0], num_candidates=1, num_scratch_rows=2
    ),
}


@pytest.mark.parametrize("fields", BROKEN.values(), ids=BROKEN)
def test_what_is_no_tree_is_an_error(fields: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError):
        Tree(**fields)


def test_scratch_may_hang_from_candidates_and_from_scratch() -> None:
    tree = Tree(tokens=[1, 2, 3, 4], parents=[-1, 0, 1, 2], num_candidates=2, num_scratch_rows=1)
    assert tree.rows == [0, 1, 3]
    assert tree.children(1) == []
    assert tree.depths == [0, 1, 2, 3]
