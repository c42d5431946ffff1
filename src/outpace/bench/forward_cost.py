"""What a forward over n nodes costs here, and what a method must bring to pay for it."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.runtimes.base import Pass
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.runtimes.base import Runtime

COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 256
REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """Seconds of a decode forward by its number of nodes, all of whose logits are computed.

    Args:
        context: cached tokens behind it.
        seconds: nodes -> the median of several runs.
    """

    context: int
    seconds: dict[int, float]

    def at(self, nodes: float) -> float:
        """Seconds for a mean number of nodes, between the measured ones by straight lines."""
        counts = sorted(self.seconds)
        if nodes <= counts[0]:
            return self.seconds[counts[0]]
        for low, high in itertools.pairwise(counts):
            if nodes <= high:
                share = (nodes - low) / (high - low)
                return (1 - share) * self.seconds[low] + share * self.seconds[high]
        return self.seconds[counts[-1]] * nodes / counts[-1]


def measure_forward_cost(runtime: Runtime, *, repeats: int = REPEATS) -> ForwardCost:
    """Times chains of each count in turn, so that a slow moment of the machine hits all alike."""
    counts = [n for n in COUNTS if n <= runtime.max_nodes]
    context = min(CONTEXT, runtime.max_context - max(counts) - 1)
    counts = [n for n in counts if context + n <= runtime.max_context]
    tokens = [(7 + 131 * k) % runtime.vocab_size for k in range(context + max(counts))]
    sequence = runtime.open()
    times: dict[int, list[float]] = {n: [] for n in counts}
    try:
        while len(runtime.tokens(sequence)) < context:
            chunk = runtime.next_chunk(sequence, tokens[:context])
            runtime.forward([Pass(sequence=sequence, tree=chunk, rows=[])])
            runtime.keep(sequence, range(len(chunk)))
        for repeat in range(repeats + 1):
            for n in counts:
                work = Pass(
                    sequence=sequence, tree=Tree.chain(tokens[context : context + n]), rows=range(n)
                )
                begin = time.perf_counter()
                float(runtime.forward([work])[0].logits[-1, 0])  # reading it waits for the device
                elapsed = time.perf_counter() - begin
                runtime.keep(sequence, [])
                if repeat > 0:  # the first round warms up
                    times[n].append(elapsed)
    finally:
        runtime.close(sequence)
    return ForwardCost(
        context=context, seconds={n: statistics.median(values) for n, values in times.items()}
    )
