"""Positions of training text: what heads read there and what they are to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outpace.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.runtimes.base import Runtime
    from outpace.training.hidden import Text

HELD_OUT_EVERY = 16  # one text of so many is never trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some positions.

    Args:
        hidden: `[n, hidden]` float32, of the token before the root.
        embeddings: `[n, K, hidden]` of the root and the path behind it.
        labels: `[n, K]` the ids that the heads are to say; -1 behind the end of the text.
        teacher: `[n, K, hidden]` the states from which the target itself said them.
    """

    hidden: Tensor
    embeddings: Tensor
    labels: Tensor
    teacher: Tensor


class Positions:
    """All positions of texts that at least the first head has a label for.

    Args:
        texts: with at least one answer of two tokens.
        num_heads: K.
        base: the target's own matrices.

    Raises:
        InvalidRequest: when no position has a label.
    """

    def __init__(self, texts: Sequence[Text], *, num_heads: int, base: Base) -> None:
        usable = [text for text in texts if len(text.answer) > 1]
        self.num_masked = len(texts) - len(usable)
        if not usable:
            raise InvalidRequest(
                f"none of {len(texts)} texts has a token for the heads to learn: every answer is "
                "shorter than two tokens; give other prompts or a higher answer limit"
            )
        self.num_heads = num_heads
        self.base = base
        # Rows beyond a text's end are of the next one: labels of -1 keep them out.
        self._hidden = torch.cat([text.hidden for text in usable])
        self._answer = torch.cat([text.answer for text in usable])
        sizes = torch.tensor([len(text.answer) for text in usable])
        self._ends = sizes.cumsum(0).repeat_interleave(sizes)  # of the text of each row
        self._starts = (torch.arange(len(self._answer)) < self._ends - 1).nonzero()[:, 0]

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, index: Tensor) -> Batch:
        """The positions `index`, `[n]`."""
        rows = self._starts[index]
        behind = rows[:, None] + torch.arange(self.num_heads + 1)  # [n, K + 1]
        inside = behind < self._ends[rows, None]
        behind = behind.clamp(max=len(self._answer) - 1)
        ids = self._answer[behind]
        labels = torch.where(inside[:, 1:], ids[:, 1:], -1)
        return Batch(
            hidden=self._hidden[rows].float(),
            embeddings=self.base.embeddings[ids[:, :-1]],
            labels=labels,
            teacher=self._hidden[behind[:, 1:]].float(),
        )

    def project(self, hidden: Tensor) -> Tensor:
        """The target's LM head, through which gradients flow: `[n, hidden]` to `[n, vocab]`."""
        return nn.functional.linear(hidden, self.base.output, self.base.bias)

    def frequent(self, count: int) -> Tensor:
        """`[count]` sorted ids: the most frequent ones, then the lowest of those never seen."""
        seen = Counter(self._answer.tolist())
        order = sorted(range(len(self.base.output)), key=lambda token: (-seen[token], token))
        return torch.tensor(sorted(order[:count]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The target's matrices at its two ends, as the runtime computes with them.

    Args:
        output: `[vocab, hidden]` the LM head.
        bias: `[vocab]` its bias, or None.
        embeddings: `[vocab, hidden]` of the input.
    """

    output: Tensor
    bias: Tensor | None
    embeddings: Tensor

    @classmethod
    def of(cls, runtime: Runtime) -> Base:
        """Reads them through the runtime's own arithmetic, whatever its format."""
        place = runtime.device
        with torch.inference_mode():
            zero = torch.zeros(1, runtime.hidden_size, device=place, dtype=runtime.dtype)
            bias = runtime.project(zero)[0].float().cpu().clone()
            unit = torch.eye(runtime.hidden_size, device=place, dtype=runtime.dtype)
            output = (runtime.project(unit).float().cpu() - bias).t().contiguous()
            ids = torch.arange(runtime.vocab_size, device=place)
            embeddings = torch.cat([runtime.embed(part) for part in torch.split(ids, 4096)])
        return cls(
            output=output.clone(),
            bias=bias if bool(bias.any()) else None,
            embeddings=embeddings.float().cpu().clone(),
        )


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out, the same ones however many follow."""
    held = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    rest = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return (rest, held) if held else (list(texts), list(texts[-1:]))
