"""Which cached keys a tree's nodes see, for each kind of attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from outpace.tree import Tree

# The layer types of transformers' configs whose visibility depends on positions alone.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def visible_keys(
    layer_type: str,
    trees: Sequence[Tree],
    *,
    starts: Sequence[int],
    places: Sequence[Sequence[int]],
    num_keys: int,
    window: int,
) -> npt.NDArray[np.bool_]:
    """`[trees, rows, keys]`: True where a row's node sees a key.

    Node i of a tree is cached at index `start + places[i]` and stands at position `start + depth`.
    With two cached keys, root r, its children a and c, b under a, one spare row, dense places:

            0 1 r a b c .
          r x x x
          a x x x x
          b x x x x x
          c x x x . . x
          . x x . . . . x      a spare row sees the text and itself; nobody reads it

    Args:
        layer_type: one of `LAYER_TYPES`.
        trees: one a sequence.
        starts: number of cached keys of each sequence.
        places: where each row is cached, from its start on; rows behind the nodes are spare.
        num_keys: keys that attention reads.
        window: keys of a sliding window, or of a chunk; unused by full attention.
    """
    rows = len(places[0])
    visible = np.zeros((len(trees), rows, num_keys), dtype=np.bool_)
    for out, tree, start, where in zip(visible, trees, starts, places, strict=True):
        n = len(tree)
        index = start + np.asarray(where)
        out[:, :start] = True
        out[:n, index[:n]] = tree.mask()
        if layer_type != "full_attention":
            depths = np.array([*tree.depths, *([0] * (rows - n))])
            position = np.arange(num_keys)
            position[index] = start + depths
            own = (start + depths)[:, None]
            if layer_type == "sliding_attention":
                out &= position > own - window
            else:
                out &= position // window == own // window
        spare = np.arange(n, rows)
        out[spare, index[n:]] = True
    return visible
