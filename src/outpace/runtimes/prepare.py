"""From a model's folder to a packed model: packed and checked once, then read from a file."""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoints import file_key, fingerprint, read_config
from outpace.convert import LOCK_SECONDS, Progress, quiet_transformers, report
from outpace.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from outpace.runtimes.architecture import ADVICE, Architecture
from outpace.runtimes.base import Pass
from outpace.runtimes.native import NativeRuntime, kernel_names
from outpace.runtimes.packed import VERSION, Packed, pack, read_packed, write_packed
from outpace.tree import Tree

CHECK_TOKENS = 24
LEAST_SIMILARITY = 0.95  # rounding to int8 leaves 0.99, wrong arithmetic 0.8 and less


def packed_model(folder: Path, *, cache: Path, progress: Progress | None = None) -> Packed:
    """The packed form of a Hugging Face folder, made once and kept in `cache`.

    When it is made, its logits are compared with those that transformers computes from the same
    folder. A file that is broken or of another version is made again; of two processes one makes
    it, the other waits.

    Raises:
        UnsupportedModel: when the native runtime cannot run the model, with the reason.
        InvalidCheckpoint: for weights that are missing or not finite.
        InvalidRequest: when the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    if not kernel_names():
        raise UnsupportedModel(f"outpace was installed without its native part: {ADVICE}")
    architecture = Architecture.from_config(read_config(folder / "config.json"))
    file = cache / f"{folder.name}-{_key(folder)}.native"
    packed = read_packed(file)
    if packed is not None:
        return packed
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=LOCK_SECONDS):
            packed = read_packed(file)  # another process may have been faster
            if packed is None:
                packed = _make_checked(folder, file, architecture, progress)
    except Timeout as error:
        raise InvalidRequest(
            f"another process has been packing {folder.name} for {LOCK_SECONDS} s: "
            f"end it, or delete {file}.lock"
        ) from error
    except OSError as error:
        raise InvalidRequest(
            f"{folder.name} cannot be packed into the cache folder {cache} ({error}): make room, "
            "set OUTPACE_CACHE to another folder, or use --runtime transformers"
        ) from error
    return packed


def _key(folder: Path) -> str:
    """Names the folder's content: its weights and its configuration."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file_key(file, packing=VERSION).encode())
    return digest.hexdigest()[:16]


def _make_checked(
    folder: Path, file: Path, architecture: Architecture, progress: Progress | None
) -> Packed:
    """The file appears when its content is checked, so that nobody takes an unchecked one."""
    from outpace.runtimes.pretrained import load_folder

    label = f"Packing {folder.name}"
    for stale in file.parent.glob(f".{file.name}.*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    report(progress, 0, 2, label)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as temporary:
        unchecked = Path(temporary, file.name)
        _make(folder, unchecked, architecture)
        report(progress, 1, 2, label)
        packed = read_packed(unchecked)
        if packed is None:
            raise OSError("what was written cannot be read back")
        with quiet_transformers():
            model = load_folder(folder, dtype=None, device=torch.device("cpu"))
        check_packed(packed, lambda ids: model(ids, use_cache=False).logits)
        unchecked.replace(file)
    report(progress, 2, 2, label)
    return packed


def _make(folder: Path, file: Path, architecture: Architecture) -> None:
    from safetensors import SafetensorError, safe_open

    homes: dict[str, Any] = {}
    for part in sorted(folder.glob("*.safetensors")):
        try:
            stream: Any = safe_open(part, framework="pt")
        except SafetensorError as error:
            raise InvalidCheckpoint(f"{part} is broken: {error}") from error
        homes.update(dict.fromkeys(stream.keys(), stream))
    if not homes:
        raise UnsupportedModel(f"the native runtime reads safetensors only: {ADVICE}")

    def source(name: str) -> Tensor | None:
        return homes[name].get_tensor(name) if name in homes else None

    identity = fingerprint((name, home.get_tensor(name)) for name, home in homes.items())
    write_packed(file, architecture, pack(architecture, set(homes), source), identity)


def check_packed(packed: Packed, reference: Callable[[Tensor], Tensor]) -> None:
    """Compares a packed model's logits with the original's on a text of random tokens.

    Args:
        packed: the model.
        reference: ids `[1, tokens]` to logits `[1, tokens, vocab]`.

    Raises:
        UnsupportedModel: when they are not alike.
    """
    runtime = NativeRuntime(packed)
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(CHECK_TOKENS, runtime.max_context)
    ids = torch.randint(runtime.vocab_size, (num_tokens,), generator=generator)
    tree = Tree.chain(ids.tolist())
    work = Pass(sequence=runtime.open(), tree=tree, rows=range(len(tree)))
    got = runtime.forward([work])[0].logits
    with torch.inference_mode():
        wanted = reference(ids[None])[0].float()
    likeness = torch.nn.functional.cosine_similarity(
        got - got.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True), dim=-1
    )
    similarity = float(likeness.mean())
    if not (math.isfinite(similarity) and similarity >= LEAST_SIMILARITY):
        raise UnsupportedModel(
            f"the native runtime computes other logits than transformers for this model "
            f"(similarity {similarity:.2f}): {ADVICE}"
        )
