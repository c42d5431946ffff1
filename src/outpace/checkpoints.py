"""Checks of weight files before anything loads them, and fingerprints of weights."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from outpace.errors import InvalidCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = 2048  # numbers of each tensor that a fingerprint reads, at its start and end
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
MAX_ENTRIES = 1 << 22  # of a list in a GGUF header; vocabularies and merges stay far below
MAX_DIMS = 4
SCALARS = dict(enumerate("BbHhIif?")) | dict(zip((10, 11, 12), "Qqd", strict=True))


def check_folder(folder: Path) -> None:
    """Checks config.json and the safetensors files of a model folder.

    Raises:
        InvalidCheckpoint: naming the file that is missing, truncated or no JSON.
    """
    if not (folder / "config.json").exists():
        raise InvalidCheckpoint(f"{folder} has no config.json: it is no model folder")
    read_config(folder / "config.json")
    if (folder / "generation_config.json").exists():
        read_config(folder / "generation_config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise InvalidCheckpoint(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        check_safetensors(file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"{index} is broken: {error}") from error
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise InvalidCheckpoint(f"{folder} lacks {missing[0]}, which its index names")


def read_config(file: Path) -> dict[str, Any]:
    """The fields of a JSON file.

    Raises:
        InvalidCheckpoint: when it cannot be read or holds no JSON object.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidCheckpoint(f"{file} is no valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidCheckpoint(f"{file} holds no JSON object")
    return data


def check_safetensors(file: Path) -> None:
    """Compares a safetensors header with the size of its file.

    Raises:
        InvalidCheckpoint: when the file is truncated or the header is broken.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, MAX_HEADER)))
        ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise InvalidCheckpoint(f"{file} has no safetensors header: {error}") from error
    except OSError as error:
        raise InvalidCheckpoint(f"{file} cannot be read: {error}") from error
    if size != expected:
        raise InvalidCheckpoint(
            f"{file} has {size} bytes where its header says {expected}: it is truncated, "
            "copy or download it again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """What a GGUF file says about itself.

    Args:
        metadata: key -> number, bool, text, or a list of them.
        types: name of a number format -> how many matrices are stored in it.
    """

    metadata: dict[str, Any]
    types: dict[str, int]


def read_gguf(file: Path) -> GGUFHeader:
    """Reads the header of a GGUF file and checks its counts and tensors against the file's size.

    Raises:
        InvalidCheckpoint: when it is truncated, broken or no GGUF file.
    """
    try:
        with file.open("rb") as stream:
            return _GGUFReader(stream, size=file.stat().st_size).header()
    except (ValueError, struct.error, MemoryError) as error:
        raise InvalidCheckpoint(
            f"{file} is truncated or no GGUF file ({error}): copy or download it again"
        ) from error


class _GGUFReader:
    """The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3."""

    def __init__(self, stream: BinaryIO, *, size: int) -> None:
        self._stream = stream
        self._size = size

    def header(self) -> GGUFHeader:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_keys = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is neither 2 nor 3")
        metadata = {self._text(): self._value(*self._unpack("I")) for _ in self._range(num_keys)}
        types: dict[str, int] = {}
        end = 0
        for _ in self._range(num_tensors):
            name, num_dims = self._text(), *self._unpack("I")
            shape = self._unpack(f"{min(num_dims, MAX_DIMS)}Q")
            number, offset = self._unpack("IQ")
            if num_dims > MAX_DIMS or number not in iter(GGMLQuantizationType):
                raise ValueError(f"tensor {name} has {num_dims} dimensions, number format {number}")
            block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
            end = max(end, offset + math.prod(shape) // block * num_bytes)
            if num_dims > 1:
                kind = GGMLQuantizationType(number).name
                types[kind] = types.get(kind, 0) + 1
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment}")
        start = -(-self._stream.tell() // alignment) * alignment
        if not types or start + end > self._size:
            raise ValueError(f"its tensors end at byte {start + end} of {self._size}")
        return GGUFHeader(metadata=metadata, types=types)

    def _take(self, count: int) -> bytes:
        if count > self._size - self._stream.tell():
            raise ValueError(f"it ends before byte {self._stream.tell() + count}")
        return self._stream.read(count)

    def _unpack(self, fields: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{fields}", self._take(struct.calcsize(f"<{fields}")))

    def _text(self) -> str:
        return self._take(*self._unpack("Q")).decode("utf-8", "replace")

    def _range(self, count: int) -> range:
        # a wrong count must not keep a loop busy
        if count > min(MAX_ENTRIES, self._size - self._stream.tell()):
            raise ValueError(f"it has a list of {count} entries")
        return range(count)

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind == 9:
            entry, count = self._unpack("IQ")
            if entry == 8:
                return [self._text() for _ in self._range(count)]
            return list(self._unpack(f"{len(self._range(count))}{_scalar(entry)}"))
        return self._unpack(_scalar(kind))[0]


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"it holds a value of the unknown kind {kind}")
    return SCALARS[kind]


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Identifies weights by name, shape and a sample of each tensor in bfloat16.

    The same base has the same fingerprint in float32 and bfloat16. Of tensors with one content,
    as tied ones have, only the last name counts.
    """
    import torch

    names: dict[tuple[tuple[int, ...], bytes], str] = {}
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        sample = torch.cat([flat[:SAMPLE], flat[-SAMPLE:]]).cpu()
        if sample.is_floating_point():
            sample = sample.to(torch.bfloat16)
        key = tuple(tensor.shape), sample.view(torch.uint8).numpy().tobytes()
        names[key] = max(name, names.get(key, ""))
    digest = hashlib.sha256()
    for (shape, content), name in sorted(names.items(), key=lambda item: item[1]):
        digest.update(f"{name} {shape}".encode() + content)
    return digest.hexdigest()[:32]


def file_key(file: Path, **context: Any) -> str:
    """Names a file's content: its size and samples of its bytes, with what else matters."""
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as stream:
        for at in range(0, size, max(size // 64, 1)):
            stream.seek(at)
            digest.update(stream.read(4096))
    return digest.hexdigest()[:16]
