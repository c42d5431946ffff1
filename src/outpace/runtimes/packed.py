"""Weights as the native kernels read them: quantised, packed, and kept in one file."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.errors import InvalidCheckpoint, UnsupportedModel
from outpace.runtimes.architecture import ADVICE, Architecture

VERSION = 1  # raised whenever packed weights come out differently
MAGIC = b"outpace\x00"
STRIP = 32  # outputs that lie side by side
BLOCK = 64  # inputs that one rotation mixes
ALIGN = 64

Array = npt.NDArray[Any]
# Gives a tensor by name; None where the checkpoint has none.
Source = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A model ready for the native runtime.

    Args:
        architecture: its shape.
        arrays: name -> array; see `pack`.
        fingerprint: of the weights that it was made of.
    """

    architecture: Architecture
    arrays: dict[str, Array]
    fingerprint: str = ""


def pack(
    architecture: Architecture, names: set[str], source: Source
) -> Iterator[tuple[str, Array]]:
    """Quantises weights to int8, one scale an output, and lays them out for the kernels.

    Inputs are rotated by Hadamard matrices of 64, weights here and rows at run time, so that no
    input stands out and one scale a row serves. Source: QuaRot, 2404.00456.

    Args:
        architecture: of the model.
        names: all tensors of the checkpoint.
        source: reads one.

    Raises:
        UnsupportedModel: for a tensor that the native runtime has no use for.
        InvalidCheckpoint: for one that is missing, mis-shaped, or not finite.
    """
    yield from _Packer(architecture, names, source).arrays()


