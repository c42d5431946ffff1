"""Draft: a smaller model writes ahead, with the target's own noise or by honest draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from outpace.accept import draw
from outpace.errors import IncompatibleModels, InvalidRequest, NumericalError
from outpace.proposers.base import Method, Proposer
from outpace.runtimes.base import Pass, Runtime
from outpace.sampling import DRAFT_STREAM, TOKEN_STREAM, check_int, check_number, probabilities
from outpace.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.proposers.base import Step, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Method):
    """Proposes what another model with the same vocabulary would write (2211.17192, 2302.01318).

    Args:
        runtime: the draft's; a same-shape one would rewind by whole chunks, at a price.
        num_ids: ids from here on are padding and never proposed; None: all of the draft's are real.
        num_tokens: longest chain.
        num_branches: children of each node of the chain, of which the first one is continued.
        min_confidence: stop where the draft's likeliest token has less probability than this.

    Raises:
        InvalidRequest: naming the field and its range.
    """

    name: ClassVar[str] = "draft"

    runtime: Runtime
    num_ids: int | None = None
    num_tokens: int = 4
    num_branches: int = 1
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        check_int("num_ids", self.num_ids, 1, optional=True)
        check_int("num_tokens", self.num_tokens, 1)
        check_int("num_branches", self.num_branches, 1)
        check_number("min_confidence", self.min_confidence, 0.0, 1.0)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return ("draft", "num_tokens", "num_branches", "min_confidence")

    @classmethod
    def load(cls, target: Target, **options: Any) -> Draft:
        """The method with the option `draft`: a model's name, folder or GGUF file, or a runtime.

        A runtime is taken at its word: it has no texts to compare.

        Raises:
            InvalidRequest: when `draft` is missing.
            IncompatibleModels: when the vocabularies differ.
        """
        from outpace.models import load_model  # here, as it brings transformers along

        draft = options.pop("draft", None)
        if draft is None:
            raise InvalidRequest("method draft needs draft: the small model's name or folder")
        if isinstance(draft, Runtime):
            return cls(runtime=draft, **options)
        # Its bits decide acceptance only, and ordinary forwards rewind by single tokens.
        files: dict[str, Any] = {}  # a loaded model stays where it is
        if isinstance(draft, (str, PathLike)):
            files = {"device": str(target.runtime.device), "cache": target.cache}
        model = load_model(draft, exactness="ordinary", **files)
        texts = {} if model.tokenizer is None else model.tokenizer.token_texts
        check_vocabulary(target.token_texts, texts)
        num_ids = 1 + min(max(target.token_texts), max(texts))
        return cls(runtime=model.runtime, num_ids=num_ids, **options)

    def start(self) -> Proposer:
        return DraftProposer(self)

    def memory(self) -> int:
        return sum(self.runtime.memory().values())


class DraftProposer(Proposer):
    """One text's sequence in the draft's cache."""

    def __init__(self, method: Draft) -> None:
        self.method = method
        self._sequence: int | None = None
        self._start = 0  # of what the draft sees
        self._num_seen = 0

    def propose(self, step: Step) -> Tree:
        method, runtime = self.method, self.method.runtime
        num_tokens = min(method.num_tokens, step.max_depth, step.max_nodes - 1)
        num_tokens = min(num_tokens, max(runtime.max_context // 2, 1))
        text = self._visible(step.tokens, num_tokens)
        growth = _Growth(step, method, num_spare=step.max_nodes - 1 - num_tokens)
        if num_tokens > 0 and text:
            logits = self._catch_up(text)
            while growth.grow(logits) and len(growth.path) < num_tokens:
                logits = self._forward(Tree.chain(growth.path[-1:]), rows=[0])[0]
        return growth.tree()

    def close(self) -> None:
        if self._sequence is not None:
            self.method.runtime.close(self._sequence)
            self._sequence = None

    def _visible(self, tokens: Sequence[int], num_tokens: int) -> Sequence[int]:
        """The end of the text that the draft conditions on; it holds no id that the draft lacks.

        A full context goes on with its newest half, so half a context of new tokens passes before
        the next time.
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
        """The draft's logits `[vocab]` after `text`; computes what the cache lacks."""
        runtime = self.method.runtime
        if self._sequence is None:
            self._sequence = runtime.open()
        num_cached = runtime.rewind(self._sequence, text[:-1])
        while True:
            chunk = runtime.next_chunk(self._sequence, text)
            num_cached += len(chunk)
            if num_cached == len(text):
                return self._forward(chunk, rows=[len(chunk) - 1])[0]
            self._forward(chunk, rows=[])

    def _forward(self, chain: Tree, *, rows: list[int]) -> Tensor:
        """Caches a chain and gives the logits `[rows, vocab]` asked for."""
        assert self._sequence is not None
        runtime = self.method.runtime
        output = runtime.forward([Pass(sequence=self._sequence, tree=chain, rows=rows)])[0]
        runtime.keep(self._sequence, range(len(chain)))
        return output.logits


