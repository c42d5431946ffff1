"""Visibility per layer type, drawn as the documentation draws it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit_runtime import draw_rows, trees

from outpace.runtimes.masks import LAYER_TYPES, visible_keys
from outpace.tree import Tree

#     r - a - b
#       - c
FORK = Tree(tokens=[9, 1, 2, 3], parents=[-1, 0, 1, 0])


def drawn(
    layer_type: str,
    tree: Tree,
    *,
    start: int,
    num_keys: int,
    places: Sequence[int] | None = None,
    window: int = 0,
) -> str:
    seen = visible_keys(
        layer_type,
        [tree],
        starts=[start],
        places=[places or range(len(tree))],
        num_keys=num_keys,
        window=window,
    )
    return draw_rows(seen[0])


def check(got: str, picture: str) -> None:
    assert got == dedent(picture).strip().replace(" ", "")


def test_full_attention_sees_the_text_the_ancestors_and_itself() -> None:
    check(
        drawn("full_attention", FORK, start=2, num_keys=7, places=[0, 1, 2, 3, 4]),
        """
        x x x . . . .
        x x x x . . .
        x x x x x . .
        x x x . . x .
        x x . . . . x
        """,
    )


def test_a_chain_is_causal() -> None:
    got = drawn("full_attention", Tree.chain([1, 2, 3]), start=1, num_keys=4)
    check(
        got,
        """
        x x . .
        x x x .
        x x x x
        """,
    )


def test_scratch_is_masked_like_candidates() -> None:
    tree = Tree(tokens=[1, 2, 3, 4], parents=[-1, 0, 0, 2], num_candidates=2)
    check(
        drawn("full_attention", tree, start=0, num_keys=4),
        """
        x . . .
        x x . .
        x . x .
        x . x x
        """,
    )


def test_a_sliding_window_counts_positions_not_places() -> None:
    # c stands at r's depth + 1 although it is cached behind b: its window is a's.
    check(
        drawn("sliding_attention", FORK, start=4, num_keys=8, window=3),
        """
        . . x x x . . .
        . . . x x x . .
        . . . . x x x .
        . . . x x . . x
        """,
    )


def test_a_chunk_counts_positions_not_places() -> None:
    # Chunks of 3 positions: 0 1 2 | 3 4 5 | 6; r at 4, a and c at 5, b alone in the next one.
    check(
        drawn("chunked_attention", FORK, start=4, num_keys=8, window=3),
        """
        . . . x x . . .
        . . . x x x . .
        . . . . . . x .
        . . . x x . . x
        """,
    )


def test_places_with_gaps() -> None:
    check(
        drawn("full_attention", FORK, start=1, num_keys=8, places=[0, 1, 2, 5]),
        """
        x x . . . . . .
        x x x . . . . .
        x x x x . . . .
        x x . . . . x .
        """,
    )
    check(
        drawn("sliding_attention", FORK, start=1, num_keys=8, places=[0, 1, 2, 5], window=2),
        """
        x x . . . . . .
        . x x . . . . .
        . . x x . . . .
        . x . . . . x .
        """,
    )


def test_sequences_of_different_lengths() -> None:
    seen = visible_keys(
        "full_attention",
        [FORK, Tree.chain([7])],
        starts=[3, 1],
        places=[range(4), range(4)],
        num_keys=7,
        window=0,
    )
    check(
        draw_rows(seen[0]),
        """
        x x x x . . .
        x x x x x . .
        x x x x x x .
        x x x x . . x
        """,
    )
    check(
        draw_rows(seen[1]),
        """
        x x . . . . .
        x . x . . . .
        x . . x . . .
        x . . . x . .
        """,
    )


def by_definition(
    layer_type: str, tree: Tree, start: int, places: Sequence[int], num_keys: int, window: int
) -> list[list[bool]]:
    """Key by key, from the sentence in the documentation."""
    holder = {start + place: node for node, place in enumerate(places[: len(tree)])}
    rows = []
    for node in range(len(tree)):
        own, row = start + tree.depths[node], []
        for key in range(num_keys):
            if key < start:
                position, seen = key, True
            elif key in holder:
                position, seen = start + tree.depths[holder[key]], holder[key] in tree.path(node)
            else:
                position, seen = 0, False
            if layer_type == "sliding_attention":
                seen = seen and own - position < window
            elif layer_type == "chunked_attention":
                seen = seen and own // window == position // window
            row.append(seen)
        rows.append(row)
    return rows


@given(
    layer_type=st.sampled_from(LAYER_TYPES),
    tree=trees(max_nodes=8),
    start=st.integers(0, 20),
    gap=st.integers(1, 3),
    window=st.integers(1, 12),
    spare=st.integers(0, 3),
)
def test_agrees_with_the_definition(
    layer_type: str, tree: Tree, start: int, gap: int, window: int, spare: int
) -> None:
    n = len(tree)
    places = [node * gap for node in range(n + spare)]
    num_keys = start + places[-1] + 4
    seen = visible_keys(
        layer_type, [tree], starts=[start], places=[places], num_keys=num_keys, window=window
    )[0]
    assert seen[:n].tolist() == by_definition(layer_type, tree, start, places, num_keys, window)
    assert seen[range(n + spare), start + np.array(places)].all(), "a row sees nothing: NaN"
    assert not seen[n:, start + np.array(places[:n])].any(), "a spare row sees a node"


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_control_a_causal_mask_is_told_from_a_trees(layer_type: str) -> None:
    causal = draw_rows(np.tril(np.ones((4, 8), dtype=np.bool_), 4))
    assert drawn(layer_type, FORK, start=4, num_keys=8, window=8) != causal
    chain = drawn("full_attention", Tree.chain([1, 2, 3, 4]), start=4, num_keys=8)
    assert chain == causal
