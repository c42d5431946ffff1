"""The target's hidden states over training text, kept on disk beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outpace.errors import InvalidRequest
from outpace.runtimes.base import Pass
from outpace.training.data import Example, read_shard, shard_files

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.runtimes.base import Runtime

Report = Callable[[str], None]
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One answer as heads see it: row j is the state that made the target write answer[j].

    Args:
        hidden: `[len(answer), hidden]` float16, the input of the LM head.
        answer: `[len(answer)]` ids.
    """

    hidden: Tensor
    answer: Tensor


def cached_texts(
    runtime: Runtime, folder: Path, *, limit_gb: float, report: Report | None = None
) -> list[Text]:
    """The states of a data folder's answers, computed for the shards that have none yet.

    They come from the runtime that will serve the heads, so training sees what inference sees.
    Examples that do not fit the model's context are left out.

    Args:
        runtime: the target's.
        folder: with shards of `outpace.training.data`.
        limit_gb: most bytes of states on disk, in 10^9; later shards are left out and reported.
        report: receives lines of progress.

    Raises:
        InvalidRequest: when the disk is full or a file is broken; what is whole stays.
    """
    texts: list[Text] = []
    left, files = int(limit_gb * GB), shard_files(folder)
    for number, path in enumerate(files):
        _, examples = read_shard(path)
        examples = [e for e in examples if len(e.prompt) + len(e.answer) <= runtime.max_context]
        need = sum(len(e.answer) for e in examples) * runtime.hidden_size * 2
        if need > left:
            if report is not None:
                report(
                    f"The limit of {limit_gb:g} GB holds the states of {number} of {len(files)} "
                    "shards: raise it to train on all of them"
                )
            break
        left -= need
        hidden = _states(runtime, path, examples, need)
        at = 0
        for example in examples:
            end = at + len(example.answer)
            texts.append(Text(hidden=hidden[at:end], answer=torch.tensor(example.answer)))
            at = end
        if report is not None and (number % 10 == 9 or number + 1 == len(files)):
            report(f"Hidden states: {number + 1} of {len(files)} shards")
    return texts


def answer_states(runtime: Runtime, example: Example) -> Tensor:
    """`[len(answer), hidden]`: row j is the state that predicts answer[j]."""
    ids = [*example.prompt, *example.answer[:-1]]
    sequence = runtime.open()
    rows = []
    try:
        while len(runtime.tokens(sequence)) < len(ids):
            chunk = runtime.next_chunk(sequence, ids)
            output = runtime.forward([Pass(sequence=sequence, tree=chunk, rows=[])])[0]
            rows.append(output.hidden.clone())
            runtime.keep(sequence, range(len(chunk)))
    finally:
        runtime.close(sequence)
    return torch.cat(rows)[len(example.prompt) - 1 :]


def _states(runtime: Runtime, shard: Path, examples: Sequence[Example], need: int) -> Tensor:
    """`[answer tokens of the shard, hidden]`, from its file or into it."""
    path = shard.with_suffix(".hidden.safetensors")
    try:
        if path.exists():
            hidden = load_file(path)["hidden"]
            if len(hidden) == sum(len(e.answer) for e in examples):
                return hidden
        if shutil.disk_usage(shard.parent).free < need:
            raise OSError(f"{need / GB:.2f} GB are needed")
        with torch.inference_mode():
            rows = [answer_states(runtime, example) for example in examples]
            hidden = torch.cat([*rows, torch.empty(0, runtime.hidden_size)]).cpu().half()
        temporary = path.with_suffix(".part")
        save_file({"hidden": hidden}, temporary)
        temporary.replace(path)
        return hidden.clone()
    except (OSError, SafetensorError, KeyError) as error:
        raise InvalidRequest(
            f"{path} cannot be written or read ({error}): make room or lower --cache-gb; the same "
            "command goes on behind the last whole shard"
        ) from error
