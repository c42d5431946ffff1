"""The models of the test suite: tiny random ones of every family, and table models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outpace.llm import LLM
from outpace.proposers.base import Method
from outpace.proposers.plain import Plain
from outpace.runtimes.base import Output, Pass, Runtime
from outpace.runtimes.transformers import TransformersRuntime
from outpace.text import Tokenizer

VOCAB = 64
CONTEXT = 256

_SIZE = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None)
_DENSE = dict(
    **_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
)
_LLAMA = dict(_DENSE, model_type="llama", num_key_value_heads=2)
_ROPE = dict(rope_theta=100.0, original_max_position_embeddings=16)
_GEMMA = dict(
    _DENSE,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention"],
)
_MOE = dict(_DENSE, num_key_value_heads=2, num_experts_per_tok=2)

# name -> configuration; every family builds on the lowest and the newest supported transformers.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-mha": dict(_LLAMA, num_key_value_heads=4),
    "llama-mqa": dict(_LLAMA, num_key_value_heads=1),
    "llama-head-dim": dict(_LLAMA, head_dim=16),
    "llama-tied": dict(_LLAMA, tie_word_embeddings=True),
    "llama-rope-llama3": dict(
        _LLAMA,
        rope_parameters=dict(
            _ROPE, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "llama-rope-yarn": dict(_LLAMA, rope_parameters=dict(_ROPE, rope_type="yarn", factor=16.0)),
    "llama-rope-linear": dict(
        _LLAMA, rope_parameters=dict(rope_theta=100.0, rope_type="linear", factor=4.0)
    ),
    "gpt2": dict(_SIZE, model_type="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "opt": dict(
        _SIZE,
        model_type="opt",
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "mistral": dict(_DENSE, model_type="mistral", num_key_value_heads=2, sliding_window=16),
    "gemma2": dict(_GEMMA, model_type="gemma2"),
    "gemma3": dict(_GEMMA, model_type="gemma3_text"),
    "bloom": dict(_SIZE, model_type="bloom", hidden_size=32, n_layer=2, n_head=4),
    "falcon-alibi": dict(
        _SIZE,
        model_type="falcon",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        alibi=True,
        new_decoder_architecture=False,
    ),
    "mpt": dict(_SIZE, model_type="mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
    "mixtral": dict(_MOE, model_type="mixtral", num_local_experts=4, sliding_window=None),
    "qwen2-moe": dict(
        _MOE,
        model_type="qwen2_moe",
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "qwen3-moe": dict(
        _MOE, model_type="qwen3_moe", num_experts=4, moe_intermediate_size=24, head_dim=8
    ),
}
FAMILIES["falcon-rope"] = dict(FAMILIES["falcon-alibi"], alibi=False)

# Families whose state cannot roll back: to be refused when they are loaded.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": dict(
        _SIZE,
        model_type="mamba2",
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=1,
        chunk_size=8,
    ),
    "lfm2": dict(
        _DENSE,
        model_type="lfm2",
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
    ),
    "bamba": dict(
        _DENSE,
        model_type="bamba",
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    "zamba2": dict(
        _DENSE,
        model_type="zamba2",
        num_key_value_heads=4,
        attention_head_dim=16,
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=16,
        mamba_ngroups=1,
        n_mamba_heads=8,
        num_mem_blocks=1,
        chunk_size=8,
    ),
}


def build(
    name: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A random model of a family; the same arguments give the same weights.

    Args:
        name: a key of `FAMILIES` or `RECURRENT`.
        seed: keys the weights.
        dtype: of the weights.
        attn_implementation: "eager" or "sdpa"; None is the family's default.
        overrides: configuration fields that differ from the family's.
    """
    fields = dict((FAMILIES | RECURRENT)[name], **overrides)
    config = AutoConfig.for_model(**fields)
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, **kwargs)
    _spread(model, seed)
    model.generation_config.eos_token_id = None
    return model.eval().to(dtype)


@cache
def shared(name: str, seed: int = 0) -> PreTrainedModel:
    """`build` without further arguments, made once; nobody may change it."""
    return build(name, seed=seed)


def _spread(model: PreTrainedModel, seed: int) -> None:
    """Gives weights unit gain, so that logits vary by about 1 and depend on the whole text."""
    generator = torch.Generator().manual_seed(seed + 1)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv" in name or not (weight.ndim > 1 or name.endswith("weight")):
                continue
            if weight.ndim == 1:  # norms of both signs keep tied models from repeating a token
                gain = 1.0
            elif id(weight) in embeddings:
                gain = 0.2
            else:
                gain = 2.0 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain)


