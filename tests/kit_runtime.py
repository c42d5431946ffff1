"""What the runtime tests share: cached texts, random trees, recomputation, spies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from tiny import FAMILIES, VOCAB, build
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.proposers.base import Method, Proposer, Step
from outpace.runtimes.base import Output, Pass, Runtime
from outpace.runtimes.transformers import TransformersRuntime
from outpace.tree import Tree

CLOSE = 1e-4
PATHS = ["bloom", "falcon-alibi", "mpt"]  # ALiBi takes no mask: each path is a row of a batch
TREES = [name for name in FAMILIES if name not in PATHS]


def text_of(length: int, *, first: int = 5, step: int = 11) -> list[int]:
    """A prompt without short periods."""
    return [(first + step * i + i * i // 7) % VOCAB for i in range(length)]


def llama4(**overrides: Any) -> PreTrainedModel:
    """Llama 4's text model: chunks of 16 keys in one layer, all keys in the other."""
    own: dict[str, Any] = dict(
        model_type="llama4_text",
        attention_chunk_size=16,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        intermediate_size_mlp=48,
        num_local_experts=2,
        head_dim=8,
    )
    return build("llama", **(own | overrides))


def load(model: PreTrainedModel, **how: Any) -> TransformersRuntime:
    """A runtime whose forwards are the ordinary ones unless the test says otherwise."""
    return TransformersRuntime(model, **({"exactness": "ordinary"} | how))


def cache_text(runtime: Runtime, tokens: Sequence[int], sequence: int | None = None) -> int:
    """A sequence that holds `tokens`, cached in chunks as the engine does."""
    if sequence is None:
        sequence = runtime.open()
    while len(runtime.tokens(sequence)) < len(tokens):
        chunk = runtime.next_chunk(sequence, list(tokens))
        runtime.forward([Pass(sequence=sequence, tree=chunk, rows=[])])
        runtime.keep(sequence, range(len(chunk)))
    return sequence


def run(runtime: Runtime, trees: dict[int, Tree]) -> dict[int, Output]:
    """One forward over each sequence's tree, logits of every node."""
    batch = [Pass(sequence=s, tree=tree, rows=range(len(tree))) for s, tree in trees.items()]
    outputs = runtime.forward(batch)
    return {work.sequence: output for work, output in zip(batch, outputs, strict=True)}


def run_one(runtime: Runtime, sequence: int, tree: Tree) -> Tensor:
    """`[nodes, vocab]`: the logits of one tree."""
    return run(runtime, {sequence: tree})[sequence].logits.clone()


def recomputed(model: PreTrainedModel, text: Sequence[int], tree: Tree) -> Tensor:
    """`[nodes, vocab]`: each node's logits from its own path after `text`, without any cache."""
    rows: dict[int, Tensor] = {}
    for node in reversed(range(len(tree))):
        if node in rows:
            continue
        path = tree.path(node)
        ids = [*text, *(tree.tokens[i] for i in path)]
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -len(path) :]
        rows.update(zip(path, logits, strict=True))
    return torch.stack([rows[node] for node in range(len(tree))])


def distance(got: Tensor, want: Tensor) -> float:
    """Largest difference of a logit, by the spread of the logits; they vary by about 1."""
    return float((got.float() - want.float()).abs().max() / max(1.0, float(want.float().std())))


def token_by_token(runtime: Runtime, sequence: int, tokens: Sequence[int]) -> Tensor:
    """`[tokens, vocab]`: plain decoding of given tokens."""
    rows = []
    for token in tokens:
        rows.append(run_one(runtime, sequence, Tree.chain([token]))[0])
        runtime.keep(sequence, [0])
    return torch.stack(rows)


@st.composite
def trees(
    draw: st.DrawFn, *, max_nodes: int = 10, vocab_size: int = VOCAB, max_scratch: int = 3
) -> Tree:
    """Trees of any shape, with scratch nodes behind the candidates."""
    size = draw(st.integers(1, max_nodes))
    parents = [-1, *(draw(st.integers(max(0, i - 4), i - 1)) for i in range(1, size))]
    scratch = draw(st.integers(0, max_scratch))
    for i in range(size, size + scratch):
        parents.append(draw(st.integers(0, i - 1)))
    tokens = [draw(st.integers(0, vocab_size - 1)) for _ in parents]
    return Tree(tokens=tokens, parents=parents, num_candidates=size)


def leaves(tree: Tree) -> list[int]:
    """Candidates without candidate children."""
    return [node for node in range(tree.num_candidates) if not tree.children(node)]


@torch.inference_mode()
def poison(runtime: TransformersRuntime, value: float = 1e4) -> None:
    """Overwrites every cached key and value that no sequence has committed."""
    used = {s: len(runtime.tokens(s)) for s in runtime._sequences}
    for layer in runtime._cache.layers:
        for slot in range(layer.keys.shape[0] if layer.is_initialized else 0):
            layer.keys[slot, :, used.get(slot, 0) :] = value
            layer.values[slot, :, used.get(slot, 0) :] = value


@contextmanager
def head_rows(model: PreTrainedModel) -> Iterator[list[int]]:
    """The number of rows of every call of the LM head."""
    rows: list[int] = []

    def spy(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
        rows.append(args[0].numel() // args[0].shape[-1])

    handle = model.get_output_embeddings().register_forward_hook(spy)
    try:
        yield rows
    finally:
        handle.remove()


@contextmanager
def seen_inputs(module: nn.Module, name: str | int = 0) -> Iterator[list[Tensor]]:
    """One argument, by place or name, of every call of a module."""
    seen: list[Tensor] = []

    def spy(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if isinstance(name, int) or name in kwargs:
            seen.append((args[name] if isinstance(name, int) else kwargs[name]).clone())

    handle = module.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def draw_rows(rows: Iterable[Iterable[bool]]) -> str:
    """A mask as people draw it: x where visible."""
    return "\n".join("".join("x" if seen else "." for seen in row) for row in rows)


class Recording(Method):
    """Another method; keeps what it proposes and the texts that it is shown."""

    name = "recording"

    def __init__(self, inner: Method) -> None:
        self.inner = inner
        self.proposed: list[int] = []  # tokens below the roots
        self.seen: list[int] = []  # the longest text

    def start(self) -> Proposer:
        proposer = self.inner.start()
        propose = proposer.propose

        def record(step: Step) -> Tree:
            tree = propose(step)
            self.proposed += tree.tokens[1 : tree.num_candidates]
            self.seen = max(self.seen, list(step.tokens), key=len)
            return tree

        proposer.propose = record  # type: ignore[method-assign]
        return proposer
