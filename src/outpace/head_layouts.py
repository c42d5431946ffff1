"""The folders that Medusa heads come in: outpace's own, FasterDecoding's, and vLLM's up to 0.32."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outpace.checkpoints import check_safetensors
from outpace.errors import InvalidCheckpoint, InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.runtimes.base import Runtime

FORMAT, VERSION = "outpace-medusa", 1
OUTPUTS = ("own", "shared", "target")
OWN_FILES = ("model.safetensors",)
OTHER_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "pytorch_model.bin",
)
SIZES = ("hidden_size", "vocab_size", "num_heads", "num_layers")
KEYS = {*SIZES, "format", "version", "dependent", "output", "base_fingerprint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a folder holds, before anybody checked that the tensors are the right ones.

    Args:
        file: the weights.
        shape: the arguments of `MedusaHeads`.
        tensors: by their names in the file.
        name_in_file: from a name in `MedusaHeads` to that in the file.
        base_fingerprint: of the model that the heads were trained on; None when it is unknown.
        choices: the tree stored with them.
    """

    file: Path
    shape: dict[str, Any]
    tensors: dict[str, Tensor]
    name_in_file: Callable[[str], str]
    base_fingerprint: str | None = None
    choices: list[tuple[int, ...]] | None = None


def read_folder(folder: Path, runtime: Runtime) -> Stored:
    """Recognises the layout of a folder and reads it.

    Args:
        folder: exists.
        runtime: the target's, whose sizes hold where a layout does not state its own.

    Raises:
        InvalidCheckpoint: for a file that is missing or damaged, or a config that makes no sense.
    """
    config = Config(folder / "config.json")
    own = config.values.get("format") == FORMAT
    names = OWN_FILES if own else OTHER_FILES
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise InvalidCheckpoint(f"{folder} holds no weights: one of {', '.join(names)} is needed")
    tensors = _read_tensors(file)
    if own:
        return _read_own(config, file, tensors)
    if file.stem == "medusa_lm_head":
        return _read_fasterdecoding(config, file, tensors, runtime)
    return _read_vllm(config, file, tensors)


@dataclass(frozen=True, slots=True)
class Names:
    """Another project's names, as templates over head h, layer l and part (weight or bias)."""

    block: str
    output: str

    def in_file(self, name: str) -> str:
        """From a name in `MedusaHeads`."""
        if name.startswith("blocks."):
            _, h, layer, part = name.split(".")
            return self.block.format(h=h, l=layer, part=part)
        return self.output.format(h=name.split(".")[1]) if name.startswith("outputs.") else name


class Config:
    """A config.json whose values are checked as they are asked for."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidCheckpoint(f"{file} is missing: it describes the heads") from None
        except (ValueError, OSError) as error:
            raise InvalidCheckpoint(f"{file} is no valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidCheckpoint(f"{file} holds no JSON object")
        self.values: dict[str, Any] = values

    def size(self, *names: str) -> int:
        """A number of at least 1, under the first of `names` that is there."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            raise InvalidCheckpoint(f"{self.file} lacks {names[0]}")
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a whole number of at least 1")
        return value

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choices(self) -> list[tuple[int, ...]] | None:
        """The stored tree, if there is one."""
        if "choices" not in self.values:
            return None
        choices = self.values["choices"]
        lists = isinstance(choices, list) and all(isinstance(c, list) for c in choices)
        if not lists or not all(isinstance(rank, int) for c in choices for rank in c):
            raise self.wrong("choices", "a list of lists of ranks")
        return [tuple(choice) for choice in choices]

    def wrong(self, name: str, allowed: str) -> InvalidCheckpoint:
        """The error for a value that is not allowed."""
        return InvalidCheckpoint(
            f"{name} in {self.file} must be {allowed}, not {self.values.get(name)!r}"
        )


def _read_own(config: Config, file: Path, tensors: dict[str, Tensor]) -> Stored:
    values = config.values
    if values.get("version") != VERSION:
        raise InvalidCheckpoint(
            f"{config.file} has version {values.get('version')!r}, only {VERSION} is known here: "
            "upgrade outpace"
        )
    for problem, names in (
        ("lacks", KEYS - values.keys()),
        ("has unknown", values.keys() - KEYS - {"choices"}),
    ):
        if names:
            raise InvalidCheckpoint(f"{config.file} {problem} {', '.join(sorted(names))}")
    if values["output"] not in OUTPUTS:
        raise config.wrong("output", f"one of {', '.join(OUTPUTS)}")
    if not isinstance(values["base_fingerprint"], str):
        raise config.wrong("base_fingerprint", "text")
    sizes = {name: config.size(name) for name in SIZES}
    if "token_map" in tensors:
        tensors["token_map"] = checked_map(tensors["token_map"], sizes["vocab_size"])
    return Stored(
        file=file,
        shape={
            **sizes,
            "dependent": config.flag("dependent"),
            "output": values["output"],
            "token_map": tensors.get("token_map"),
        },
        tensors=tensors,
        name_in_file=str,
        base_fingerprint=values["base_fingerprint"],
        choices=config.choices(),
    )


