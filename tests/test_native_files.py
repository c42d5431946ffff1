"""Packed models on disk, and which runtime serves a model."""

from __future__ import annotations

import errno
import json
import struct
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import original, packed
from tiny import build, byte_tokenizer

from outpace import models
from outpace.checkpoints import fingerprint
from outpace.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from outpace.models import load_model
from outpace.runtimes import packed as format_
from outpace.runtimes import prepare
from outpace.runtimes.native import NativeRuntime, kernel_names
from outpace.runtimes.packed import MAGIC, read_packed, write_packed
from outpace.runtimes.prepare import packed_model
from outpace.runtimes.transformers import TransformersRuntime

pytestmark = pytest.mark.skipif(not kernel_names(), reason="built without a compiler")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    place = tmp_path / "model"
    original("llama").save_pretrained(place)
    return place


def written(file: Path) -> Path:
    whole = packed("llama")
    write_packed(file, whole.architecture, iter(whole.arrays.items()), "base")
    return file


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    whole, again = packed("llama"), read_packed(written(tmp_path / "a.native"))
    assert again is not None and again.fingerprint == "base"
    assert asdict(again.architecture) == asdict(whole.architecture)
    assert again.arrays.keys() == whole.arrays.keys()
    for name, array in whole.arrays.items():
        assert again.arrays[name].dtype == array.dtype
        assert np.array_equal(again.arrays[name], array)
        assert again.arrays[name].ctypes.data % 64 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.native"]


@pytest.mark.parametrize("place", [0, 5000, -1, -15, -200])
def test_a_changed_byte_is_noticed(tmp_path: Path, place: int) -> None:
    file = written(tmp_path / "a.native")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert read_packed(file) is None


@pytest.mark.parametrize("size", [0, 1, 20, 1000])
def test_a_cut_file_is_noticed(tmp_path: Path, size: int) -> None:
    file = written(tmp_path / "a.native")
    file.write_bytes(file.read_bytes()[:size])
    assert read_packed(file) is None
    assert read_packed(tmp_path / "absent.native") is None


def test_another_version_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "a.native")
    monkeypatch.setattr(format_, "VERSION", format_.VERSION + 1)
    assert read_packed(file) is None


def test_a_header_that_lies_about_its_arrays_is_noticed(tmp_path: Path) -> None:
    """Its checksums are right, as those of a file from somewhere else would be."""
    file = written(tmp_path / "a.native")
    data = file.read_bytes()
    (length, _) = struct.unpack("<QI", data[-20:-8])
    header = json.loads(data[-20 - length : -20])
    header["arrays"][0][2] = [1 << 40]
    text = json.dumps(header).encode()
    tail = struct.pack("<QI", len(text), format_.zlib.crc32(text)) + MAGIC
    file.write_bytes(data[: -20 - length] + text + tail)
    assert read_packed(file) is None


def test_a_folder_is_packed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder.parent / "cache"
    first = packed_model(folder, cache=cache)
    assert first.fingerprint == fingerprint(original("llama").state_dict().items())
    (file,) = cache.glob("*.native")
    monkeypatch.setattr(prepare, "_make", None)  # would raise if it were called
    packed_model(folder, cache=cache)
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:-30])
    packed_model(folder, cache=cache)
    assert read_packed(file) is not None
    build("llama", seed=1).save_pretrained(folder)  # other weights, another file
    packed_model(folder, cache=cache)
    assert len(list(cache.glob("*.native"))) == 2


