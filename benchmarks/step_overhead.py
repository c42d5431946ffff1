"""Time a step takes beside the forward: propose, accept, keep and bookkeeping.

    python benchmarks/step_overhead.py

Drives the real engine over a runtime whose forward costs nothing: random logits of a vocabulary
of 49,152, trees of 32 nodes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.engine import Engine, Request
from outpace.proposers import METHODS, Method
from outpace.runtimes.base import Output, Pass, Runtime
from outpace.sampling import SamplingParams

VOCAB, NODES, TOKENS = 49_152, 32, 400


class FreeRuntime(Runtime):
    """Logits from a table by the node's token: the text is a loop that methods can predict."""

    def __init__(self) -> None:
        self.vocab_size, self.hidden_size = VOCAB, 64
        self.max_context, self.max_nodes, self.prefill_chunk = 100_000, NODES, 256
        self.same_shape = False
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(64, VOCAB, generator=generator).bfloat16()
        self._rows[torch.arange(64), (torch.arange(64) * 5 + 1) % 64] = 20.0
        self._hidden = torch.zeros(NODES, 64)
        self._tokens: list[int] = []
        self._work: Pass | None = None

    def open(self) -> int:
        self._tokens = []
        return 0

    def close(self, sequence: int) -> None:
        self._tokens = []

    def tokens(self, sequence: int) -> Sequence[int]:
        return self._tokens

    def max_depth(self, sequence: int) -> int:
        return self.max_context - 1 - len(self._tokens)

    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        self._work = batch[0]
        index = [batch[0].tree.tokens[i] % 64 for i in batch[0].rows]
        return [Output(logits=self._rows[index], hidden=self._hidden[: len(batch[0].tree)])]

    def keep(self, sequence: int, path: Sequence[int]) -> None:
        assert self._work is not None
        self._tokens.extend(self._work.tree.tokens[i] for i in path)

    def rewind(self, sequence: int, tokens: Sequence[int]) -> int:
        self._tokens = []
        return 0

    def project(self, hidden: Tensor) -> Tensor:
        raise ValueError("no heads here")

    def embed(self, tokens: Tensor) -> Tensor:
        raise ValueError("no heads here")

    def memory(self) -> dict[str, int]:
        return {"weights": 0, "cache": 0}


def per_step(method: Method) -> tuple[float, float, float]:
    """Milliseconds a step outside the forward (median), tokens a step, nodes a step."""
    engine = Engine(FreeRuntime(), max_nodes=NODES)
    prompt = [(i * i) % 64 for i in range(200)]
    params = SamplingParams(max_new_tokens=TOKENS)
    engine.add(Request(id=0, prompt=prompt, params=params, seed=0, method=method))
    times, stats = [], None
    while engine.busy:
        begin = time.perf_counter()
        events = engine.step()
        elapsed = time.perf_counter() - begin
        if events:
            forward = 0.0 if stats is None else stats["forward"]
            split = dict(events[-1].stats.time_split)
            times.append(elapsed - (split["forward"] - forward))
            stats = split
            final = events[-1].stats
    drafted = final.drafted / final.steps + 1
    return statistics.median(times) * 1e3, final.tokens_per_step or 0.0, drafted


def main() -> None:
    torch.manual_seed(0)
    for name in ("plain", "lookup", "lookahead", "combined"):
        milliseconds, rate, nodes = per_step(METHODS[name]())
        print(
            f"{name:10} {milliseconds:.3f} ms/step, {rate:.2f} tokens/step, {nodes:.1f} candidates"
        )


if __name__ == "__main__":
    main()
