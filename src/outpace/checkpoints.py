"""Checks of weight files before anything loads them, and fingerprints of weights."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import InvalidCheckpoint, MissingExtra

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = 4096  # bytes of each tensor that a fingerprint reads, at its start and end


def check_folder(folder: Path) -> None:
    """Checks config.json and the safetensors files of a model folder.

    Raises:
        InvalidCheckpoint: naming the file that is missing, truncated or no JSON.
    """
    config = folder / "config.json"
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{folder} has no config.json: it is no model folder") from None
    except (ValueError, OSError) as error:
        raise InvalidCheckpoint(f"{config} is no valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidCheckpoint(f"{config} holds no JSON object")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise InvalidCheckpoint(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        check_safetensors(file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise InvalidCheckpoint(f"{index} is broken: {error}") from error
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise InvalidCheckpoint(f"{folder} lacks {missing[0]}, which its index names")


def check_safetensors(file: Path) -> None:
    """Compares a safetensors header with the size of its file.

    Raises:
        InvalidCheckpoint: when the file is truncated or the header is broken.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, size)))
        ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InvalidCheckpoint(f"{file} has no safetensors header: {error}") from error
    if size != expected:
        raise InvalidCheckpoint(
            f"{file} has {size} bytes where its header says {expected}: it is truncated, "
            "copy or download it again"
        )


def check_gguf(file: Path) -> None:
    """Compares the tensors of a GGUF file with the size of the file.

    Raises:
        InvalidCheckpoint: when it is truncated or no GGUF file.
        MissingExtra: when the package that reads GGUF is absent.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtra(
            "GGUF files need the package gguf: pip install 'outpace[gguf]'"
        ) from error
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise InvalidCheckpoint(f"{file} is no GGUF file")
    try:
        reader = GGUFReader(file)
        end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=0)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise InvalidCheckpoint(
            f"{file} is truncated or broken ({error}): copy or download it again"
        ) from error
    if not reader.tensors or end > file.stat().st_size:
        raise InvalidCheckpoint(f"{file} ends before its tensors do: copy or download it again")


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Identifies weights by name, shape, dtype and a sample of the bytes of each tensor."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().contiguous().flatten()
        count = max(SAMPLE // flat.element_size(), 1)
        for part in (flat[:count], flat[-count:]):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def file_key(file: Path, **context: Any) -> str:
    """Names a file's content: its size and samples of its bytes, with what else matters."""
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as stream:
        for at in range(0, size, max(size // 64, 1)):
            stream.seek(at)
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()[:16]
