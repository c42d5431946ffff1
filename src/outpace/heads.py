"""Medusa heads: small networks on the target's hidden state, saved and loaded strictly."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.errors import IncompatibleModels, InvalidCheckpoint, InvalidRequest, ModelNotFound
from outpace.head_layouts import FORMAT, OUTPUTS, VERSION, Stored, checked_map, read_folder
from outpace.sampling import check_int

if TYPE_CHECKING:
    from os import PathLike

    from outpace.proposers.base import Target
    from outpace.runtimes.base import Runtime

SHIPPED = Path(__file__).parent / "data"  # heads that come with the package, by model
MAX_NAMED = 8  # tensors listed in an error message


class ResidualBlock(nn.Linear):
    """x + SiLU(W input + b), where x is the first `out_features` numbers of the input.

    So a first block that also reads embeddings adds to the hidden state in front of them.
    """

    def forward(self, input: Tensor) -> Tensor:
        return input[..., : self.out_features] + nn.functional.silu(super().forward(input))


class MedusaHeads(nn.Module):
    """Head i, from 0, predicts the token 2 + i places behind the one whose hidden state it reads.

    An independent head (Medusa, 2401.10774) reads that state alone. A dependent one (Hydra,
    2402.05109) also reads the embeddings of the root and of the i path tokens behind it:

        place         t       t+1   t+2      ...  t+1+i      t+2+i
        head i reads  hidden  root  path[0]  ...  path[i-1]  and predicts this one

    concatenated in this order, so its first block maps `[hidden * (i + 2)]` to `[hidden]`.

    Args:
        hidden_size: of the target.
        vocab_size: of the target.
        num_heads: heads (K).
        num_layers: residual blocks of each head.
        dependent: whether heads read their path.
        output: "own" matrix for each head, one "shared" by all, or the "target"'s LM head.
        token_map: `[reduced]` the target's ids that own or shared matrices predict; None: all.
        zero_init: blocks start as the identity, as for training.

    Raises:
        InvalidRequest: naming the field and its range.
    """

    token_map: Tensor | None

    def __init__(
        self,
        *,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        dependent: bool = False,
        output: str = "own",
        token_map: Tensor | None = None,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        check_int("vocab_size", vocab_size, 1)
        check_int("num_heads", num_heads, 1)
        check_int("num_layers", num_layers, 1)
        if output not in OUTPUTS:
            raise InvalidRequest(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
        if token_map is not None:
            if output == "target":
                raise InvalidRequest("token_map needs output matrices: output own or shared")
            token_map = checked_map(token_map, vocab_size)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.dependent = dependent
        self.output = output
        self.choices: list[tuple[int, ...]] | None = None  # the tree stored with them, if any
        self.register_buffer("token_map", token_map)
        self.blocks = nn.ModuleList()
        for i in range(num_heads):
            inputs = [hidden_size * (i + 2 if dependent else 1)] + [hidden_size] * (num_layers - 1)
            self.blocks.append(nn.Sequential(*(ResidualBlock(n, hidden_size) for n in inputs)))
        if zero_init:
            for parameter in self.blocks.parameters():
                nn.init.zeros_(parameter)
        num_matrices = {"own": num_heads, "shared": 1, "target": 0}[output]
        self.outputs = nn.ModuleList(
            nn.Linear(hidden_size, self.width, bias=False) for _ in range(num_matrices)
        )

    @property
    def width(self) -> int:
        """Width of the logits: the vocabulary or the reduced one."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def weight(self) -> Tensor:
        """One of the weights: says on which device and in which dtype the heads compute."""
        return next(self.blocks.parameters())

    def head(
        self, i: int, inputs: Tensor, *, project: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Logits `[n, width]` of head i.

        Args:
            i: from 0.
            inputs: `[n, hidden]`, or `[n, hidden * (i + 2)]` for dependent heads.
            project: the target's LM head, for output "target": `[n, hidden]` to `[n, vocab]`.
        """
        x: Tensor = self.blocks[i](inputs)
        logits: Tensor = self.outputs[i](x) if self.output == "own" else self._common(x, project)
        return logits

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor | None = None,
        *,
        num_heads: int | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits `[n, K, width]` of the heads along known paths; a common matrix is read once.

        Args:
            hidden: `[n, hidden]`.
            embeddings: `[n, K, hidden]` of the root and the path behind it, for dependent heads.
            num_heads: the first so many heads (K); None: all.
            project: see `head`.
        """
        rows, inputs = [], hidden
        for i in range(self.num_heads if num_heads is None else num_heads):
            if self.dependent:
                if embeddings is None:
                    raise ValueError("dependent heads read their path: pass embeddings")
                inputs = torch.cat([inputs, embeddings[:, i]], dim=-1)
            rows.append(self.blocks[i](inputs))
        if self.output == "own":
            logits = [output(x) for output, x in zip(self.outputs, rows, strict=False)]
            return torch.stack(logits, dim=1)
        flat = self._common(torch.cat(rows), project)
        return flat.view(len(rows), len(hidden), -1).transpose(0, 1)

    def _common(self, x: Tensor, project: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Logits `[n, width]` by the matrix that all heads use."""
        if self.output == "shared":
            logits: Tensor = self.outputs[0](x)
            return logits
        if project is None:
            raise ValueError("these heads use the target's LM head: pass project")
        return project(x)

    def tokens(self, columns: Tensor) -> Tensor:
        """The target's ids of columns of the logits, any shape."""
        return columns if self.token_map is None else self.token_map[columns]


def check_target(hidden_size: int, vocab_size: int, runtime: Runtime) -> None:
    """Raises IncompatibleModels when heads of these sizes belong to another target."""
    if hidden_size != runtime.hidden_size:
        what, ours, theirs = "hidden size", hidden_size, runtime.hidden_size
    elif vocab_size > runtime.vocab_size:  # a smaller one may be the same one without padding
        what, ours, theirs = "vocabulary size", vocab_size, runtime.vocab_size
    else:
        return
    raise IncompatibleModels(
        f"the heads are made for {what} {ours}, the target has {theirs}: load the target that "
        "they were trained on"
    )


def save(
    heads: MedusaHeads,
    path: str | PathLike[str],
    *,
    base_fingerprint: str,
    choices: Sequence[Sequence[int]] | None = None,
) -> None:
    """Writes a folder that `load` reads back bit by bit; an interruption leaves no broken file.

    Args:
        heads: any device and dtype.
        path: the folder, made when it is missing.
        base_fingerprint: `Target.fingerprint` of the model that they were trained on.
        choices: the tree to use with them, as ranks from the first head down.
    """
    config: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "num_heads": heads.num_heads,
        "num_layers": heads.num_layers,
        "dependent": heads.dependent,
        "output": heads.output,
        "base_fingerprint": base_fingerprint,
    }
    if choices is not None:
        config["choices"] = [list(choice) for choice in choices]
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in heads.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        save_file(state, Path(temporary, "model.safetensors"), metadata={"format": "pt"})
        text = json.dumps(config, indent=2) + "\n"
        Path(temporary, "config.json").write_text(text, encoding="utf-8")
        for name in ("model.safetensors", "config.json"):
            Path(temporary, name).replace(folder / name)


def load(path: str | PathLike[str], *, target: Target) -> MedusaHeads:
    """Reads heads in their saved dtype onto the target's device, strictly.

    Takes the folders of `save`, of FasterDecoding (medusa_lm_head.safetensors or .pt) and of vLLM
    up to 0.32 (model.safetensors or pytorch_model.bin). The name "smollm2" stands for the heads
    that come with the package.

    Raises:
        ModelNotFound: when there is no such folder.
        InvalidCheckpoint: when a file or tensor is missing, unexpected or damaged; it names them.
        IncompatibleModels: when the heads belong to another target.
    """
    folder = Path(path).expanduser()
    shipped = SHIPPED / f"{path}-medusa"
    if not folder.is_dir() and len(Path(path).parts) == 1 and shipped.is_dir():
        folder = shipped
    if not folder.is_dir():
        raise ModelNotFound(f"no folder {folder}: give the one with the heads and their config")
    try:
        stored = read_folder(folder, target.runtime)
        sizes = stored.shape["hidden_size"], stored.shape["vocab_size"]
        check_target(*sizes, target.runtime)
        with torch.device("meta"):
            heads = MedusaHeads(**stored.shape)
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"{folder}: {error}") from error
    if stored.base_fingerprint not in (None, target.fingerprint):
        raise IncompatibleModels(
            f"{folder} holds heads for a model with fingerprint {stored.base_fingerprint!r}, this "
            f"one has {target.fingerprint!r}: load the model that they were trained on, or train "
            "heads for this one"
        )
    heads.load_state_dict(_fitting(heads, stored), assign=True)
    heads.choices = stored.choices
    return heads.requires_grad_(False).to(target.runtime.device, heads.weight.dtype)


