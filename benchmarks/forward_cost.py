"""What a forward of the native runtime costs: nodes, context, prefill, against memory bandwidth.

    python benchmarks/forward_cost.py --json forward-cost.json

Each figure is the best of several runs, interleaved with the reading of as many bytes as the
weights have: on a shared machine both move together, and their ratio says more than either.
"""

from __future__ import annotations

import json
import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from outpace.bench.results import provenance
from outpace.llm import LLM
from outpace.models import resolve
from outpace.proposers.plain import Plain
from outpace.runtimes.base import Pass
from outpace.runtimes.native import NativeRuntime, kernel_names
from outpace.runtimes.prepare import packed_model
from outpace.tree import Tree

NODES = (1, 2, 4, 8, 16, 32, 64)
SHORT, LONG, PROMPT = 128, 4096, 1024


def numbers(count: int) -> np.ndarray[Any, Any]:
    """So many numbers of 8 bytes, in huge pages where there are some, as the weights are."""
    memory = mmap.mmap(-1, 8 * count)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.int64)
    array[:] = 1
    return array


def read_bytes(blocks: Sequence[np.ndarray[Any, Any]]) -> float:
    """Seconds in which as many threads as blocks read one each."""
    threads = [threading.Thread(target=block.max) for block in blocks]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def balanced(nodes: int, draw: Callable[[], int]) -> Tree:
    """A tree in which every node has two children."""
    return Tree(
        tokens=[draw() for _ in range(nodes)],
        parents=[-1, *((i - 1) // 2 for i in range(1, nodes))],
    )


def cache_text(runtime: NativeRuntime, tokens: list[int]) -> tuple[int, float]:
    """A sequence that holds the text, and the seconds of its prefill."""
    sequence = runtime.open()
    start = time.perf_counter()
    while len(runtime.tokens(sequence)) < len(tokens):
        chunk = runtime.next_chunk(sequence, tokens)
        runtime.forward([Pass(sequence=sequence, tree=chunk, rows=[])])
        runtime.keep(sequence, range(len(chunk)))
    return sequence, time.perf_counter() - start


def forward(runtime: NativeRuntime, sequence: int, tree: Tree) -> float:
    """Seconds of one forward with the logits of every node."""
    start = time.perf_counter()
    runtime.forward([Pass(sequence=sequence, tree=tree, rows=range(len(tree)))])
    return time.perf_counter() - start


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--kernels", type=click.Choice(kernel_names()), help="Default: the fastest.")
@click.option("--threads", type=int, help="Default: the physical cores.")
@click.option("--rounds", default=30, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    model: str, kernels: str | None, threads: int | None, rounds: int, output: Path | None
) -> None:
    """Measures one model on this machine."""
    cache = Path.home() / ".cache" / "outpace"
    packed = packed_model(resolve(model), cache=cache)
    runtime = NativeRuntime(packed, kernels=kernels, threads=threads)
    weights = runtime.memory()["weights"]
    workers = runtime.info()["threads"]
    generator = random.Random(0)

    def draw() -> int:
        return generator.randrange(runtime.vocab_size)

    short, _ = cache_text(runtime, [draw() for _ in range(SHORT)])
    long, _ = cache_text(runtime, [draw() for _ in range(LONG)])
    trees = {nodes: balanced(nodes, draw) for nodes in NODES}
    blocks = [numbers(weights // workers // 8) for _ in range(workers)]
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    for _ in range(rounds):
        note("read", read_bytes(blocks))
        for nodes, tree in trees.items():
            note(f"{nodes} nodes", forward(runtime, short, tree))
        note("long", forward(runtime, long, trees[1]))
    for _ in range(3):
        sequence, seconds = cache_text(runtime, [draw() for _ in range(PROMPT)])
        runtime.close(sequence)
        note("prefill", seconds)

    one = best["1 nodes"]
    print(f"{model}, {runtime.info()}, weights {weights / 1e6:.0f} MB")
    print(f"read bandwidth {weights / best['read'] / 1e9:.1f} GB/s")
    print(f"1 node: {1e3 * one:.2f} ms, {best['read'] / one:.0%} of the time to read the weights")
    for nodes in NODES[1:]:
        seconds = best[f"{nodes} nodes"]
        print(f"{nodes} nodes: {1e3 * seconds:.2f} ms, {seconds / one:.2f} times one")
    long_seconds = best["long"]
    print(f"context {LONG}: {1e3 * long_seconds:.2f} ms, {long_seconds / one:.2f} times {SHORT}")
    print(f"prefill of {PROMPT}: {1e3 * best['prefill']:.0f} ms")
    if output is not None:
        llm = LLM.from_runtime(runtime, method=Plain())
        result = {**provenance(llm), "rounds": rounds, "weights": weights, "best_seconds": best}
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
