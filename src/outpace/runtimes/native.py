"""Runs trees on the CPU with int8 weights, in kernels whose rows do not depend on each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.errors import InvalidRequest, UnsupportedModel
from outpace.runtimes.base import Output, Pass, Runtime, check_path, common_prefix
from outpace.runtimes.packed import Packed

try:
    import outpace.runtimes._native as _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment]

MAX_NODES = 256
FIRST_POSITIONS = 1024


def kernel_names() -> list[str]:
    """The instruction sets that this machine can run, the fastest first; none without a build."""
    return [] if _native is None else list(_native.kernel_names())


@dataclass(slots=True)
class _Sequence:
    cache: Any
    tokens: list[int] = field(default_factory=list)
    running: Pass | None = None


class NativeRuntime(Runtime):
    """A packed model as a tree runtime; a node's logits have the same bits however it is run.

    Weights and cached keys and values are int8, sums of products exact integers, and what is
    floating-point goes in one order, so neither the rows beside a node, nor the shape of its tree,
    nor threads or instruction set change a bit.

    Args:
        packed: the model.
        threads: workers; by default the cores that this process may use.
        kernels: an instruction set of `kernel_names`; by default the fastest.
        prefill_chunk: prompts are cached in pieces that end at multiples of so many tokens.

    Raises:
        UnsupportedModel: where the package was built without its native part.
        InvalidRequest: for kernels that this machine cannot run.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        threads: int | None = None,
        kernels: str | None = None,
        prefill_chunk: int = 256,
    ) -> None:
        names = kernel_names()
        if not names:
            raise UnsupportedModel(
                "outpace was installed without its native part: install a C++17 compiler and "
                "install outpace again, or use --runtime transformers"
            )
        if kernels is not None and kernels not in names:
            raise InvalidRequest(f"kernels must be one of {', '.join(names)}, not {kernels!r}")
        if threads is not None and not 1 <= threads <= 1024:
            raise InvalidRequest(f"threads must lie between 1 and 1024, not {threads}")
        if prefill_chunk < 1:
            raise InvalidRequest(f"prefill_chunk must be at least 1, not {prefill_chunk}")
        shape = self.architecture = packed.architecture
        self.vocab_size = shape.vocab
        self.hidden_size = shape.hidden
        self.max_context = shape.max_context
        self.max_nodes = MAX_NODES
        self.prefill_chunk = prefill_chunk
        self.same_shape = False  # every shape gives the same bits
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self._weights = sum(array.nbytes for array in packed.arrays.values())
        self._native = _native.Runtime(
            sizes=shape.sizes,
            windows=list(shape.windows),
            arrays=packed.arrays,
            kernels=kernels or names[0],
            threads=threads or _num_cores(),
        )
        self._num_positions = 0
        self._sequences: dict[int, _Sequence] = {}

    @property
    def exactness(self) -> str:
        return "bit-exact"

    # Sequences

    def open(self) -> int:
        number = next(i for i in range(len(self._sequences) + 1) if i not in self._sequences)
        self._sequences[number] = _Sequence(self._native.open())
        return number

    def close(self, sequence: int) -> None:
        del self._sequences[sequence]

    def tokens(self, sequence: int) -> Sequence[int]:
        return self._sequences[sequence].tokens

    def max_depth(self, sequence: int) -> int:
        return max(self.max_context - 1 - len(self._sequences[sequence].tokens), 0)

    def keep(self, sequence: int, path: Sequence[int]) -> None:
        state = self._sequences[sequence]
        work = state.running
        if work is None:
            raise ValueError(f"keep without a forward of sequence {sequence}")
        check_path(work.tree, path)
        state.cache.keep(list(path))
        state.running = None
        state.tokens.extend(work.tree.tokens[i] for i in path)

    def rewind(self, sequence: int, tokens: Sequence[int]) -> int:
        state = self._sequences[sequence]
        common = common_prefix(state.tokens, tokens)
        state.cache.truncate(common)
        del state.tokens[common:]
        state.running = None
        return common

    # Forward

    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        if not batch:
            return []
        for work in batch:
            self.check_pass(work)
        trees = [work.tree for work in batch]
        states = [self._sequences[work.sequence] for work in batch]
        counts = [len(tree) for tree in trees]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        wanted = [
            first + row for first, work in zip(firsts, batch, strict=True) for row in work.rows
        ]
        self._grow_positions(
            max(len(s.tokens) + max(t.depths) for s, t in zip(states, trees, strict=True)) + 1
        )
        logits = torch.empty(len(wanted), self.vocab_size)
        hidden = torch.empty(sum(counts), self.hidden_size)
        self._native.forward(
            [state.cache for state in states],
            counts,
            np.array([t for tree in trees for t in tree.tokens], dtype=np.int32),
            np.array([p for tree in trees for p in tree.parents], dtype=np.int32),
            wanted,
            logits.numpy(),
            hidden.numpy(),
        )
        outputs, at = [], 0
        for first, work, state in zip(firsts, batch, states, strict=True):
            state.running = work
            rows = len(work.rows)
            outputs.append(
                Output(logits=logits[at : at + rows], hidden=hidden[first : first + len(work.tree)])
            )
            at += rows
        return outputs

    def _grow_positions(self, need: int) -> None:
        """Makes the cosines and sines of at least `need` positions."""
        if need <= self._num_positions:
            return
        size = min(max(2 * self._num_positions, FIRST_POSITIONS, need), self.max_context)
        frequencies = np.array(self.architecture.frequencies, dtype=np.float32)
        angles = np.arange(size, dtype=np.float32)[:, None] * frequencies
        scale = self.architecture.rope_scale
        self._native.set_positions(
            (np.cos(angles.astype(np.float64)) * scale).astype(np.float32),
            (np.sin(angles.astype(np.float64)) * scale).astype(np.float32),
        )
        self._num_positions = size

    # What methods ask for

    def info(self) -> dict[str, Any]:
        return {
            "kernels": self._native.kernels,
            "threads": self._native.threads,
            "weights": "int8",
            "bit_lossless": True,
        }

    def project(self, hidden: Tensor) -> Tensor:
        rows = hidden.detach().to("cpu", torch.float32).contiguous()
        logits = torch.empty(len(rows), self.vocab_size)
        if len(rows):
            self._native.project(rows.numpy(), logits.numpy())
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        ids = tokens.detach().to("cpu", torch.int64).contiguous()
        padded = torch.empty(len(ids), -(-self.hidden_size // 64) * 64)
        self._native.embed(ids.numpy(), padded.numpy())
        return padded[:, : self.hidden_size]

    def memory(self) -> dict[str, int]:
        cache = sum(int(state.cache.num_bytes) for state in self._sequences.values())
        return {"weights": self._weights, "cache": cache}


def _num_cores() -> int:
    """Physical cores that this process may use: a second thread on one gains nothing here."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # only Linux tells
        return os.cpu_count() or 1
    siblings = set()
    for cpu in allowed:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(file.read_text() if file.exists() else str(cpu))
    return max(len(siblings), 1)
