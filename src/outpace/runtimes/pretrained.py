"""Loading a model of transformers, and what its configuration says about running it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from outpace.errors import InvalidCheckpoint, InvalidRequest, OutpaceError, UnsupportedModel
from outpace.runtimes.masks import LAYER_TYPES


def load_pretrained(
    folder: Path,
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | None,
    device: torch.device,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Loads a causal LM from a folder, dequantised when it is a GGUF file.

    Args:
        folder: holds config.json and weights, or the GGUF file.
        gguf_file: name of the GGUF file in `folder`.
        dtype: None takes the checkpoint's own.
        device: where the weights go.
        attn_implementation: None lets transformers choose.

    Raises:
        InvalidCheckpoint: naming a tensor that is missing or has another shape than the model.
    """
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # without it, a GGUF file is always dequantised
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # transformers fills missing tensors with random numbers
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for cause, names in (
        ("lacks", info["missing_keys"]),
        ("has the wrong shape for", {name for name, *_ in info["mismatched_keys"]}),
    ):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise InvalidCheckpoint(f"{folder} {cause} {len(names)} of its tensors: {first}")
    _refuse_more_layers(folder, model.config, info["unexpected_keys"])
    return model.to(device) if not getattr(model, "hf_device_map", None) else model


def _refuse_more_layers(folder: Path, config: Any, names: Iterable[str]) -> None:
    """Other tensors that the model does not take may be anything; layers are its own, cut off."""
    for name in sorted(names):
        found = re.search(r"\.(?:layers|h|blocks)\.\d+\.", name)
        if found:
            raise InvalidCheckpoint(
                f"{folder} has more layers than the {config.num_hidden_layers} that its config "
                f"names, as {name}: one of them belongs to another model"
            )


def load_folder(
    folder: Path, *, dtype: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    """`load_pretrained` for a folder whose content nobody vouches for.

    Raises:
        InvalidCheckpoint: for anything that transformers stumbles over.
        InvalidRequest: when the device lacks the memory.
    """
    try:
        return load_pretrained(folder, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(
            f"{folder} does not fit into the memory of {device}: use another device or a smaller "
            "dtype"
        ) from error
    except OutpaceError:
        raise
    except Exception as error:  # a wrong value in a config may raise anything
        lines = str(error).strip().splitlines() or [repr(error)]
        reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        raise InvalidCheckpoint(f"{folder} cannot be loaded as a causal LM: {reason}") from error


def attention_backend(model: PreTrainedModel) -> str:
    backend = str(model.config._attn_implementation)
    if backend not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"{type(model).__name__} runs attention with {backend!r}, which drops a tree's mask: "
            "load it with attn_implementation='sdpa' or 'eager'"
        )
    return backend


def layer_types(config: Any, class_name: str) -> list[str]:
    """The layer type of each layer, by transformers' own rule for configs without the field."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "full_attention"
        if getattr(config, "sliding_window", None) is not None:
            kind = "sliding_attention"
        elif getattr(config, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        kinds = [kind] * int(config.num_hidden_layers)
    unknown = sorted(set(kinds) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedModel(
            f"{class_name} has layers of type {', '.join(unknown)}, whose state cannot drop "
            "rejected tokens: outpace needs attention layers"
        )
    return list(kinds)


def window_sizes(config: Any, class_name: str) -> dict[str, int]:
    """How many tokens a layer of each type sees; 0 is all of them."""
    sizes = {"full_attention": 0}
    for kind, name in (
        ("sliding_attention", "sliding_window"),
        ("chunked_attention", "attention_chunk_size"),
    ):
        value = getattr(config, name, None) or 0
        if not isinstance(value, int) or value < 0:
            raise UnsupportedModel(
                f"{class_name} has {name}={value!r} in its config: it must be a number of tokens"
            )
        sizes[kind] = value
    return sizes


def max_context(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**20  # ALiBi needs no table of positions
