"""What the native runtime's tests share: tiny models packed in memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tiny import FAMILIES, build
from transformers import PreTrainedModel

from outpace.runtimes.architecture import Architecture
from outpace.runtimes.native import NativeRuntime
from outpace.runtimes.packed import Packed, pack

LONG = 1024  # positions, more than two pages of the cache

_LLAMA = FAMILIES["llama"]
_SIZES = {k: v for k, v in _LLAMA.items() if k != "model_type"}
NATIVE: dict[str, dict[str, Any]] = {
    **{
        name: FAMILIES[name]
        for name in (
            "llama",
            "llama-mha",
            "llama-mqa",
            "llama-head-dim",
            "llama-tied",
            "llama-rope-llama3",
            "llama-rope-yarn",
            "llama-rope-linear",
            "mistral",
        )
    },
    "llama-bias": dict(_LLAMA, attention_bias=True, mlp_bias=True),
    "qwen2": dict(_SIZES, model_type="qwen2"),
    "qwen2-window": dict(
        _SIZES,
        model_type="qwen2",
        sliding_window=16,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "qwen3": dict(_SIZES, model_type="qwen3", head_dim=8),
}


@cache
def original(name: str) -> PreTrainedModel:
    """A random model of a family, its biases random too; nobody may change it."""
    fields = dict(NATIVE[name], max_position_embeddings=LONG)
    model = build("llama", **fields)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def packed_of(model: PreTrainedModel, **overrides: Any) -> Packed:
    """A loaded model, packed in memory; overrides are fields of its configuration."""
    architecture = Architecture.from_config(model.config.to_dict() | overrides)
    state = model.state_dict()
    return Packed(architecture=architecture, arrays=dict(pack(architecture, set(state), state.get)))


@cache
def packed(name: str) -> Packed:
    """`packed_of` the family's original."""
    return packed_of(original(name))


def native(name: str = "llama", **how: Any) -> NativeRuntime:
    """A runtime on a packed tiny model; two threads unless the test says otherwise."""
    return NativeRuntime(packed(name), **({"threads": 2} | how))
