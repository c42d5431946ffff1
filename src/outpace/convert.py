"""From a GGUF file to a folder that loads in a second."""

from __future__ import annotations

import io
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.checkpoints import GGUFHeader, file_key, read_gguf
from outpace.errors import InvalidRequest, MissingExtra, OutpaceError, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, str], None]

CONVERSION = 2  # raised whenever a conversion comes out differently
LOCK_SECONDS = 600

# Values of tokenizer.ggml.pre whose vocabularies split numbers into digits before the GPT-2 rule.
SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def convert_gguf(file: Path, *, cache: Path, progress: Progress | None = None) -> Path:
    """Converts a GGUF file once into a folder under `cache`, and gives that folder.

    Two processes convert it once between them, and an interrupted conversion leaves nothing that
    a later one would take for a result.

    Raises:
        MissingExtra: when a package that reads GGUF is absent.
        InvalidCheckpoint: when the file is truncated or broken.
        UnsupportedModel: when transformers does not know the architecture.
        InvalidRequest: when the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    target = cache / f"{file.stem}-{file_key(file, conversion=CONVERSION)}"
    if target.is_dir():
        return target
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise MissingExtra(
                f"GGUF files need the package {package}: pip install 'outpace[gguf]'"
            )
    header = read_gguf(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=LOCK_SECONDS):
            if not target.is_dir():  # else another process was faster
                _convert_into(target, file, header, progress)
    except Timeout as error:
        raise InvalidRequest(
            f"another process has been converting {file.name} for {LOCK_SECONDS} s: "
            f"end it, or delete {target}.lock"
        ) from error
    except OutpaceError:  # some are OSErrors too
        raise
    except OSError as error:
        raise InvalidRequest(
            f"{file.name} cannot be converted into the cache folder {cache} ({error}): "
            "make room, or set OUTPACE_CACHE to another folder"
        ) from error
    return target


def _convert_into(target: Path, file: Path, header: GGUFHeader, progress: Progress | None) -> None:
    label = f"Converting {file.name}"
    for stale in target.parent.glob(f".{target.name}.*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    report(progress, 0, 3, label)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        result = Path(temporary) / "model"
        with quiet_transformers():
            tokenizer, model = _load(file, header)
            report(progress, 2, 3, label)
            _save(tokenizer, model, result)
        result.rename(target)
    report(progress, 3, 3, label)


def _load(file: Path, header: GGUFHeader) -> tuple[PreTrainedTokenizerBase, Any]:
    import torch
    import transformers

    from outpace.runtimes.pretrained import load_pretrained

    try:
        with redirect_stderr(io.StringIO()):  # its progress bars cannot be switched off
            made = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = load_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=_dtype(header.types),
                device=torch.device("cpu"),
            )
    except OutpaceError:
        raise
    except (ValueError, LookupError, NotImplementedError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise UnsupportedModel(
            f"transformers {transformers.__version__} cannot load {file.name} ({reason}): "
            "a newer one may"
        ) from error
    tokenizer = repaired(made, header.metadata)
    for config in (model.config, model.generation_config):
        for name in ("bos", "eos", "pad"):
            setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    return tokenizer, model


def _save(tokenizer: PreTrainedTokenizerBase, model: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(str(error)) from error


def _dtype(types: Mapping[str, int]) -> torch.dtype:
    """The widest format that the file fills: quantised weights take bfloat16."""
    import torch

    if types.keys() <= {"F32", "F64"}:
        return torch.float32
    return torch.float16 if types.keys() <= {"F16", "F32", "F64"} else torch.bfloat16


def repaired(made: PreTrainedTokenizerBase, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers makes of a GGUF file, put right by the file's metadata.

    Releases of transformers differ in the named tokens, the decoder and the BOS rule, and none
    splits digits where `tokenizer.ggml.pre` demands it.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    texts = ggml["tokens"]
    state = json.loads(made.backend_tokenizer.to_str())
    state["added_tokens"] = [x for x in state["added_tokens"] if x["id"] < len(texts)]
    state["post_processor"] = None  # made anew from add_bos_token and add_eos_token
    backend = Tokenizer.from_str(json.dumps(state))
    if ggml["model"] == "gpt2":
        backend.decoder = decoders.ByteLevel()
        if ggml.get("pre") in SPLIT_DIGITS:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
    named = {
        f"{name}_token": texts[ggml[f"{key}_token_id"]]
        for name, key in _NAMED_TOKENS.items()
        if ggml.get(f"{key}_token_id", len(texts)) < len(texts)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        # llama.cpp's defaults: a SentencePiece vocabulary opens with BOS
        add_bos_token="bos_token" in named and ggml.get("add_bos_token", ggml["model"] == "llama"),
        add_eos_token="eos_token" in named and ggml.get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and notes off the terminal while it works for us."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def report(progress: Progress | None, done: int, total: int, label: str) -> None:
    """Tells `progress`, if there is one."""
    if progress is not None:
        progress(done, total, label)