def _read_fasterdecoding(
    config: Config, file: Path, tensors: dict[str, Tensor], runtime: Runtime
) -> Stored:
    """{h}.{l}.linear.weight and .bias, and {h}.{L}.weight unless its version is 2."""
    num_layers = config.size("medusa_num_layers")
    hidden_size, first = runtime.hidden_size, tensors.get("0.0.linear.weight")
    if first is not None and first.dim() == 2 and first.shape[0] == first.shape[1]:
        hidden_size = first.shape[0]
    return Stored(
        file=file,
        shape={
            "hidden_size": hidden_size,
            "vocab_size": runtime.vocab_size,
            "num_heads": config.size("medusa_num_heads"),
            "num_layers": num_layers,
            "output": "target" if str(config.values.get("version")) == "2" else "own",
        },
        tensors=tensors,
        name_in_file=_fasterdecoding_names(num_layers).in_file,
    )


def _fasterdecoding_names(num_layers: int) -> Names:
    return Names("{h}.{l}.linear.{part}", f"{{h}}.{num_layers}.weight")


def _read_vllm(config: Config, file: Path, tensors: dict[str, Tensor]) -> Stored:
    """blocks.{h}.layers.{l}.weight and .bias, lm_heads.{h}.weight or one lm_head.weight, token_map.

    Its `logit_scale` does not matter here: it changes no rank.
    """
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    vocab_size = config.size("vocab_size")
    num_heads = config.size("num_heads", "medusa_num_heads")
    num_layers = config.size("num_hidden_layers", "medusa_num_layers")
    shared = config.flag("original_lm_head", default=False)
    names = Names("blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight")
    if "0.0.linear.weight" in tensors:
        names = _fasterdecoding_names(num_layers)
    if shared and "lm_head.weight" in tensors:
        names = replace(names, output="lm_head.weight")
    num_reduced = vocab_size
    if config.values.get("truncated_vocab_size") is not None:
        num_reduced = config.size("truncated_vocab_size")
    token_map = None
    if num_reduced != vocab_size:
        if "token_map" not in tensors or tensors["token_map"].shape != (num_reduced,):
            raise InvalidCheckpoint(
                f"{file} lacks the token_map of its reduced vocabulary of {num_reduced} tokens"
            )
        token_map = tensors["token_map"] = checked_map(tensors["token_map"], vocab_size)
        for i in range(num_heads):  # vLLM also takes full matrices, and keeps these rows of them
            name = names.in_file(f"outputs.{i}.weight")
            if name in tensors and tensors[name].shape[:1] == (vocab_size,):
                tensors[name] = tensors[name][token_map]
    hidden_size = config.size("hidden_size")
    has_bias = any(name.endswith(".bias") for name in tensors)
    if not config.flag("medusa_fc_bias", default=has_bias):
        if has_bias:
            raise InvalidCheckpoint(
                f"{file} has biases and {config.file} says medusa_fc_bias false: set it to true"
            )
        for h, layer in itertools.product(range(num_heads), range(num_layers)):
            tensors[names.in_file(f"blocks.{h}.{layer}.bias")] = torch.zeros(hidden_size)
    return Stored(
        file=file,
        shape={
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "output": "shared" if shared else "own",
            "token_map": token_map,
        },
        tensors=tensors,
        name_in_file=names.in_file,
    )


def checked_map(token_map: Tensor, vocab_size: int) -> Tensor:
    """The map of a reduced vocabulary as `[reduced]` int64 ids.

    Raises:
        InvalidRequest: when it is anything but a row of distinct ids.
    """
    if token_map.dim() == 1 and token_map.dtype in (torch.int32, torch.int64) and len(token_map):
        ids = token_map.long()
        inside = 0 <= int(ids.min()) and int(ids.max()) < vocab_size
        if inside and len(set(ids.tolist())) == len(ids):
            return ids
    raise InvalidRequest(f"token_map must be a row of distinct ids from 0 to {vocab_size - 1}")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        check_safetensors(file)
        try:
            return load_file(file)
        except SafetensorError as error:
            raise InvalidCheckpoint(f"{file} is broken: {error}") from error
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidCheckpoint(
            f"{file} is truncated, broken, or holds more than tensors: {reason}"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise InvalidCheckpoint(f"{file} holds something else than named tensors")
    return dict(tensors)
