"""Where a tree's nodes are cached so that a branch has the bits of a chain.

Attention sums over keys in vector lanes and blocks. A key that is not where its position says
falls into another lane, and the sum rounds differently. Here the first branch
stands at its natural index (start + depth); a node of another branch is moved by whole vectors
within its own block of keys, so every lane adds the same numbers in the same order, zeros aside:

    start = 64, tree r - a - b, r - c - d, vectors of 16 lanes, blocks of 64 keys

    index  64 65 66 .. 81 82        c (depth 1) stands at 64 + 1 + 16,
           r  a  b     c  d         d (depth 2) at 64 + 2 + 16
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.tree import Tree

LANES = 16
BLOCK = 64


def place_aligned(tree: Tree, start: int) -> list[int | None]:
    """Offsets from `start`, the number of cached keys; None for candidates without a place.

    Scratch nodes, whose bits decide nothing, stand densely behind the candidates.
    """
    shifts: list[int | None] = [0]
    taken = {0}
    offsets: list[int | None] = [0]
    for node in range(1, tree.num_candidates):
        shift, depth = shifts[tree.parents[node]], tree.depths[node]
        while shift is not None and depth + shift * LANES in taken:
            shift += 1
            here = start + depth
            if here // BLOCK != (here + shift * LANES) // BLOCK:
                shift = None
        if shift:  # inherited from the parent: its own block may end here
            here = start + depth
            if here // BLOCK != (here + shift * LANES) // BLOCK:
                shift = None
        shifts.append(shift)
        offsets.append(None if shift is None else depth + shift * LANES)
        if shift is not None:
            taken.add(depth + shift * LANES)
    behind = max(taken) + 1
    offsets.extend(range(behind, behind + len(tree) - tree.num_candidates))
    return offsets


def prune(tree: Tree, keep: Sequence[bool]) -> Tree:
    """The tree without the candidates that are not kept; their descendants must go too.

    The scratch goes as a whole where it hangs from one of them.
    """
    if all(keep):
        return tree
    n = tree.num_candidates
    whole = all(keep[parent] for parent in tree.parents[n:])
    nodes = [node for node in range(len(tree)) if (keep[node] if node < n else whole)]
    index = {node: i for i, node in enumerate(nodes)}
    return Tree(
        tokens=[tree.tokens[node] for node in nodes],
        parents=[-1, *(index[tree.parents[node]] for node in nodes[1:])],
        draft_probs=None if tree.draft_probs is None else tree.draft_probs[nodes],
        num_candidates=sum(keep[:n]),
        num_scratch_rows=tree.num_scratch_rows if whole else 0,
    )
