"""Broken files are named in one line before anything loads them; fingerprints of weights."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import build
from tiny_gguf import LAYERS, TOKENS, write_gguf
from torch import Tensor

from outpace.checkpoints import check_folder, check_safetensors, file_key, fingerprint, read_gguf
from outpace.errors import InvalidCheckpoint, OutpaceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder: Path, text: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=text) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)


# Folders


def test_a_good_folder_passes(folder: Path) -> None:
    check_folder(folder)


@pytest.mark.parametrize("content", ["", "{", "\x00", "[1]", "{'a': 1}"])
def test_a_wrong_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    refused(folder, r"config\.json .*JSON")


def test_a_folder_without_config_or_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights")
    (folder / "config.json").unlink()
    refused(folder, r"no config\.json")


def test_an_index_that_names_an_absent_file(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "other"}}))
    refused(folder, "lacks other")
    for broken in ("[]", "{}", "{"):
        index.write_text(broken)
        refused(folder, r"index\.json is broken")


def test_every_truncation_of_safetensors_is_noticed(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
            check_safetensors(file)
    file.write_bytes(whole + b"x")
    with pytest.raises(InvalidCheckpoint, match="bytes where its header says"):
        check_safetensors(file)


@pytest.mark.parametrize(
    "header",
    ["[]", "1", '{"a": 1}', '{"a": {"data_offsets": []}}', '{"a": {"data_offsets": "xy"}}'],
)
def test_a_wrong_safetensors_header(folder: Path, header: str) -> None:
    data = struct.pack("<Q", len(header)) + header.encode()
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, "no safetensors header")


# GGUF


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", kind="Q8_0")


def test_the_header_is_that_of_the_gguf_package(gguf: Path) -> None:
    from gguf import GGUFReader

    header = read_gguf(gguf)
    right = {key: field.contents() for key, field in GGUFReader(gguf).fields.items()}
    assert header.metadata == {k: v for k, v in right.items() if not k.startswith("GGUF.")}
    assert header.metadata["tokenizer.ggml.tokens"] == list(TOKENS)
    assert header.types == {"Q8_0": 7 * LAYERS + 1}


def test_every_truncation_of_a_gguf_file_is_noticed(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    part = tmp_path / "part.gguf"
    for size in {*range(0, len(whole), 997), *range(24), len(whole) - 1}:
        part.write_bytes(whole[:size])
        with pytest.raises(InvalidCheckpoint, match=r"part\.gguf is truncated or no GGUF file"):
            read_gguf(part)
    part.write_bytes(whole)
    read_gguf(part)  # control


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "keys"])
@pytest.mark.parametrize("count", [1 << 24, 1 << 40, (1 << 64) - 1])
def test_a_wrong_count_does_not_keep_a_loop_busy(
    gguf: Path, tmp_path: Path, at: int, count: int
) -> None:
    data = bytearray(gguf.read_bytes())
    struct.pack_into("<Q", data, at, count)
    file = tmp_path / "a.gguf"
    file.write_bytes(data)
    start = time.process_time()
    with pytest.raises(InvalidCheckpoint):
        read_gguf(file)
    assert time.process_time() - start < 2.0


def test_a_long_list_in_a_large_empty_file_is_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 28)
    file = tmp_path / "a.gguf"
    with file.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + key)
        stream.truncate(1 << 32)  # sparse
    start = time.process_time()
    with pytest.raises(InvalidCheckpoint, match="a list of 268435456 entries"):
        read_gguf(file)
    assert time.process_time() - start < 2.0


def test_flipped_bytes_give_a_header_or_a_clear_error(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    rng = random.Random(0)
    file = tmp_path / "a.gguf"
    refusals = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(12_000)] = rng.randrange(256)
        file.write_bytes(data)
        try:
            read_gguf(file)
        except OutpaceError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 30  # control


# Fingerprints and keys


def weights(name: str, **options: object) -> dict[str, Tensor]:
    return build(name, **options).state_dict()  # type: ignore[arg-type]


def test_the_fingerprint_does_not_depend_on_the_dtype() -> None:
    base = {name: x.bfloat16() for name, x in weights("llama").items()}
    wide = {name: x.float() for name, x in base.items()}
    assert fingerprint(base.items()) == fingerprint(wide.items())
    assert fingerprint(base.items()) == fingerprint(reversed(base.items()))


def test_the_fingerprint_tells_weights_names_and_shapes_apart() -> None:
    base = weights("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    seen = {fingerprint(base.items())}
    for change in (
        {name: base[name] + 0.5},
        {name: base[name].T},
        {name: base[name].flatten()},
        {"other": torch.ones(3)},
    ):
        seen.add(fingerprint((base | change).items()))
    seen.add(fingerprint((k, v) for k, v in base.items() if k != name))
    assert len(seen) == 6


def test_tied_weights_count_once() -> None:
    tied = weights("llama-tied")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert torch.equal(tied[head], tied[embedding])  # control
    without = {name: x for name, x in tied.items() if name != head}
    copied = tied | {head: tied[head].clone()}
    assert fingerprint(tied.items()) == fingerprint(without.items()) == fingerprint(copied.items())
    assert fingerprint(tied.items()) != fingerprint((tied | {head: tied[head] + 1}).items())


def test_a_file_s_key_depends_on_content_and_context(gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.gguf"
    other.write_bytes(gguf.read_bytes())
    assert file_key(other, conversion=2) == file_key(gguf, conversion=2)
    assert file_key(other, conversion=1) != file_key(gguf, conversion=2)
    write_gguf(other, kind="Q8_0", seed=1)
    assert file_key(other, conversion=2) != file_key(gguf, conversion=2)
