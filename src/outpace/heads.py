"""Medusa heads (2401.10774), also with sequential dependence (Hydra, 2402.05109)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outpace.errors import InvalidRequest
from outpace.sampling import check_int

if TYPE_CHECKING:
    from collections.abc import Mapping

OUTPUTS = ("own", "shared", "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """The shape of a set of heads.

    Args:
        hidden_size: width of the target's last hidden state.
        vocab_size: of the target.
        num_heads: head i (from 0) predicts the token i + 2 places behind the hidden state's.
        num_layers: residual blocks a head.
        output: "own" matrix a head, one "shared" matrix, or the "target"'s LM head.
        dependent: head i also sees the embeddings of the root and of the i tokens behind it.
        reduced_vocab_size: width of own or shared outputs when it is not `vocab_size`; the
            heads' `token_map` then names the target's ids.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    output: str = "own"
    dependent: bool = False
    reduced_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_int("hidden_size", self.hidden_size, 1)
        check_int("vocab_size", self.vocab_size, 1)
        check_int("num_heads", self.num_heads, 1)
        check_int("num_layers", self.num_layers, 1)
        check_int("reduced_vocab_size", self.reduced_vocab_size, 1, self.vocab_size, optional=True)
        if self.output not in OUTPUTS:
            raise InvalidRequest(f"output must be one of {', '.join(OUTPUTS)}, not {self.output!r}")
        if self.output == "target" and self.reduced_vocab_size is not None:
            raise InvalidRequest("the target's own output matrix cannot have a reduced vocabulary")

    def asdict(self) -> Mapping[str, object]:
        return asdict(self)


class MedusaHeads(nn.Module):
    """Heads that read the target's hidden state after its final norm.

    A block is x + SiLU(W x + b). The first block of a dependent head i reads the hidden state and
    i + 1 embeddings side by side, `[hidden * (i + 2)]`, and adds to the hidden state. W starts at
    zero, so untrained heads over the target's matrix repeat the target's own prediction.
    """

    token_map: Tensor | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.blocks = nn.ModuleList()
        for head in range(config.num_heads):
            first = hidden * (head + 2) if config.dependent else hidden
            widths = [first, *([hidden] * (config.num_layers - 1))]
            self.blocks.append(nn.ModuleList(nn.Linear(width, hidden) for width in widths))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        count = {"own": config.num_heads, "shared": 1, "target": 0}[config.output]
        width = config.reduced_vocab_size or config.vocab_size
        self.outputs = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(count))
        mapped = None if config.reduced_vocab_size is None else torch.arange(width)
        self.register_buffer("token_map", mapped)

    def features(self, head: int, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """What head `head` feeds to its output matrix.

        Args:
            hidden: `[n, hidden]`.
            embeddings: `[n, head + 1, hidden]` of the root and the path; dependent heads only.
        """
        x = hidden
        for i, block in enumerate(self.blocks[head]):  # type: ignore[arg-type]
            seen = x
            if i == 0 and embeddings is not None:
                seen = torch.cat([x, embeddings.flatten(1)], dim=-1)
            x = x + nn.functional.silu(block(seen))
        return x

    def logits(self, head: int, features: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits `[n, vocab or reduced]`; `project` is the target's own LM head."""
        if not self.outputs:
            return project(features)
        output = self.outputs[head if self.config.output == "own" else 0]
        logits: Tensor = output(features)
        return logits

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of the heads' own ones, any shape."""
        return ids if self.token_map is None else self.token_map[ids]