class _Packer:
    def __init__(self, architecture: Architecture, names: set[str], source: Source) -> None:
        self.a = architecture
        self.names = names
        self.source = source
        self.used: set[str] = set()
        self.head_pad = -(-architecture.head_dim // 16) * 16

    def arrays(self) -> Iterator[tuple[str, Array]]:
        a = self.a
        for i in range(len(a.windows)):
            yield from self._layer(f"layers.{i}.", f"model.layers.{i}.")
        yield "final_norm", self._norm("model.norm.weight", a.hidden, BLOCK)
        embedding = self._take("model.embed_tokens.weight", a.vocab, a.hidden)
        head = None if a.tied else self._take("lm_head.weight", a.vocab, a.hidden)
        self.used.add("lm_head.weight")  # tied checkpoints may repeat it
        yield from _matrix("head", embedding if head is None else head)
        if head is not None:
            yield from _matrix("embedding", embedding)
        unknown = sorted(n for n in self.names - self.used if not n.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise UnsupportedModel(
                f"the native runtime has no use for the tensor {unknown[0]}: {ADVICE}"
            )

    def _layer(self, to: str, at: str) -> Iterator[tuple[str, Array]]:
        a = self.a
        yield f"{to}attention_norm", self._norm(f"{at}input_layernorm.weight", a.hidden, BLOCK)
        yield f"{to}mlp_norm", self._norm(f"{at}post_attention_layernorm.weight", a.hidden, BLOCK)
        attention = f"{at}self_attn."
        if f"{attention}q_norm.weight" in self.names:
            yield f"{to}query_norm", self._norm(f"{attention}q_norm.weight", a.head_dim, 16)
            yield f"{to}key_norm", self._norm(f"{attention}k_norm.weight", a.head_dim, 16)
        heads = {"q": a.heads, "k": a.kv_heads, "v": a.kv_heads}
        weights, biases = [], []
        for name, count in heads.items():
            weight, bias = self._linear(f"{attention}{name}_proj", count * a.head_dim, a.hidden)
            weights.append(_pad_heads(weight, count, self.head_pad))
            biases.append(_pad_heads(bias, count, self.head_pad))
        yield from _matrix(f"{to}qkv", torch.cat(weights), torch.cat(biases))
        weight, bias = self._linear(f"{attention}o_proj", a.hidden, a.heads * a.head_dim)
        yield from _matrix(
            f"{to}output",
            _pad_heads(weight.T, a.heads, self.head_pad).T,
            bias,
            outputs=-(-a.hidden // BLOCK) * BLOCK,
        )
        gate, up = (
            self._linear(f"{at}mlp.{name}_proj", a.intermediate, a.hidden)
            for name in ("gate", "up")
        )
        yield from _matrix(
            f"{to}gate_up", *(_interleave(*pair) for pair in zip(gate, up, strict=True))
        )
        weight, bias = self._linear(f"{at}mlp.down_proj", a.hidden, a.intermediate)
        yield from _matrix(f"{to}down", weight, bias, outputs=-(-a.hidden // BLOCK) * BLOCK)

    def _linear(self, name: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        weight = self._take(f"{name}.weight", outputs, inputs)
        if f"{name}.bias" not in self.names:
            return weight, torch.zeros(outputs)
        return weight, self._take(f"{name}.bias", outputs)

    def _norm(self, name: str, size: int, step: int) -> Array:
        weight = self._take(name, size)
        padded = torch.zeros(-(-size // step) * step)
        padded[:size] = weight
        return padded.numpy()

    def _take(self, name: str, *shape: int) -> Tensor:
        tensor = self.source(name)
        if tensor is None:
            raise UnsupportedModel(
                f"the native runtime needs the tensor {name}, which the checkpoint lacks: {ADVICE}"
            )
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"{name} has the shape {tuple(tensor.shape)}, the native runtime needs {shape}: "
                f"{ADVICE}"
            )
        self.used.add(name)
        tensor = tensor.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidCheckpoint(f"{name} holds NaN or infinite weights: copy the model again")
        return tensor


def _pad_heads(tensor: Tensor, heads: int, head_pad: int) -> Tensor:
    """`[heads * head_dim, ...]` with each head filled up with zeros."""
    split = tensor.reshape(heads, -1, *tensor.shape[1:])
    padded = split.new_zeros(heads, head_pad, *tensor.shape[1:])
    padded[:, : split.shape[1]] = split
    return padded.reshape(heads * head_pad, *tensor.shape[1:])


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """16 gates, their 16 ups, and so on; filled up to whole blocks."""
    size = -(-gate.shape[0] // BLOCK) * BLOCK
    both = gate.new_zeros(2, size, *gate.shape[1:])
    both[0, : gate.shape[0]], both[1, : up.shape[0]] = gate, up
    split = both.reshape(2, size // 16, 16, *gate.shape[1:])
    return split.transpose(0, 1).reshape(2 * size, *gate.shape[1:])


def hadamard(size: int) -> Tensor:
    """`[size, size]` of +1 and -1, symmetric, its square `size` times the identity."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _matrix(
    name: str, weight: Tensor, bias: Tensor | None = None, *, outputs: int | None = None
) -> Iterator[tuple[str, Array]]:
    """Packs `[outputs, inputs]` in strips `[inputs / 4][32][4]`, with scales and offsets."""
    rows = -(-(outputs or weight.shape[0]) // STRIP) * STRIP
    inputs = -(-weight.shape[1] // BLOCK) * BLOCK
    padded = torch.zeros(rows, inputs)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    rotated = padded.reshape(-1, BLOCK) @ (hadamard(BLOCK) / BLOCK)
    padded = rotated.reshape(rows, inputs)
    scales = padded.abs().amax(dim=1) / 127
    quantised = torch.round(padded / scales.clamp_min(1e-30)[:, None]).clamp(-127, 127)
    strips = quantised.reshape(rows // STRIP, STRIP, inputs // 4, 4).permute(0, 2, 1, 3)
    yield f"{name}.weights", strips.to(torch.int8).reshape(rows // STRIP, -1).contiguous().numpy()
    yield f"{name}.scales", scales.numpy()
    yield f"{name}.offsets", (128 * quantised.sum(dim=1)).to(torch.int32).numpy()
    if bias is not None and bool(bias.any()):
        biases = torch.zeros(rows)
        biases[: len(bias)] = bias
        yield f"{name}.biases", biases.numpy()


# The file: arrays, each at a multiple of 64 bytes; a JSON description; its length; the magic.


def write_packed(
    file: Path, architecture: Architecture, arrays: Iterator[tuple[str, Array]], fingerprint: str
) -> None:
    """Writes a packed model; the file appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            _write(stream, architecture, arrays, fingerprint)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _write(
    stream: BinaryIO,
    architecture: Architecture,
    arrays: Iterator[tuple[str, Array]],
    fingerprint: str,
) -> None:
    table, checksum, at = [], 0, 0
    for name, array in arrays:
        data = array.tobytes() + bytes(-array.nbytes % ALIGN)
        table.append([name, str(array.dtype), list(array.shape), at])
        checksum = zlib.crc32(data, checksum)
        at += len(data)
        stream.write(data)
    header = {
        "version": VERSION,
        "checksum": checksum,
        "fingerprint": fingerprint,
        "architecture": asdict(architecture),
        "arrays": table,
    }
    text = json.dumps(header).encode()
    stream.write(text + struct.pack("<QI", len(text), zlib.crc32(text)) + MAGIC)


def _load(file: Path) -> Array:
    """The file's bytes: on Linux in huge pages, which kernels read a sixth faster, else mapped."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.memmap(file, dtype=np.uint8, mode="r")
    with file.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        memory = mmap.mmap(-1, max(size, 1))
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        view, at = memoryview(memory), 0
        while count := stream.readinto(view[at:]):
            at += count
        return np.frombuffer(memory, dtype=np.uint8)[:at]


def read_packed(file: Path) -> Packed | None:
    """A packed model; None where the file is absent, of another version, or broken."""
    tail = struct.calcsize("<QI") + len(MAGIC)
    try:
        data = _load(file)
        length, text_checksum = struct.unpack("<QI", data[-tail : -len(MAGIC)].tobytes())
        if data[-len(MAGIC) :].tobytes() != MAGIC or length > len(data) - tail:
            return None
        end = len(data) - tail - length
        text = data[end : len(data) - tail].tobytes()
        if zlib.crc32(text) != text_checksum:
            return None
        header = json.loads(text)
        if header["version"] != VERSION or zlib.crc32(data[:end].data) != header["checksum"]:
            return None
        arrays = {
            name: data[at : at + math.prod(shape) * np.dtype(kind).itemsize]
            .view(kind)
            .reshape(shape)
            for name, kind, shape, at in header["arrays"]
        }
        fields: dict[str, Any] = header["architecture"]
        for name in ("windows", "frequencies"):
            fields[name] = tuple(fields[name])
        architecture = Architecture(**fields)
    except (OSError, ValueError, LookupError, TypeError, struct.error):
        return None
    return Packed(architecture=architecture, arrays=arrays, fingerprint=header["fingerprint"])
