"""Heads compute what their papers say, and folders of every layout load strictly or not at all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TableRuntime
from torch import Tensor

from outpace import heads as heads_module
from outpace.errors import IncompatibleModels, InvalidCheckpoint, InvalidRequest, ModelNotFound
from outpace.heads import MedusaHeads, load, save
from outpace.proposers.base import Target

HIDDEN, VOCAB = 6, 11
STATES = torch.randn(100, HIDDEN, generator=torch.Generator().manual_seed(0))
TOKEN_MAP = torch.tensor([7, 0, 10, 3])


def make_target(
    *, hidden: int = HIDDEN, vocab: int = VOCAB, fingerprint: str = "base"
) -> tuple[Target, Callable[[Tensor], Tensor]]:
    """A target with an LM head of its own."""
    runtime = TableRuntime(torch.zeros(vocab, vocab))
    runtime.hidden_size = hidden
    matrix = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(1))
    return (
        Target(runtime=runtime, token_texts={}, fingerprint=fingerprint),
        lambda states: states @ matrix.T,
    )


TARGET, PROJECT = make_target()


def random_heads(**shape: Any) -> MedusaHeads:
    """Three heads of two layers unless told otherwise."""
    how: dict[str, Any] = dict(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=3, num_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MedusaHeads(**(how | shape))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def by_hand(
    tensors: dict[str, Tensor],
    weight: str,
    bias: str,
    output: Callable[[int], Tensor],
    *,
    num_heads: int,
    num_layers: int,
) -> Tensor:
    """`[n, K, width]` logits on STATES from tensors named by format strings of h and l."""
    rows = []
    for h in range(num_heads):
        x = STATES
        for layer in range(num_layers):
            y = x @ tensors[weight.format(h=h, l=layer)].float().T
            if bias:
                y = y + tensors[bias.format(h=h, l=layer)].float()
            x = x + silu(y)
        rows.append(x @ output(h).float().T)
    return torch.stack(rows, dim=1)


# What heads compute


@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize("token_map", [None, TOKEN_MAP])
def test_independent_heads(output: str, token_map: Tensor | None) -> None:
    heads = random_heads(output=output, token_map=token_map)
    tensors = heads.state_dict()
    logits = heads(STATES)
    assert logits.shape == (100, 3, VOCAB if token_map is None else 4)
    torch.testing.assert_close(heads(STATES, num_heads=2), logits[:, :2])
    torch.testing.assert_close(heads.head(1, STATES), logits[:, 1])
    right = by_hand(
        tensors,
        "blocks.{h}.{l}.weight",
        "blocks.{h}.{l}.bias",
        lambda h: tensors[f"outputs.{h if output == 'own' else 0}.weight"],
        num_heads=3,
        num_layers=2,
    )
    torch.testing.assert_close(logits, right)
    ids = heads.tokens(logits.argmax(dim=-1))
    assert set(ids.flatten().tolist()) <= set(range(VOCAB) if token_map is None else [7, 0, 10, 3])
    # Every layer is a module of its own, or the second would repeat the first.
    assert not torch.equal(tensors["blocks.0.0.weight"], tensors["blocks.0.1.weight"])


def test_heads_on_the_targets_matrix_start_as_the_targets_own_guess() -> None:
    heads = random_heads(output="target", zero_init=True)
    right = PROJECT(STATES)[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(heads(STATES, project=PROJECT), right)
    assert not any(name.startswith("outputs") for name in heads.state_dict())
    control = random_heads(output="target")
    assert not torch.allclose(control(STATES, project=PROJECT)[:, 0], PROJECT(STATES))
    with pytest.raises(ValueError, match="pass project"):
        heads(STATES)


def test_dependent_heads_read_hidden_root_and_path_in_this_order() -> None:
    heads = random_heads(dependent=True)
    embeddings = torch.randn(100, 3, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits = heads(STATES, embeddings)
    tensors = heads.state_dict()
    for i in range(3):
        first = tensors[f"blocks.{i}.0.weight"]
        assert first.shape == (HIDDEN, HIDDEN * (i + 2))
        y = STATES @ first[:, :HIDDEN].T + tensors[f"blocks.{i}.0.bias"]
        for j in range(i + 1):
            y += embeddings[:, j] @ first[:, HIDDEN * (j + 1) : HIDDEN * (j + 2)].T
        x = STATES + silu(y)
        x = x + silu(x @ tensors[f"blocks.{i}.1.weight"].T + tensors[f"blocks.{i}.1.bias"])
        torch.testing.assert_close(logits[:, i], x @ tensors[f"outputs.{i}.weight"].T)
    swapped = heads(STATES, embeddings[:, [1, 0, 2]])
    assert not torch.allclose(swapped[:, 1], logits[:, 1])
    later = embeddings.clone()
    later[:, 1:] = 9.0
    assert heads(STATES, later)[:, 0].equal(logits[:, 0])  # head 0 sees the root alone
    with pytest.raises(ValueError, match="pass embeddings"):
        heads(STATES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_layers", 0),
        ("hidden_size", -1),
        ("vocab_size", True),
        ("output", "tied"),
        ("token_map", torch.tensor([0, 0])),
        ("token_map", torch.tensor([0, VOCAB])),
        ("token_map", torch.tensor([-1, 2])),
        ("token_map", torch.tensor([0.0, 1.0])),
        ("token_map", torch.tensor([], dtype=torch.long)),
        ("token_map", torch.tensor([[0, 1]])),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        random_heads(**{field: value})
    with pytest.raises(InvalidRequest, match="token_map"):
        random_heads(output="target", token_map=TOKEN_MAP)


# outpace's own folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"output": "shared", "num_heads": 1},
        {"output": "target"},
        {"dependent": True, "num_layers": 1},
        {"token_map": TOKEN_MAP},
        {"token_map": TOKEN_MAP, "output": "shared", "dependent": True},
    ],
    ids=str,
)
def test_a_round_trip_is_equal_bit_by_bit(
    tmp_path: Path, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    heads = random_heads(**shape).to(dtype)
    folder = tmp_path / "new" / "folder"
    save(heads, folder, base_fingerprint="base", choices=[(0,), (0, 1), (3,)])
    again = load(folder, target=TARGET)
    assert again.choices == [(0,), (0, 1), (3,)]
    ours, theirs = heads.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    embeddings = torch.randn(100, 3, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    reads: dict[str, Any] = {"embeddings": embeddings} if heads.dependent else {}
    reads["project"] = lambda states: PROJECT(states.float())
    assert heads(STATES.to(dtype), **reads).equal(again(STATES.to(dtype), **reads))
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_the_config_is_the_documented_one(tmp_path: Path) -> None:
    save(random_heads(), tmp_path, base_fingerprint="base")
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "format": "outpace-medusa",
        "version": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": 3,
        "num_layers": 2,
        "dependent": False,
        "output": "own",
        "base_fingerprint": "base",
    }
    assert load(tmp_path, target=TARGET).choices is None


def test_an_interrupted_save_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(random_heads(), tmp_path, base_fingerprint="base")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def interrupted(tensors: dict[str, Tensor], file: Path, **_: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(heads_module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(random_heads(num_heads=2), tmp_path, base_fingerprint="base")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (make_target(fingerprint="other")[0], "fingerprint 'base', this one has 'other'"),
        (make_target(hidden=7)[0], "hidden size 6, the target has 7"),
        (make_target(vocab=10)[0], "vocabulary size 11, the target has 10"),
    ],
)
def test_heads_of_another_base_are_refused(tmp_path: Path, other: Target, match: str) -> None:
    save(random_heads(), tmp_path, base_fingerprint="base")
    with pytest.raises(IncompatibleModels, match=match):
        load(tmp_path, target=other)
    padded, _ = make_target(vocab=16)  # the same vocabulary, padded by the target
    assert load(tmp_path, target=padded).vocab_size == VOCAB


# Other projects' folders


def put(folder: Path, config: object, tensors: dict[str, Tensor], file: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)


def randoms(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fasterdecoding(
    num_heads: int = 3, num_layers: int = 1, version: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config: dict[str, Any] = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "somebody/base",
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{h}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{h}.{layer}.linear.bias"] = (HIDDEN,)
        if version is None:
            shapes[f"{h}.{num_layers}.weight"] = (VOCAB, HIDDEN)
    if version is not None:
        config["version"] = version
    return config, randoms(shapes)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_fasterdecoding_layout(tmp_path: Path, file: str, num_layers: int) -> None:
    config, tensors = fasterdecoding(num_layers=num_layers)
    put(tmp_path, config, tensors, file)
    heads = load(tmp_path, target=TARGET)
    right = by_hand(
        tensors,
        "{h}.{l}.linear.weight",
        "{h}.{l}.linear.bias",
        lambda h: tensors[f"{h}.{num_layers}.weight"],
        num_heads=3,
        num_layers=num_layers,
    )
    torch.testing.assert_close(heads(STATES), right)


def test_fasterdecoding_layout_of_version_2_uses_the_targets_head(tmp_path: Path) -> None:
    config, tensors = fasterdecoding(version="2")
    put(tmp_path, config, tensors, "medusa_lm_head.safetensors")
    heads = load(tmp_path, target=TARGET)
    assert heads.output == "target"
    matrix = PROJECT(torch.eye(HIDDEN)).T
    right = by_hand(
        tensors,
        "{h}.{l}.linear.weight",
        "{h}.{l}.linear.bias",
        lambda h: matrix,
        num_heads=3,
        num_layers=1,
    )
    torch.testing.assert_close(heads(STATES, project=PROJECT), right)

    # Without the version its matrices are missing, with it they are unexpected.
    del config["version"]
    put(tmp_path, config, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"0\.1\.weight is missing"):
        load(tmp_path, target=TARGET)
    config, tensors = fasterdecoding()
    put(tmp_path, config | {"version": "2"}, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"0\.1\.weight is unexpected"):
        load(tmp_path, target=TARGET)


def vllm(
    num_heads: int = 2,
    num_layers: int = 2,
    *,
    bias: bool = True,
    outputs: str = "lm_heads.{h}.weight",
    rows: int = VOCAB,
    **more: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        **more,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(num_heads):
        for layer in range(num_layers):
            shapes[f"blocks.{h}.layers.{layer}.weight"] = (HIDDEN, HIDDEN)
            if bias:
                shapes[f"blocks.{h}.layers.{layer}.bias"] = (HIDDEN,)
        shapes[outputs.format(h=h)] = (rows, HIDDEN)
    return config, randoms(shapes)


def vllm_by_hand(tensors: dict[str, Tensor], *, outputs: str, bias: bool = True) -> Tensor:
    return by_hand(
        tensors,
        "blocks.{h}.layers.{l}.weight",
        "blocks.{h}.layers.{l}.bias" if bias else "",
        lambda h: tensors[outputs.format(h=h)],
        num_heads=2,
        num_layers=2,
    )


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize(
    ("how", "outputs", "bias"),
    [
        ({"medusa_fc_bias": True}, "lm_heads.{h}.weight", True),
        ({}, "lm_heads.{h}.weight", True),  # vLLM drops these biases; the heads were made with them
        ({"medusa_fc_bias": False}, "lm_heads.{h}.weight", False),
        ({"original_lm_head": True}, "lm_head.weight", True),
        ({"original_lm_head": True}, "lm_heads.0.weight", True),
        ({"logit_scale": 0.5, "truncated_vocab_size": VOCAB}, "lm_heads.{h}.weight", True),
    ],
)
def test_vllm_layout(
    tmp_path: Path, file: str, prefix: str, how: dict[str, Any], outputs: str, bias: bool
) -> None:
    config, tensors = vllm(bias=bias, outputs=outputs, **how)
    put(tmp_path, config, {prefix + name: tensor for name, tensor in tensors.items()}, file)
    heads = load(tmp_path, target=TARGET)
    assert heads.output == ("shared" if "original_lm_head" in how else "own")
    right = vllm_by_hand(tensors, outputs=outputs, bias=bias)
    torch.testing.assert_close(heads(STATES), right)
    if bias:
        assert not torch.allclose(heads(STATES), vllm_by_hand(tensors, outputs=outputs, bias=False))


@pytest.mark.parametrize("full", [False, True])
def test_vllm_layout_with_a_reduced_vocabulary(tmp_path: Path, full: bool) -> None:
    config, tensors = vllm(rows=VOCAB if full else 4, truncated_vocab_size=4)
    tensors["token_map"] = TOKEN_MAP.int()
    put(tmp_path, config, tensors, "model.safetensors")
    heads = load(tmp_path, target=TARGET)
    right = vllm_by_hand(tensors, outputs="lm_heads.{h}.weight")
    torch.testing.assert_close(heads(STATES), right[..., TOKEN_MAP] if full else right)
    assert heads.tokens(torch.arange(4)).equal(TOKEN_MAP)


def test_vllm_layout_with_fasterdecodings_names(tmp_path: Path) -> None:
    config = vllm(3, 1)[0] | {"medusa_fc_bias": True}
    put(tmp_path, config, fasterdecoding()[1], "model.safetensors")
    put(tmp_path / "same", *fasterdecoding(), "medusa_lm_head.pt")
    ours, theirs = load(tmp_path, target=TARGET), load(tmp_path / "same", target=TARGET)
    assert ours(STATES).equal(theirs(STATES))


# Damage: each of these folders is good until one thing is broken

Folder = tuple[dict[str, Any], dict[str, Tensor], str]


def own_folder(**shape: Any) -> Folder:
    heads = random_heads(**shape)
    config = {
        "format": "outpace-medusa",
        "version": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": 3,
        "num_layers": 2,
        "dependent": False,
        "output": "own",
        "base_fingerprint": "base",
    }
    return config, heads.state_dict(), "model.safetensors"


LAYOUTS: dict[str, tuple[Callable[[], Folder], str]] = {
    "own": (own_folder, "blocks.2.1.weight"),
    "fasterdecoding": (
        lambda: (*fasterdecoding(), "medusa_lm_head.safetensors"),
        "2.0.linear.bias",
    ),
    "fasterdecoding pt": (lambda: (*fasterdecoding(), "medusa_lm_head.pt"), "1.1.weight"),
    "vllm": (lambda: (*vllm(), "model.safetensors"), "blocks.1.layers.0.weight"),
    "vllm bin": (lambda: (*vllm(), "pytorch_model.bin"), "lm_heads.1.weight"),
}
layouts = pytest.mark.parametrize(("make", "name"), LAYOUTS.values(), ids=LAYOUTS)


@layouts
def test_tensors_that_are_not_the_right_ones_are_named(
    tmp_path: Path, make: Callable[[], Folder], name: str
) -> None:
    config, tensors, file = make()
    put(tmp_path, config, tensors, file)
    load(tmp_path, target=TARGET)

    def refused(change: dict[str, Tensor], match: str, *, without: str = "") -> None:
        kept = {key: tensor for key, tensor in tensors.items() if key != without}
        put(tmp_path, config, kept | change, file)
        with pytest.raises(InvalidCheckpoint, match=match) as caught:
            load(tmp_path, target=TARGET)
        assert str(tmp_path / file) in str(caught.value)

    refused({}, f"{name} is missing", without=name)
    refused({"extra.weight": torch.zeros(1)}, "extra.weight is unexpected")
    wrong = tensors[name][:-1].clone()
    shape = r"\[" + ", ".join(map(str, wrong.shape)) + r"\]"
    refused({name: wrong}, f"{name} has shape {shape} instead of")
    refused({name: tensors[name].to(torch.int8)}, f"{name} has dtype torch.int8")
    refused(
        {name: wrong, "extra": torch.zeros(1)}, f"(?s)(?=.*extra is unexpected)(?=.*{name} has)"
    )


@layouts
def test_damaged_files_are_refused(tmp_path: Path, make: Callable[[], Folder], name: str) -> None:
    config, tensors, file = make()
    put(tmp_path, config, tensors, file)
    whole = (tmp_path / file).read_bytes()
    for size in (0, 1, 7, 8, 9, 60, len(whole) // 2, len(whole) - 1):
        (tmp_path / file).write_bytes(whole[:size])
        with pytest.raises(InvalidCheckpoint, match=file):
            load(tmp_path, target=TARGET)
    for seed in range(20):
        noise = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(seed))
        (tmp_path / file).write_bytes(bytes(noise.tolist()))
        with pytest.raises(InvalidCheckpoint, match=file):
            load(tmp_path, target=TARGET)
    (tmp_path / file).unlink()
    with pytest.raises(InvalidCheckpoint, match=r"no weights.*safetensors"):
        load(tmp_path, target=TARGET)
    (tmp_path / file).write_bytes(whole)
    load(tmp_path, target=TARGET)

    for text, match in (("{", "no valid JSON"), ("[1]", "no JSON object"), ("\xff", "JSON")):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(InvalidCheckpoint, match=match):
            load(tmp_path, target=TARGET)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"config\.json is missing"):
        load(tmp_path, target=TARGET)


def test_a_pickle_may_hold_tensors_only(tmp_path: Path) -> None:
    config, _ = fasterdecoding()
    put(tmp_path, config, {}, "medusa_lm_head.pt")

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harm",))

    harmful: Any = {"0.0.linear.weight": Harm()}
    for write in (torch.save, lambda what, file: file.write_bytes(pickle.dumps(what))):
        write(harmful, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(InvalidCheckpoint, match="more than tensors"):
            load(tmp_path, target=TARGET)
    assert not (tmp_path / "harm").exists()
    torch.save([torch.zeros(1)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InvalidCheckpoint, match="named tensors"):
        load(tmp_path, target=TARGET)


@pytest.mark.parametrize(
    ("make", "change", "match"),
    [
        (own_folder, {"version": 2}, "version 2, only 1 is known"),
        (own_folder, {"num_heads": None}, "num_heads .* at least 1, not None"),
        (own_folder, {"num_layers": 0}, "num_layers .* at least 1, not 0"),
        (own_folder, {"dependent": "yes"}, "dependent .* true or false, not 'yes'"),
        (own_folder, {"output": "tied"}, "output .* own, shared, target, not 'tied'"),
        (own_folder, {"base_fingerprint": 5}, "base_fingerprint .* text"),
        (own_folder, {"temperature": 1}, "unknown temperature"),
        (own_folder, {"choices": [[0], 1]}, "choices .* list of lists of ranks"),
        (own_folder, {"num_heads": 2}, r"2 heads of 2 layers.*blocks\.2\.0\.bias is unexpected"),
        (own_folder, {"num_heads": 4}, r"4 heads of 2 layers.*blocks\.3\.0\.bias is missing"),
        (own_folder, {"dependent": True}, r"blocks\.0\.0\.weight has shape"),
        (own_folder, {"output": "shared"}, r"outputs\.1\.weight is unexpected"),
        (
            LAYOUTS["fasterdecoding"][0],
            {"medusa_num_heads": 2},
            r"2\.0\.linear\.bias is unexpected",
        ),
        (LAYOUTS["fasterdecoding"][0], {"medusa_num_heads": "3"}, "medusa_num_heads"),
        (LAYOUTS["vllm"][0], {"medusa_fc_bias": False}, "medusa_fc_bias false: set it to true"),
        (LAYOUTS["vllm"][0], {"truncated_vocab_size": 4}, "lacks the token_map"),
        (LAYOUTS["vllm"][0], {"truncated_vocab_size": VOCAB + 1}, "lacks the token_map"),
        (LAYOUTS["vllm"][0], {"original_lm_head": True}, r"lm_heads\.1\.weight is unexpected"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, make: Callable[[], Folder], change: dict[str, Any], match: str
) -> None:
    config, tensors, file = make()
    put(tmp_path, config | change, tensors, file)
    with pytest.raises(InvalidCheckpoint, match=match):
        load(tmp_path, target=TARGET)


@pytest.mark.parametrize("missing", ["vocab_size", "num_heads", "dependent", "base_fingerprint"])
def test_a_key_that_the_config_lacks_is_named(tmp_path: Path, missing: str) -> None:
    config, tensors, file = own_folder()
    del config[missing]
    put(tmp_path, config, tensors, file)
    with pytest.raises(InvalidCheckpoint, match=f"lacks {missing}"):
        load(tmp_path, target=TARGET)


def test_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path) -> None:
    save(random_heads(token_map=TOKEN_MAP), tmp_path, base_fingerprint="base")
    load(tmp_path, target=TARGET)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    token_map = tensors.pop("token_map")
    save_file(tensors, file)
    with pytest.raises(InvalidCheckpoint, match=r"outputs\.0\.weight has shape .* a token_map"):
        load(tmp_path, target=TARGET)
    for wrong in (token_map + VOCAB, token_map.float(), token_map[:2]):
        save_file(tensors | {"token_map": wrong}, file)
        with pytest.raises(
            InvalidCheckpoint, match=r"token_map|shape \[4, 6\] instead of \[2, 6\]"
        ):
            load(tmp_path, target=TARGET)


def test_other_layouts_name_another_hidden_size(tmp_path: Path) -> None:
    other, _ = make_target(hidden=7)
    for make in (LAYOUTS["fasterdecoding"][0], LAYOUTS["vllm"][0]):
        config, tensors, file = make()
        put(tmp_path, config, tensors, file)
        with pytest.raises(IncompatibleModels, match="hidden size 6, the target has 7"):
            load(tmp_path, target=other)
        (tmp_path / file).unlink()


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="absent"):
        load(tmp_path / "absent", target=TARGET)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match="file"):
        load(tmp_path / "file", target=TARGET)