def _fitting(heads: MedusaHeads, stored: Stored) -> dict[str, Tensor]:
    """The stored tensors under the names of `heads`, if they are the right ones."""
    wanted = {stored.name_in_file(name): name for name in heads.state_dict()}
    shapes = {name: list(tensor.shape) for name, tensor in heads.state_dict().items()}
    problems = [f"{name} is missing" for name in wanted.keys() - stored.tensors.keys()]
    problems += [f"{name} is unexpected" for name in stored.tensors.keys() - wanted.keys()]
    for name in wanted.keys() & stored.tensors.keys():
        tensor, ours = stored.tensors[name], wanted[name]
        if list(tensor.shape) != shapes[ours]:
            problem = f"{name} has shape {list(tensor.shape)} instead of {shapes[ours]}"
            if ours.startswith("outputs.") and heads.token_map is None:
                problem += " (a reduced vocabulary needs a token_map)"
            problems.append(problem)
        elif not tensor.is_floating_point() and ours != "token_map":
            problems.append(f"{name} has dtype {tensor.dtype} instead of a floating-point one")
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise InvalidCheckpoint(
            f"{stored.file} does not hold the {heads.num_heads} heads of {heads.num_layers} layers "
            f"that its config.json describes: {'; '.join(sorted(problems)[:MAX_NAMED])}{more}"
        )
    return {ours: stored.tensors[name] for name, ours in wanted.items()}