class _Growth:
    """The proposal as it grows by the children of the chain's last node.

    With two branches, a b c being the chain:    root - a - b - c
                                                      - x - y - z   below root, a and b
    """

    def __init__(self, step: Step, method: Draft, *, num_spare: int) -> None:
        self.path: list[int] = []  # the chain's tokens below the root
        self._method = method
        self._sampler = step.sampler
        self._position = len(step.tokens)
        self._num_spare = num_spare
        self._tokens, self._parents = [step.tokens[-1]], [-1]
        self._node = 0
        self._draft_probs: dict[int, Tensor] = {}  # by node, each [vocab]

    def grow(self, logits: Tensor) -> bool:
        """Adds children by the draft's logits `[vocab]`; False where the draft stops.

        Whether and how many depends on the distribution alone, never on the draw: children that
        were left out for what they are would no longer be draws from q.
        """
        sampler, method = self._sampler, self._method
        weights = self._weights(logits)
        if not math.isfinite(float(weights.max())):
            return False  # all that the draft could say is banned
        least = method.min_confidence
        if least > 0.0 and float(torch.softmax(weights, dim=-1).max()) < least:
            return False
        stream = TOKEN_STREAM
        if sampler.params.acceptance == "rejection" and not sampler.params.greedy:
            stream = DRAFT_STREAM
            self._draft_probs[self._node] = probabilities(weights).cpu()
        width = min(method.num_branches, 1 + self._num_spare)
        if width > 1:
            width = min(width, int(torch.isfinite(weights).sum()))
        self._num_spare -= width - 1
        noise = sampler.noise(self._position, stream=stream)
        for _ in range(width):  # Gumbel-max again and again draws without replacement
            token = draw(weights, noise)
            weights[token] = -math.inf
            self._tokens.append(token)
            self._parents.append(self._node)
        self._node = len(self._tokens) - width
        self.path.append(self._tokens[self._node])
        self._position += 1
        return True

    def tree(self) -> Tree:
        """What has grown, with q where children were drawn from it."""
        draft_probs = None
        if self._draft_probs:
            draft_probs = torch.zeros(len(self._tokens), self._sampler.vocab_size)
            for node, probs in self._draft_probs.items():
                draft_probs[node] = probs
        return Tree(tokens=self._tokens, parents=self._parents, draft_probs=draft_probs)

    def _weights(self, logits: Tensor) -> Tensor:
        """Processed like the target's, as wide as the target's; padding at -inf."""
        sampler = self._sampler
        num_ids = len(logits) if self._method.num_ids is None else self._method.num_ids
        real = logits[: min(num_ids, sampler.vocab_size)].to(sampler.device, torch.float32)
        wide = torch.full((sampler.vocab_size,), -math.inf, device=sampler.device)
        wide[: len(real)] = real
        weights = sampler.process(wide, self.path, drafting=True)
        if not math.isfinite(float(weights.max())) and not math.isfinite(float(real.max())):
            raise NumericalError(
                f"the draft's logits are {float(real.max())} for the token at position "
                f"{self._position}: the dtype overflows, use a draft in bfloat16 or float32"
            )
        return weights


def check_vocabulary(target_texts: Mapping[int, str], draft_texts: Mapping[int, str]) -> None:
    """Compares two vocabularies id by id, up to the end of the shorter one.

    Ids behind that end are padding or added tokens: they are never proposed, so they do no harm.

    Args:
        target_texts: id -> the token's own string.
        draft_texts: the draft's.

    Raises:
        IncompatibleModels: naming the first id that differs, with both strings.
    """
    if not target_texts or not draft_texts:
        whose = "draft" if target_texts else "target"
        raise IncompatibleModels(f"the {whose} has no tokenizer to compare the vocabularies by")
    for token in range(1 + min(max(target_texts), max(draft_texts))):
        ours, theirs = target_texts.get(token), draft_texts.get(token)
        if ours != theirs:
            raise IncompatibleModels(
                f"the draft has another vocabulary: id {token} is {ours!r} in the target and "
                f"{theirs!r} in the draft; use a draft of the target's family"
            )
