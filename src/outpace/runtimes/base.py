"""What the engine needs of a model: run trees, keep a path, rewind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outpace.tree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXACTNESS = ("auto", "same-shape", "ordinary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sequence's share of a forward.

    Args:
        sequence: an id from `Runtime.open`.
        tree: its root is the first token that is not cached yet.
        rows: the nodes whose logits are wanted; none during prefill.
    """

    sequence: int
    tree: Tree
    rows: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a forward gives for one `Pass`.

    Args:
        logits: `[rows, vocab]` in the model's dtype, one row for each of `Pass.rows`, in order.
        hidden: `[nodes, hidden]`, the input of the LM head (after the final norm).
    """

    logits: Tensor
    hidden: Tensor


class Runtime(ABC):
    """Owns a model's weights and one key-value cache per open sequence.

    Attributes:
        vocab_size: width of the logits, padding included.
        hidden_size: width of the hidden state that the LM head reads.
        max_context: most tokens that a sequence may hold.
        max_nodes: most nodes of one tree.
        prefill_chunk: prompts are cached in pieces that end at multiples of so many tokens.
        branches: whether `fit` keeps side branches of a tree.
        same_shape: every decode forward has one shape, so a row's bits do not depend on it.
        device, dtype: where and in what the model computes.
    """

    vocab_size: int
    hidden_size: int
    max_context: int
    max_nodes: int
    prefill_chunk: int
    branches: bool = True
    same_shape: bool
    device: torch.device
    dtype: torch.dtype

    @property
    def exactness(self) -> str:
        """How alike a token's logits are in different forwards: "ordinary" is up to rounding."""
        return "same-shape" if self.same_shape else "ordinary"

    @abstractmethod
    def open(self) -> int:
        """Starts an empty sequence and gives its id."""

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Frees a sequence's cache; the id may be given out again."""

    @abstractmethod
    def tokens(self, sequence: int) -> Sequence[int]:
        """The committed tokens, those whose keys and values are cached."""

    @abstractmethod
    def max_depth(self, sequence: int) -> int:
        """The deepest node that the sequence's next tree may have."""

    def fit(self, sequence: int, tree: Tree) -> Tree:
        """The part of a proposal that the runtime can verify exactly; here all of it."""
        return tree

    def next_chunk(self, sequence: int, tokens: Sequence[int]) -> Tree:
        """The next piece of `tokens` to cache, cut at a fixed absolute position.

        So a reused prefix has the bits that a cold start computes.
        """
        start = len(self.tokens(sequence))
        end = min(len(tokens), (start // self.prefill_chunk + 1) * self.prefill_chunk)
        return Tree.chain(tokens[start:end])

    @abstractmethod
    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        """Runs each tree over its sequence's cache; call `keep` for each before the next one.

        Raises:
            ValueError: for a tree with more nodes than `max_nodes` that is not a chain, or one
                that runs past `max_context`.
        """

    def check_pass(self, work: Pass) -> None:
        """Refuses a pass that no runtime can run.

        Raises:
            ValueError: as `forward` does.
        """
        start, tree = len(self.tokens(work.sequence)), work.tree
        if work.rows and len(tree) > self.max_nodes and max(tree.parents) != len(tree) - 2:
            raise ValueError(f"a tree of {len(tree)} nodes, at most {self.max_nodes} are possible")
        if start + max(tree.depths) >= self.max_context:
            raise ValueError(
                f"position {start + max(tree.depths)} is past the context of {self.max_context}"
            )
        if not all(0 <= row < len(tree) for row in work.rows):
            raise ValueError(f"rows {list(work.rows)} of a tree of {len(tree)} nodes")

    @abstractmethod
    def keep(self, sequence: int, path: Sequence[int]) -> None:
        """Commits the nodes of `path` (from the root down) of the last tree, drops the others.

        An empty path commits nothing.
        """

    @abstractmethod
    def rewind(self, sequence: int, tokens: Sequence[int]) -> int:
        """Keeps the longest reusable common prefix with `tokens` and gives its length."""

    @abstractmethod
    def project(self, hidden: Tensor) -> Tensor:
        """The model's own LM head: `[n, hidden]` to logits `[n, vocab]`."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """The model's own input embeddings: ids `[n]` to `[n, hidden]`."""

    def info(self) -> dict[str, Any]:
        """What is particular to this runtime, for people to read."""
        return {}

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes in use: `weights` and `cache`."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning of two texts."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])


def check_path(tree: Tree, path: Sequence[int]) -> None:
    """Refuses what is not a path of candidates from the root down."""
    for before, node in zip([-1, *path], path, strict=False):
        if not 0 <= node < tree.num_candidates or tree.parents[node] != before:
            raise ValueError(f"{list(path)} is not a path of candidates from the root")
