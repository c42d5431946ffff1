"""Decides on the real weights whether a model can run trees and roll back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outpace.runtimes.base import Pass
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.runtimes.transformers import TransformersRuntime

# Two right computations of one row differ by rounding; a wrong mask or state by far more.
FLOORS = {torch.float32: 1e-4, torch.float64: 1e-4}
HALF_FLOOR = 0.1
NOISE_FACTOR = 10.0
LARGEST_NOISE = 0.2  # a row that sees later tokens changes by more than rounding does
CHECK_TEXT = 3
LONGEST_WINDOW = 256  # a check of a longer one would cost more than it could show
# Step and largest count. One to three rows often take kernels of their own, hard to tell apart.
ROW_CLASSES = ((4, 64), (8, 64), (8, 8))
ROW_COUNTS = (4, 8, 12, 16, 24, 32, 64)
CHECK_START = 260  # cached keys of the check: a block of keys has room for branches there
SINGLE_STEPS = 8
BRANCH_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What the check at load found.

    Args:
        failure: None, or why trees cannot run in this mode.
        gap: largest difference of a logit between verification and single steps.
        bit_lossless: whether that difference is zero.
        noise: relative size of the model's own rounding between different numbers of rows.
    """

    failure: str | None
    gap: float
    bit_lossless: bool
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowClass:
    """Row counts that are multiples of `step`, up to `most`, give each row the same bits.

    `branches` says whether that holds for aligned side branches of a tree too, `batches` whether
    it holds for several sequences in one forward.
    """

    step: int
    most: int
    branches: bool
    batches: bool

    def pad(self, rows: int) -> int:
        """The next allowed row count."""
        return -(-rows // self.step) * self.step


def check_model(runtime: TransformersRuntime) -> SelfCheck:
    """Verifies a tree, keeps a branch, goes on, and compares with recomputation from scratch.

    A text is cached that is longer than a short window of attention, then the tree

        d - e - g
          - f            of which d f is kept, then h and i follow one by one.
    """
    size = CHECK_TEXT + min(runtime.window, LONGEST_WINDOW)
    size = max(CHECK_TEXT, min(size, runtime.max_context - CHECK_TEXT - 6))
    *text, d, e, f, g, h, i = _some_tokens(runtime.vocab_size, size + 6)
    try:
        long = _recompute(runtime, [*text, d, f])
        noise = max(
            _distance(_recompute(runtime, [*text, d][:n])[-1:], long[n - 1 : n]) for n in (1, 2, 4)
        )
        references = [
            _recompute(runtime, [*text, d, e, g])[-2:],
            long[-2:],
            _recompute(runtime, [*text, d, f, h, i])[-2:],
        ]
        logits = _tree_logits(runtime, text, (d, e, f, g, h, i))
        single = _single_logits(runtime, [*text, d, f])
    except Exception as error:  # any failure of a model's code means that it cannot run so
        return SelfCheck(
            failure=f"{type(error).__name__}: {error}", gap=0.0, bit_lossless=False, noise=0.0
        )
    wanted = torch.cat(references)
    floor = FLOORS.get(runtime.dtype, HALF_FLOOR)
    distance = _distance(logits, wanted)
    gap = float((logits[3] - single).abs().max())
    failure = None
    if not distance <= max(floor, min(NOISE_FACTOR * noise, LARGEST_NOISE)):
        failure = f"logits differ from recomputation by {distance:.1e} of their spread"
    return SelfCheck(failure=failure, gap=gap, bit_lossless=gap == 0.0, noise=noise)


def find_row_class(runtime: TransformersRuntime) -> RowClass | None:
    """The widest class of row counts at which a row's bits depend neither on the count nor on its
    place or its neighbours, or None.

    Kernels differ for one row, a few, many, and for what a block of rows leaves over; which counts
    agree depends on library, CPU and model. Leaves the runtime with the class that it tried last.
    """
    for step, most in ROW_CLASSES:
        runtime.row_class = RowClass(step=step, most=most, branches=True, batches=True)
        if runtime.max_context > most + 1:
            found = _check_rows(runtime, runtime.row_class)
            if found is not None:
                return found
    return None


def _check_rows(runtime: TransformersRuntime, rows: RowClass) -> RowClass | None:
    """What holds of a class of row counts; None where a row's bits depend on the count.

    A chain of the largest count runs over some cached text, and each module's output is compared
    bit by bit with that of smaller counts; then the nodes run one after the other, as plain
    decoding does.
    """
    size = min(CHECK_START, runtime.max_context - rows.most - 1)
    tokens = _some_tokens(runtime.vocab_size, size + rows.most)
    chain = tokens[size:]
    sequence = runtime.open()
    try:
        runtime.forward([Pass(sequence=sequence, tree=Tree.chain(tokens[:size]), rows=[])])
        runtime.keep(sequence, range(size))
        whole = _module_outputs(runtime, {sequence: Tree.chain(chain)})
        for count in ROW_COUNTS:
            if count < rows.most and count % rows.step == 0:
                part = _module_outputs(runtime, {sequence: Tree.chain(chain[:count])})
                if not _starts_equal(whole, part, 0):
                    return None
        wide = rows.most > rows.step
        # Half precision hides most of what a moved key changes, from a check of any length.
        branches = wide and runtime.dtype in FLOORS
        branches = branches and _branches_equal_chains(runtime, sequence, chain)
        batches = wide and _batch_equals_solo(runtime, sequence, chain)
        for node in range(min(SINGLE_STEPS, rows.most)):
            alone = _module_outputs(runtime, {sequence: Tree.chain([chain[node]])})
            if not _starts_equal(whole, alone, node):
                return None
            runtime.keep(sequence, [0])
    finally:
        runtime.close(sequence)
    return RowClass(step=rows.step, most=rows.most, branches=branches, batches=batches)


def _starts_equal(whole: dict[str, Tensor], part: dict[str, Tensor], at: int) -> bool:
    """Whether the part's rows have the bits of the whole's rows from `at` on."""
    shared = part.keys() & whole.keys()  # in a batch, the LM head has no row a node
    return all(torch.equal(whole[k][at : at + len(part[k])], part[k]) for k in shared)


def _branches_equal_chains(runtime: TransformersRuntime, sequence: int, tokens: list[int]) -> bool:
    """Whether each of four long branches, placed aligned, has the bits of a chain alone."""
    root, depth = tokens[0], BRANCH_DEPTH
    branches = [tokens[1 + depth * k : 1 + depth * (k + 1)] for k in range(4)]
    tree = Tree.from_paths(root, branches, max_nodes=len(tokens))
    outputs = _module_outputs(runtime, {sequence: tree})
    for k, branch in enumerate(branches):
        alone = _module_outputs(runtime, {sequence: Tree.chain([root, *branch])})
        rows = {name: row[1:] for name, row in alone.items()}
        if not _starts_equal(outputs, rows, 1 + depth * k):
            return False
    return True


def _batch_equals_solo(runtime: TransformersRuntime, sequence: int, tokens: list[int]) -> bool:
    """Whether two sequences in one forward have the bits that each has alone."""
    text = runtime.tokens(sequence)
    text = [*text[1:], *tokens[:1]]  # as long, so that both read the same number of keys
    other = runtime.open()
    runtime.forward([Pass(sequence=other, tree=Tree.chain(text), rows=[])])
    runtime.keep(other, range(len(text)))
    trees = {sequence: Tree.chain(tokens[:5]), other: Tree.chain(tokens[9:12])}
    together = _module_outputs(runtime, trees)
    first = _module_outputs(runtime, {sequence: trees[sequence]})
    second = _module_outputs(runtime, {other: trees[other]})
    runtime.close(other)
    return _starts_equal(together, first, 0) and _starts_equal(together, second, 5)


def measure_cost(runtime: TransformersRuntime, *, enough: float, repeats: int = 5) -> float:
    """Time of a plain step in same-shape mode, divided by that in ordinary mode; the best of each.

    Measures up to four times as long while the ratio is above `enough`: another load on the
    machine must not change what is chosen. Leaves the runtime in same-shape mode.
    """
    tokens = _some_tokens(runtime.vocab_size, min(100, runtime.max_context - 1) + 1)
    sequence = runtime.open()
    runtime.forward([Pass(sequence=sequence, tree=Tree.chain(tokens[1:]), rows=[])])
    runtime.keep(sequence, range(len(tokens) - 1))
    work = Pass(sequence=sequence, tree=Tree.chain(tokens[:1]), rows=[0])
    best = {False: math.inf, True: math.inf}
    for done in range(4 * repeats):
        if done >= repeats and best[True] <= enough * best[False]:
            break
        for same_shape in (False, True):
            runtime.same_shape = same_shape
            begin = time.perf_counter()
            float(runtime.forward([work])[0].logits[0, 0])  # reading it waits for the device
            best[same_shape] = min(best[same_shape], time.perf_counter() - begin)
    runtime.close(sequence)
    return best[True] / best[False]


def _module_outputs(runtime: TransformersRuntime, trees: dict[int, Tree]) -> dict[str, Tensor]:
    """Each leaf module's output `[nodes, width]` over the sequences' trees, one after the other."""
    sizes = [len(tree) for tree in trees.values()]
    outputs: dict[str, Tensor] = {}

    def keep_output(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() == 3 and len(output) == len(sizes):
                outputs[name] = torch.cat([x[:n] for x, n in zip(output, sizes, strict=True)])

        return hook

    leaves = [(k, m) for k, m in runtime.model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(keep_output(name)) for name, module in leaves]
    try:
        runtime.forward(
            [
                Pass(sequence=sequence, tree=tree, rows=range(len(tree)))
                for sequence, tree in trees.items()
            ]
        )
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _tree_logits(runtime: TransformersRuntime, text: list[int], nodes: tuple[int, ...]) -> Tensor:
    d, e, f, g, h, i = nodes
    sequence = runtime.open()
    _cache(runtime, sequence, text)
    tree = Tree(tokens=[d, e, f, g], parents=[-1, 0, 0, 1])
    out = runtime.forward([Pass(sequence=sequence, tree=tree, rows=range(4))])[0].logits.float()
    runtime.keep(sequence, [0, 2])
    last = [out[1], out[3], out[0], out[2]]
    for token in (h, i):
        last.append(_step(runtime, sequence, token))
    runtime.close(sequence)
    return torch.stack(last)


def _single_logits(runtime: TransformersRuntime, tokens: list[int]) -> Tensor:
    sequence = runtime.open()
    if len(tokens) > SINGLE_STEPS:
        _cache(runtime, sequence, tokens[:-SINGLE_STEPS])
    for token in tokens[-SINGLE_STEPS:]:
        row = _step(runtime, sequence, token)
    runtime.close(sequence)
    return row


def _cache(runtime: TransformersRuntime, sequence: int, text: list[int]) -> None:
    runtime.forward([Pass(sequence=sequence, tree=Tree.chain(text), rows=[])])
    runtime.keep(sequence, range(len(text)))


def _step(runtime: TransformersRuntime, sequence: int, token: int) -> Tensor:
    work = Pass(sequence=sequence, tree=Tree.chain([token]), rows=[0])
    row = runtime.forward([work])[0].logits[0].float()
    runtime.keep(sequence, [0])
    return row


@torch.inference_mode()
def _recompute(runtime: TransformersRuntime, tokens: list[int]) -> Tensor:
    ids = torch.tensor([tokens], device=runtime.device)
    logits: Tensor = runtime.model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return logits.float()


def _distance(a: Tensor, b: Tensor) -> float:
    """Size of the difference relative to the spread of the logits."""
    spread = (b - b.mean(dim=-1, keepdim=True)).norm()
    return float((a - b).norm() / spread.clamp_min(1e-12))


def _some_tokens(vocab_size: int, count: int) -> list[int]:
    return [(7 + 131 * k) % vocab_size for k in range(1, count + 1)]
