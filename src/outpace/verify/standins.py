"""Untrained Medusa heads: nothing to gain from, all the same to verify with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outpace.heads import MedusaHeads

if TYPE_CHECKING:
    from outpace.runtimes.base import Runtime


def random_heads(runtime: Runtime) -> MedusaHeads:
    """Three heads of random residual blocks over the target's own output matrix."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = MedusaHeads(
            hidden_size=runtime.hidden_size,
            vocab_size=runtime.vocab_size,
            num_heads=3,
            num_layers=1,
            output="target",
        )
    return heads.to(runtime.device, runtime.dtype)
