"""Draft: a smaller model writes ahead, with the target's noise or by honest draws of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from outpace.accept import draw
from outpace.errors import IncompatibleModels, InvalidRequest, NumericalError
from outpace.proposers.base import Method, Proposer
from outpace.runtimes.base import Pass, Runtime
from outpace.sampling import DRAFT_STREAM, TOKEN_STREAM, _check, _check_int
from outpace.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.proposers.base import Step, Target
    from outpace.sampling import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Method):
    """Proposes what another model with the same vocabulary would write (2211.17192, 2302.01318).

    Args:
        runtime: the draft's.
        device: where the target's logits are; None: on the draft's device.
        num_ids: ids from here on are padding and never proposed; None: all of the draft's are real.
        num_tokens: longest chain.
        num_branches: children of each node of the chain, of which the first one is continued.
        min_confidence: stop where the draft's likeliest token has less probability than this. The
            rule looks at the distribution, never at the draw, so drawn children stay honest.

    Raises:
        InvalidRequest: naming the field and its range.
    """

    name: ClassVar[str] = "draft"

    runtime: Runtime
    device: torch.device | None = None
    num_ids: int | None = None
    num_tokens: int = 4
    num_branches: int = 1
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        _check_int("num_ids", self.num_ids, 1, optional=True)
        _check_int("num_tokens", self.num_tokens, 1)
        _check_int("num_branches", self.num_branches, 1)
        _check("min_confidence", self.min_confidence, 0.0, 1.0)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return ("draft", "num_tokens", "num_branches", "min_confidence")

    @classmethod
    def load(cls, target: Target, **options: Any) -> Draft:
        """The method with the option `draft` as a model's name, folder or GGUF file.

        Raises:
            InvalidRequest: when `draft` is missing.
            IncompatibleModels: when the vocabularies differ.
        """
        from outpace.models import load_model  # here, as it brings transformers along

        name = options.pop("draft", None)
        if name is None:
            raise InvalidRequest("method draft needs a model: draft, by name, folder or GGUF file")
        # Its bits decide acceptance only, and ordinary forwards can be rewound by single tokens.
        model = load_model(name, device=str(target.runtime.device), exactness="ordinary")
        texts = {} if model.tokenizer is None else model.tokenizer.token_texts
        check_vocabulary(target.token_texts, texts)
        return cls(
            runtime=model.runtime,
            device=target.runtime.device,
            num_ids=1 + min(max(target.token_texts), max(texts)),
            **options,
        )

    def start(self) -> Proposer:
        return DraftProposer(self)

    def memory(self) -> int:
        return self.runtime.memory()["weights"]


class DraftProposer(Proposer):
    """One text's sequence in the draft's cache."""

    def __init__(self, method: Draft) -> None:
        self.method = method
        self._sequence: int | None = None
        self._start = 0  # what the draft sees begins here
        self._num_seen = 0

    def propose(self, step: Step) -> Tree:
        method, runtime = self.method, self.method.runtime
        num_tokens = min(method.num_tokens, step.max_depth, step.max_nodes - 1)
        num_tokens = min(num_tokens, max(runtime.max_context // 2, 1))
        text = self._visible(step.tokens, num_tokens)
        chain = _Chain(step, method)
        if num_tokens == 0 or not text:
            return chain.tree()
        logits = self._catch_up(text)
        while chain.grow(logits, num_siblings=step.max_nodes - 1 - num_tokens):
            if len(chain.path) == num_tokens:
                break
            logits = self._forward(Tree.chain(chain.path[-1:]))
        return chain.tree()

    def close(self) -> None:
        if self._sequence is not None:
            self.method.runtime.close(self._sequence)
            self._sequence = None

    def _visible(self, tokens: Sequence[int], num_tokens: int) -> Sequence[int]:
        """The end of the text that the draft conditions on; nothing behind an id it lacks.

        A full context goes on with its newest half, so that half a context of new tokens passes
        until the next time.
        """
        runtime = self.method.runtime
        for i in range(self._num_seen, len(tokens)):
            if tokens[i] >= runtime.vocab_size:
                self._start = i + 1
        self._num_seen = len(tokens)
        if len(tokens) - self._start + num_tokens - 1 > runtime.max_context:
            self._start = len(tokens) - max(runtime.max_context // 2, 1)
        return tokens[self._start :]

    def _catch_up(self, text: Sequence[int]) -> Tensor:
        """The draft's logits `[vocab]` after `text`, of which it computes what is not cached."""
        runtime = self.method.runtime
        if self._sequence is None:
            self._sequence = runtime.open()
        runtime.rewind(self._sequence, text[:-1])
        while True:
            chunk = runtime.next_chunk(self._sequence, text)
            if len(runtime.tokens(self._sequence)) + len(chunk) == len(text):
                return self._forward(chunk)
            self._forward(chunk, rows=())

    def _forward(self, chain: Tree, rows: Sequence[int] | None = None) -> Tensor:
        ...