class TableRuntime(Runtime):
    """A causal LM whose next-token logits are the row of the last token; checks its callers.

    The hidden state is the token's one-hot vector, so the LM head is the table itself.

    Args:
        table: `[vocab, vocab]` logits; row t follows token t.
        max_context: most tokens of a sequence.
        max_nodes: most nodes of a tree.
    """

    def __init__(self, table: Tensor, *, max_context: int = CONTEXT, max_nodes: int = 256) -> None:
        self.table = table.to(torch.float32)
        self.vocab_size = self.hidden_size = table.shape[0]
        self.max_context = max_context
        self.max_nodes = max_nodes
        self.prefill_chunk = 8
        self.same_shape = False
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.num_forwards = 0
        self.passes: list[Pass] = []
        self._tokens: dict[int, list[int]] = {}
        self._running: dict[int, Pass] = {}

    def open(self) -> int:
        sequence = next(i for i in range(len(self._tokens) + 1) if i not in self._tokens)
        self._tokens[sequence] = []
        return sequence

    def close(self, sequence: int) -> None:
        del self._tokens[sequence]
        self._running.pop(sequence, None)

    @property
    def num_open(self) -> int:
        return len(self._tokens)

    def tokens(self, sequence: int) -> Sequence[int]:
        return self._tokens[sequence]

    def max_depth(self, sequence: int) -> int:
        return self.max_context - 1 - len(self._tokens[sequence])

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """`[vocab]`: the row after `tokens`."""
        return self.table[tokens[-1]].clone()

    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        assert len({work.sequence for work in batch}) == len(batch), "a sequence twice in a batch"
        self.num_forwards += 1
        outputs = []
        for work in batch:
            sequence, tree = work.sequence, work.tree
            assert sequence not in self._running, "the last forward was not followed by keep"
            assert all(0 <= token < self.vocab_size for token in tree.tokens), "unknown token"
            assert all(0 <= row < len(tree) for row in work.rows), "row outside the tree"
            assert len(tree) <= self.max_nodes or not work.rows, "too many nodes"
            end = len(self._tokens[sequence]) + max(tree.depths)
            assert end < self.max_context, f"position {end} is past the context"
            self._running[sequence] = work
            self.passes.append(work)
            before = self._tokens[sequence] + [tree.tokens[0]]
            rows = [self.logits(before + tree.path_tokens(row)) for row in work.rows]
            logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
            hidden = torch.eye(self.vocab_size)[tree.tokens]
            outputs.append(Output(logits=logits, hidden=hidden))
        return outputs

    def keep(self, sequence: int, path: Sequence[int]) -> None:
        tree = self._running.pop(sequence).tree
        if len(path) == 0:
            return
        assert list(path) == tree.path(path[-1]), "not a path from the root"
        assert path[-1] < tree.num_candidates, "a scratch node was kept"
        self._tokens[sequence] += [tree.tokens[node] for node in path]

    def rewind(self, sequence: int, tokens: Sequence[int]) -> int:
        self._running.pop(sequence, None)
        kept = self._tokens[sequence]
        common = 0
        while common < min(len(kept), len(tokens)) and kept[common] == tokens[common]:
            common += 1
        del kept[common:]
        return common

    def project(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.eye(self.vocab_size)[tokens]

    def memory(self) -> dict[str, int]:
        return {"weights": self.table.nbytes, "cache": sum(map(len, self._tokens.values()))}


def random_table(vocab_size: int, *, seed: int, scale: float = 1.0) -> Tensor:
    """`[vocab, vocab]` normal logits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, generator=generator) * scale


def probs_table(rows: Sequence[Sequence[float]]) -> Tensor:
    """`[vocab, vocab]` logits of the given probabilities; one row alone is used for all tokens."""
    probs = torch.tensor(rows, dtype=torch.float32)
    return probs.expand(probs.shape[1], -1).log().clone()


class PlannedRuntime(TableRuntime):
    """Says the planned tokens after a prompt, whatever it is fed, and falls silent at the end.

    Args:
        plan: the output's tokens; behind it the last one repeats.
        num_prompt: length of the prompt.
        vocab_size: width of the logits.
        runner_up: the token in second place, 1 below the planned one.
    """

    def __init__(
        self,
        plan: Sequence[int],
        *,
        num_prompt: int,
        vocab_size: int,
        runner_up: int = 0,
        max_context: int = CONTEXT,
    ) -> None:
        super().__init__(torch.zeros(vocab_size, vocab_size), max_context=max_context)
        self.plan = list(plan)
        self.num_prompt = num_prompt
        self.runner_up = runner_up

    def logits(self, tokens: Sequence[int]) -> Tensor:
        row = torch.full((self.vocab_size,), -20.0)
        row[self.runner_up] = 9.0
        row[self.plan[min(len(tokens) - self.num_prompt, len(self.plan) - 1)]] = 10.0
        return row


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token a byte: id i is byte i; with fewer than 256 tokens, from "0" on."""
    alphabet = bytes_to_unicode()
    first = 0 if vocab_size == 256 else ord("0")
    vocab = {alphabet[first + i]: i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def serve(
    target: PreTrainedModel | Runtime,
    method: Method | str = "plain",
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    eos_ids: Sequence[int] = (),
    **options: Any,
) -> LLM:
    """An `LLM` around a random model, whose end tokens are only those given, or a runtime."""
    if isinstance(target, Runtime):
        runtime = target
    else:
        runtime = TransformersRuntime(target, exactness="ordinary")
    text = None if tokenizer is None else Tokenizer(tokenizer)
    llm = LLM.from_runtime(runtime, method=Plain(), tokenizer=text, eos_ids=eos_ids, max_nodes=64)
    return llm.with_method(method, **options)
