"""Where nodes are cached when a branch must have the bits of a chain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit_runtime import trees

from outpace.runtimes.placement import BLOCK, LANES, place_aligned, prune
from outpace.tree import Tree


def pictured(tree: Tree, places: Sequence[int | None], start: int, names: str) -> str:
    """Blocks of keys, a line a vector of lanes; dots are free, = is cached text."""
    first = start // BLOCK * BLOCK
    holder = {
        start + place: name for place, name in zip(places, names, strict=True) if place is not None
    }
    last = max(holder)
    lines = []
    for vector in range(first, last + 1, LANES):
        keys = range(vector, vector + LANES)
        lines.append("".join("=" if k < start else holder.get(k, ".") for k in keys))
    return "\n".join(lines)


def test_the_documented_picture() -> None:
    tree = Tree(tokens=[0] * 5, parents=[-1, 0, 1, 0, 3])
    places = place_aligned(tree, 64)
    assert places == [0, 1, 2, 17, 18]
    assert pictured(tree, places, 64, "rabcd") == "rab.............\n.cd............."


def test_a_third_branch_takes_the_next_vector_and_its_children_follow() -> None:
    #  r - a - b
    #    - c - d
    #        - e
    #    - f
    tree = Tree(tokens=[0] * 7, parents=[-1, 0, 1, 0, 3, 3, 0])
    places = place_aligned(tree, 70)
    assert pictured(tree, places, 70, "rabcdef") == "\n".join(
        ["======rab.......", ".......cd.......", ".......fe......."]
    )


def test_a_branch_without_room_in_its_block_has_no_place() -> None:
    #  r - a - b
    #    - c - d
    tree = Tree(tokens=[0] * 5, parents=[-1, 0, 1, 0, 3])
    assert place_aligned(tree, 63) == [0, 1, 2, 17, 18], "c begins a block"
    assert place_aligned(tree, 110) == [0, 1, 2, 17, None], "d is in the block's last vector"
    assert place_aligned(tree, 111) == [0, 1, 2, None, None], "so is c; d hangs from nothing"


def test_a_branch_ends_where_its_block_ends() -> None:
    # r at 94, a and b; the other branch starts at 95 + 16 and reaches 111 + 16, the block's end.
    tree = Tree(tokens=[0] * 33, parents=[-1, 0, 1, 0, *range(3, 32)])
    branch = place_aligned(tree, 94)[3:]
    assert branch == [*range(1 + LANES, 18 + LANES), *[None] * 13]


def test_scratch_stands_behind_the_candidates() -> None:
    tree = Tree(tokens=[0] * 6, parents=[-1, 0, 0, 0, 3, 0], num_candidates=3)
    assert place_aligned(tree, 64) == [0, 1, 17, 18, 19, 20]


@given(start=st.integers(0, 300), length=st.integers(1, 100))
def test_a_chain_stands_where_plain_decoding_puts_it(start: int, length: int) -> None:
    assert place_aligned(Tree.chain([0] * length), start) == list(range(length))


def check_alignment(tree: Tree, start: int, places: Sequence[int | None]) -> None:
    """What makes the bits of a branch those of a chain."""
    placed = [place for place in places if place is not None]
    assert len(set(placed)) == len(placed), "two nodes in one place"
    shifts: dict[int, int] = {}
    for node in range(tree.num_candidates):
        place, depth = places[node], tree.depths[node]
        if place is None:
            continue
        natural = start + depth
        assert place % LANES == depth % LANES, "another lane"
        assert (start + place) // BLOCK == natural // BLOCK, "another block"
        shifts[node] = (place - depth) // LANES
        if node:
            assert tree.parents[node] in shifts, "a node hangs from one without a place"
            assert shifts[node] >= shifts[tree.parents[node]], "keys of a lane change their order"


@given(tree=trees(max_nodes=24), start=st.integers(0, 200))
def test_lanes_blocks_and_order_are_kept(tree: Tree, start: int) -> None:
    check_alignment(tree, start, place_aligned(tree, start))


@given(tree=trees(max_nodes=24, max_scratch=0), start=st.integers(0, 200))
def test_only_what_has_no_place_is_left_out(tree: Tree, start: int) -> None:
    places = place_aligned(tree, start)
    for node, place in enumerate(places):
        if place is not None or places[tree.parents[node]] is None:
            continue
        depth = tree.depths[node]
        lowest = places[tree.parents[node]] - (depth - 1)  # type: ignore[operator]
        block_end = (start + depth) // BLOCK * BLOCK + BLOCK - start
        free = set(range(depth + lowest, block_end, LANES)) - set(places[:node])
        assert not free, f"node {node} could stand at {free}"


def test_control_dense_places_are_seen() -> None:
    tree = Tree(tokens=[0] * 3, parents=[-1, 0, 0])
    with pytest.raises(AssertionError, match="lane"):
        check_alignment(tree, 0, [0, 1, 2])
    with pytest.raises(AssertionError, match="block"):
        check_alignment(tree, 40, [0, 1, 1 + 2 * LANES])
    with pytest.raises(AssertionError, match="hangs"):
        check_alignment(Tree(tokens=[0] * 3, parents=[-1, 0, 1]), 0, [0, None, 2])


def test_prune_renumbers_and_keeps_what_belongs_to_the_nodes() -> None:
    #  r - a - b        without a and b: r - c - s
    #    - c - s
    tree = Tree(
        tokens=[10, 11, 12, 13, 14],
        parents=[-1, 0, 1, 0, 3],
        draft_probs=torch.eye(5),
        num_candidates=4,
        num_scratch_rows=1,
    )
    rest = prune(tree, [True, False, False, True, True])
    assert (rest.tokens, rest.parents) == ([10, 13, 14], [-1, 0, 1])
    assert (rest.num_candidates, rest.num_scratch_rows) == (2, 1)
    assert rest.draft_probs is not None
    assert torch.equal(rest.draft_probs, torch.eye(5)[[0, 3, 4]])
    assert prune(tree, [True] * 5) is tree


def test_scratch_below_a_dropped_candidate_goes_as_a_whole() -> None:
    #  r - a
    #    - b - s - t        and u below the root
    tree = Tree(
        tokens=[0, 1, 2, 7, 8, 9],
        parents=[-1, 0, 0, 2, 3, 0],
        num_candidates=3,
        num_scratch_rows=2,
    )
    assert prune(tree, [True, True, False, True, True, True]) == Tree.chain([0, 1])
    kept = prune(tree, [True, False, True, True, True, True])
    assert (kept.tokens, kept.parents) == ([0, 2, 7, 8, 9], [-1, 0, 1, 2, 0])
    assert (kept.num_candidates, kept.num_scratch_rows) == (2, 2)