def test_two_at_once_pack_it_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = prepare._make

    def counting(*args: Any) -> None:
        made.append(args[1])
        make(*args)

    monkeypatch.setattr(prepare, "_make", counting)
    cache = folder.parent / "cache"
    found: list[str] = []
    workers = [
        threading.Thread(target=lambda: found.append(packed_model(folder, cache=cache).fingerprint))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(made) == 1 and len(found) == 3 and len(set(found)) == 1


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder.parent / "cache"

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(format_, "_write", full)
    with pytest.raises(InvalidRequest, match="No space left"):
        packed_model(folder, cache=cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_model_that_fails_the_check_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "LEAST_SIMILARITY", 1.5)
    cache = folder.parent / "cache"
    with pytest.raises(UnsupportedModel, match="other logits"):
        packed_model(folder, cache=cache)
    assert not list(cache.glob("*.native"))


def test_an_interrupted_check_leaves_no_unchecked_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folder.parent / "cache"
    seen: list[list[Path]] = []

    def interrupted(*_: Any) -> None:
        seen.append(list(cache.glob("*.native")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "check_packed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packed_model(folder, cache=cache)
    assert seen == [[]], "the file stood in the cache before it was checked"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    packed_model(folder, cache=cache)
    assert len(list(cache.glob("*.native"))) == 1, "control: a checked one is kept"


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    cache = folder.parent / "cache"
    packed_model(folder, cache=cache)
    file = next(cache.glob("*.native"))
    file.unlink()
    left = cache / f".{file.name}.killed"
    left.mkdir()
    packed_model(folder, cache=cache)
    assert file.exists() and not left.exists()


def test_a_header_that_the_library_refuses_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is broken"):
        packed_model(folder, cache=folder.parent / "cache")
    file.write_bytes(data)
    packed_model(folder, cache=folder.parent / "cache")


def test_a_context_shorter_than_the_check(tmp_path: Path) -> None:
    place = tmp_path / "model"
    build("llama", max_position_embeddings=8).save_pretrained(place)
    assert packed_model(place, cache=tmp_path / "cache").architecture.max_context == 8


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"vocab_size": 0}, {"layer_types": 5}],
    ids=str,
)
def test_a_config_that_cannot_be_read_is_told_by_the_native_runtime(
    folder: Path, wrong: dict[str, Any]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UnsupportedModel, match="--runtime transformers"):
        packed_model(folder, cache=folder.parent / "cache")


# Which runtime serves


def loaded(folder: Path, **how: Any) -> Any:
    tokenizer = byte_tokenizer(64)
    return load_model(
        folder, tokenizer=tokenizer, cache=folder.parent / "cache", device="cpu", **how
    ).runtime


def test_auto_takes_the_native_runtime_where_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_fast", lambda kernels: bool(kernels))
    assert isinstance(loaded(folder), NativeRuntime)
    assert isinstance(loaded(folder, exactness="ordinary"), NativeRuntime)
    for how in ({"dtype": "float32"}, {"exactness": "same-shape"}, {"runtime": "transformers"}):
        assert isinstance(loaded(folder, **how), TransformersRuntime)
    build("gpt2").save_pretrained(folder.parent / "gpt2")
    assert isinstance(loaded(folder.parent / "gpt2"), TransformersRuntime)
    monkeypatch.setattr(models, "_fast", lambda kernels: False)  # the portable kernels are slow
    assert isinstance(loaded(folder), TransformersRuntime)
    assert isinstance(loaded(folder, runtime="native"), NativeRuntime)


def test_auto_goes_on_without_room_for_the_packed_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "_fast", lambda kernels: bool(kernels))
    monkeypatch.setattr(format_, "_write", full)
    notes: list[str] = []
    assert isinstance(loaded(folder, notice=notes.append), TransformersRuntime)
    assert "No space left" in notes[0]
    with pytest.raises(InvalidRequest, match="No space left"):
        loaded(folder, runtime="native")


def test_wishes_that_the_native_runtime_cannot_meet_are_refused(folder: Path) -> None:
    for how in ({"dtype": "float32"}, {"exactness": "same-shape"}):
        with pytest.raises(InvalidRequest, match="--runtime transformers"):
            loaded(folder, runtime="native", **how)
    with pytest.raises(InvalidRequest, match="runtime must be one of"):
        loaded(folder, runtime="fast")
    with pytest.raises(InvalidRequest, match="reads files"):
        load_model(original("llama"), runtime="native")
    build("gpt2").save_pretrained(folder.parent / "gpt2")
    with pytest.raises(UnsupportedModel, match="activation_function"):
        loaded(folder.parent / "gpt2", runtime="native")
    broken = build("llama")
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    broken.save_pretrained(folder.parent / "broken")
    with pytest.raises(InvalidCheckpoint, match=r"model\.norm\.weight"):
        loaded(folder.parent / "broken", runtime="native")
