"""Teacher forcing: the target's own logits along a text that something else wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from outpace.runtimes.base import Pass
from outpace.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.runtimes.base import Runtime


def forced_logits(
    runtime: Runtime, prompt: Sequence[int], tokens: Sequence[int], *, width: int = 1
) -> Iterator[Tensor]:
    """The target's raw logits `[vocab]` after the prompt, and after each token that follows it.

    Yields `len(tokens) + 1` rows, computed as far as they are asked for. The prompt is cached in
    the chunks that a request's would be; with a width of 1 each row is plain decoding's own.

    Args:
        runtime: the target.
        prompt: at least one id.
        tokens: ids after the prompt; with it they fit into the context.
        width: most tokens of one forward; more are faster and may round differently.
    """
    text = [*prompt, *tokens]
    sequence = runtime.open()
    try:
        while len(runtime.tokens(sequence)) < len(prompt) - 1:
            tree = runtime.next_chunk(sequence, text[: len(prompt) - 1])
            runtime.forward([Pass(sequence=sequence, tree=tree, rows=[])])
            runtime.keep(sequence, range(len(tree)))
        while (start := len(runtime.tokens(sequence))) < len(text):
            most = min(width, runtime.max_nodes, runtime.max_depth(sequence) + 1)
            tree = runtime.fit(sequence, Tree.chain(text[start : start + most]))
            work = Pass(sequence=sequence, tree=tree, rows=range(len(tree)))
            logits = runtime.forward([work])[0].logits
            runtime.keep(sequence, range(len(tree)))
            yield from logits.unbind()
    finally:
        runtime.close(sequence)


def logits_after(runtime: Runtime, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The raw logits `[vocab]` after `prompt` and `tokens`, as plain decoding computes them."""
    return deque(forced_logits(runtime, prompt, tokens), maxlen=1)[0]
