"""Which models the native runtime can run, read from their configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.errors import UnsupportedModel

ADVICE = "--runtime transformers runs it"

# Fields that change the arithmetic, with the values that leave it as the native runtime has it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "activation_function": ("silu", "swish"),
    "alibi": (False,),
    "attention_chunk_size": (0,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_parallel_residual": (False,),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A Llama-like decoder: RMS norms, rotary positions, grouped queries, gated SiLU.

    Args:
        hidden, heads, kv_heads, head_dim, intermediate, vocab: sizes.
        norm_eps: of the norms.
        max_context: most tokens of a sequence.
        windows: for each layer, the keys that a token sees; 0 is all.
        frequencies: `[head_dim / 2]` of the rotary positions, radians a token.
        rope_scale: factor of their cosines and sines.
        tied: the LM head is the embedding.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    max_context: int
    windows: tuple[int, ...]
    frequencies: tuple[float, ...]
    rope_scale: float
    tied: bool

    @property
    def sizes(self) -> dict[str, float]:
        """What the kernels ask for."""
        names = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "norm_eps")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Reads the fields of a config.json.

        Raises:
            UnsupportedModel: naming the field that the native runtime does not know how to follow.
        """
        for name, neutral in NEUTRAL.items():
            value = config.get(name)
            if value is not None and value not in neutral:
                raise _unsupported(config, name, value)
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or hidden // heads)
            if head_dim % 2 or head_dim > 256:
                raise _unsupported(config, "head_dim", head_dim)
            frequencies, scale = _rope(config, head_dim)
            architecture = cls(
                hidden=hidden,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                intermediate=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                norm_eps=float(config["rms_norm_eps"]),
                max_context=int(config["max_position_embeddings"]),
                windows=_windows(config),
                frequencies=tuple(frequencies.tolist()),
                rope_scale=scale,
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except UnsupportedModel:  # a ValueError too
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UnsupportedModel(
                f"the native runtime cannot read the configuration of {_name(config)} ({error}): "
                f"{ADVICE}"
            ) from error
        except KeyError as error:
            raise UnsupportedModel(
                f"the native runtime cannot run {_name(config)}, whose configuration has no field "
                f"{error.args[0]}: {ADVICE}"
            ) from error
        for name in ("hidden", "heads", "kv_heads", "intermediate", "vocab", "max_context"):
            if getattr(architecture, name) < 1:
                raise _unsupported(config, name, getattr(architecture, name))
        return architecture


def _name(config: Mapping[str, Any]) -> str:
    kinds = config.get("architectures")
    return str(kinds[0] if isinstance(kinds, list) and kinds else config.get("model_type"))


def _unsupported(config: Mapping[str, Any], field: str, value: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"the native runtime does not support {field}={value!r} of {_name(config)}: {ADVICE}"
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    if not isinstance(window or 0, int) or (window or 0) < 0:
        raise _unsupported(config, "sliding_window", window)
    if kinds is None:
        sliding = bool(window) and config.get("use_sliding_window", True)
        first = config["max_window_layers"] if "use_sliding_window" in config else 0
        return tuple(int(window or 0) if sliding and i >= first else 0 for i in range(num_layers))
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise _unsupported(config, "layer_types", kind)
    if len(kinds) != num_layers:
        raise _unsupported(config, "layer_types", kinds)
    return tuple(int(window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(config: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Frequencies `[dim / 2]` and the factor of cosines and sines, as in transformers."""
    rope: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise _unsupported(config, "rope_type", kind)
    if rope.get("partial_rotary_factor", 1) != 1:
        raise _unsupported(config, "partial_rotary_factor", rope["partial_rotary_factor"])
    base = float(rope.get("rope_theta") or config["rope_theta"])
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if kind == "linear":
        return 1.0 / powers / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers, rope, original), 1.0
    if kind == "yarn":
        return _yarn(powers, rope, base, original, config["max_position_embeddings"])
    return 1.0 / powers, 1.0


def _llama3(frequencies: Tensor, rope: Mapping[str, Any], original: int) -> Tensor:
    """Llama 3.1: slow frequencies divided, fast ones kept, a smooth step between."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    medium = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow = torch.where(wavelength > original / low, frequencies / factor, medium)
    return torch.where(wavelength < original / high, frequencies, slow)


def _yarn(
    powers: Tensor, rope: Mapping[str, Any], base: float, original: int, longest: int
) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2309.00071)."""
    factor = rope.get("factor") or longest / original
    half = len(powers)

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = scale(one) / scale(all_dims) if one and all_dims else scale()

    def dimension(rotations: float) -> float:
        return 2 * half * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    kept = 1 - torch.clamp((torch.arange(half, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)
