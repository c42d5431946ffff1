"""Writes small GGUF files: a random llama with a byte-level BPE vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, HEADS, LAYERS = 32, 4, 2
SPECIAL = ("<|unk|>", "<|start|>", "<|end|>", "<|file|>")
MERGES = ("2 2", "Ġ 2", "Ċ Ċ", "Ġ Ġ", "Ġ a", "a b")
TOKENS = (*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES))
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"


def write_gguf(
    file: Path,
    *,
    kind: str = "F32",
    pre: str = "smollm",
    add_bos: bool | None = None,
    bos: bool = True,
    without: str | None = None,
    seed: int = 0,
) -> Path:
    """A llama of two layers with tied embeddings, its matrices stored as `kind`."""
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_unk_token_id(0)
    if bos:
        writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{x}": (HIDDEN, HIDDEN) for x in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{x}": (2 * HIDDEN, HIDDEN) for x in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (HIDDEN, 2 * HIDDEN)}
        shapes |= {f"blk.{i}.{x}_norm": (HIDDEN,) for x in ("attn", "ffn")}
    shapes["output_norm"] = (HIDDEN,)
    for name, shape in shapes.items():
        if name == without:
            continue
        data = generator.standard_normal(shape, dtype=np.float32)
        form = GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        writer.add_tensor(f"{name}.weight", quants.quantize(data, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def reference_tokenizer(*, digits: bool) -> Tokenizer:
    """What the vocabulary means, built without transformers."""
    vocab = {text: i for i, text in enumerate(TOKENS)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.add_special_tokens(list(SPECIAL))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if digits else byte_level
    return backend
