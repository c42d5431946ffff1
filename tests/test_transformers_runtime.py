"""Trees on transformers' models are recomputation from scratch, whatever their shape and order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit_runtime import (
    CLOSE,
    PATHS,
    cache_text,
    distance,
    head_rows,
    leaves,
    llama4,
    load,
    poison,
    recomputed,
    run,
    run_one,
    seen_inputs,
    text_of,
    token_by_token,
    trees,
)
from tiny import FAMILIES, RECURRENT, VOCAB, build, shared
from transformers import PreTrainedModel

from outpace.errors import InvalidRequest, UnsupportedModel
from outpace.runtimes.base import Pass
from outpace.runtimes.pretrained import load_pretrained
from outpace.runtimes.transformers import TransformersRuntime
from outpace.tree import Tree

LLAMA4: PreTrainedModel = llama4()
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: lambda name=name: shared(name) for name in FAMILIES},
    "llama4": lambda: LLAMA4,
}
models = pytest.mark.parametrize("name", MODELS)
RUNTIMES: dict[str, TransformersRuntime] = {}

#  r - a - b - d
#        - c
#    - e
TREE = Tree(tokens=[9, 1, 2, 3, 4, 5], parents=[-1, 0, 1, 1, 2, 0])


def runtime_of(name: str) -> TransformersRuntime:
    """One runtime a model, empty."""
    if name not in RUNTIMES:
        RUNTIMES[name] = load(MODELS[name]())
    for sequence in list(RUNTIMES[name]._sequences):
        RUNTIMES[name].close(sequence)
    return RUNTIMES[name]


# A tree is its paths


@models
@settings(max_examples=12)
@given(data=st.data())
def test_trees_equal_recomputation(name: str, data: st.DataObject) -> None:
    """Below and above the windows of 16 keys; then a branch is kept and another tree runs."""
    runtime, model = runtime_of(name), MODELS[name]()
    assert runtime.mode == ("paths" if name in PATHS else "tree")
    text = text_of(data.draw(st.sampled_from([1, 7, 15, 30, 45]), label="text"))
    sequence = cache_text(runtime, text)
    for _ in range(2):
        tree = data.draw(trees(max_nodes=7, max_scratch=2), label="tree")
        got = run_one(runtime, sequence, tree)
        assert distance(got, recomputed(model, text, tree)) < CLOSE
        path = tree.path(data.draw(st.integers(0, tree.num_candidates - 1), label="kept"))
        runtime.keep(sequence, path)
        text = text + [tree.tokens[node] for node in path]
        assert list(runtime.tokens(sequence)) == text


@models
def test_control_a_kept_sibling_is_seen(name: str) -> None:
    runtime, model, text = runtime_of(name), MODELS[name](), text_of(20)
    sequence = cache_text(runtime, text)
    run_one(runtime, sequence, TREE)
    runtime.keep(sequence, [0, 1, 2])
    claimed = [*text, 9, 1, 3]  # node 3's text
    got = run_one(runtime, sequence, Tree.chain([6]))
    assert distance(got, recomputed(model, claimed, Tree.chain([6]))) > 10 * CLOSE


@models
def test_hidden_states_are_what_the_head_reads(name: str) -> None:
    runtime, text = runtime_of(name), text_of(20)
    sequence = cache_text(runtime, text)
    output = run(runtime, {sequence: TREE})[sequence]
    assert output.hidden.shape == (len(TREE), runtime.hidden_size)
    logits = runtime.project(output.hidden)
    # Some models scale or cap logits behind the head: order and equality of rows remain.
    assert torch.equal(logits.argmax(dim=-1), output.logits.argmax(dim=-1))
    model = MODELS[name]()
    ids = torch.tensor([[*text, 9, 1, 3]])
    with seen_inputs(model.get_output_embeddings()) as seen, torch.inference_mode():
        model(ids, use_cache=False)
    assert distance(output.hidden[3], seen[0][0, -1]) < CLOSE
    embedded = runtime.embed(torch.tensor([3, 4]))
    assert torch.equal(embedded, model.get_input_embeddings()(torch.tensor([3, 4])))


@models
def test_rows_come_in_the_order_asked_for(name: str) -> None:
    runtime = runtime_of(name)
    sequence = cache_text(runtime, text_of(5))
    every = run_one(runtime, sequence, TREE)
    some = runtime.forward([Pass(sequence=sequence, tree=TREE, rows=[4, 0, 2])])[0].logits
    assert distance(some, every[[4, 0, 2]]) < CLOSE


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "gpt2", "opt", "mistral", "gemma3"])
def test_eager_attention_equals_sdpa(name: str) -> None:
    text, got = text_of(30), []
    for attention in ("eager", "sdpa"):
        model = build(name, attn_implementation=attention)
        runtime = load(model)
        assert runtime.attention == attention
        got.append(run_one(runtime, cache_text(runtime, text), TREE))
        assert distance(got[-1], recomputed(model, text, TREE)) < CLOSE
    assert distance(*got) < CLOSE


def test_capped_attention_logits_run_with_eager() -> None:
    model, text = build("gemma2", attn_implementation="eager"), text_of(30)
    runtime = load(model)
    got = run_one(runtime, cache_text(runtime, text), TREE)
    assert distance(got, recomputed(model, text, TREE)) < CLOSE


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_half_precision_rounds_and_no_more(name: str) -> None:
    text = text_of(30)
    want = recomputed(shared(name), text, TREE)
    for dtype in (torch.bfloat16, torch.float16):
        runtime = load(build(name, dtype=dtype))
        got = run_one(runtime, cache_text(runtime, text), TREE)
        assert got.dtype == dtype
        assert distance(got, want) < 0.1


# Several sequences


@models
def test_ragged_batches_equal_solo_runs(name: str) -> None:
    runtime, model = runtime_of(name), MODELS[name]()
    texts = [text_of(n, first=n) for n in (1, 33, 18)]
    batch = [Tree.chain([3]), TREE, Tree(tokens=[1, 2, 3], parents=[-1, 0, 0], num_candidates=2)]
    sequences = [cache_text(runtime, text) for text in texts]
    outputs = run(runtime, dict(zip(sequences, batch, strict=True)))
    for sequence, text, tree in zip(sequences, texts, batch, strict=True):
        output = outputs[sequence]
        assert distance(output.logits, recomputed(model, text, tree)) < CLOSE
        assert output.hidden.shape[0] == len(tree)
        said = runtime.project(output.hidden).argmax(dim=-1)
        assert torch.equal(said, output.logits.argmax(dim=-1)), "another sequence's states"
    for sequence, path in zip(sequences, ([0], [0, 1, 3], [0, 1]), strict=True):
        runtime.keep(sequence, path)
    texts[0] += [3]
    texts[1] += [9, 1, 3]
    texts[2] += [1, 2]
    order = [sequences[i] for i in (2, 0, 1)]  # another order, and deeper than before
    outputs = run(runtime, dict.fromkeys(order, Tree.chain([7, 8])))
    for sequence, text in zip(sequences, texts, strict=True):
        want = recomputed(model, text, Tree.chain([7, 8]))
        assert distance(outputs[sequence].logits, want) < CLOSE


@models
def test_a_prompt_and_a_tree_in_one_forward(name: str) -> None:
    runtime, model = runtime_of(name), MODELS[name]()
    text = text_of(20)
    first, second = cache_text(runtime, text), runtime.open()
    outputs = runtime.forward(
        [
            Pass(sequence=second, tree=Tree.chain(text_of(30, first=1)), rows=[]),
            Pass(sequence=first, tree=TREE, rows=range(len(TREE))),
        ]
    )
    assert outputs[0].logits.shape == (0, VOCAB)
    assert distance(outputs[1].logits, recomputed(model, text, TREE)) < CLOSE
    runtime.keep(second, range(30))
    got = run_one(runtime, second, TREE)
    assert distance(got, recomputed(model, text_of(30, first=1), TREE)) < CLOSE


@models
def test_slots_are_used_again(name: str) -> None:
    runtime, model = runtime_of(name), MODELS[name]()
    a, b, c = (cache_text(runtime, text_of(n, first=n)) for n in (30, 12, 20))
    bytes_before = runtime.memory()["cache"]
    runtime.close(b)
    again = cache_text(runtime, text_of(17, first=2))
    assert again == b, "the freed slot"
    assert runtime.memory()["cache"] == bytes_before
    for sequence, text in ((a, text_of(30, first=30)), (again, text_of(17, first=2))):
        got = run_one(runtime, sequence, TREE)
        assert distance(got, recomputed(model, text, TREE)) < CLOSE
    runtime.close(a)
    runtime.close(again)
    runtime.close(c)
    assert runtime.open() == 0


@models
def test_rejected_keys_may_hold_anything(name: str) -> None:
    runtime, model = runtime_of(name), MODELS[name]()
    texts = {}
    for length, path in ((33, [0, 1, 3]), (5, [0])):
        sequence = cache_text(runtime, text_of(length))
        run_one(runtime, sequence, TREE)
        runtime.keep(sequence, path)
        texts[sequence] = text_of(length) + [TREE.tokens[node] for node in path]
    poison(runtime)
    outputs = run(runtime, dict.fromkeys(texts, TREE))
    for sequence, text in texts.items():
        assert distance(outputs[sequence].logits, recomputed(model, text, TREE)) < CLOSE


def test_control_poison_in_a_committed_key_is_seen() -> None:
    runtime, text = runtime_of("llama"), text_of(20)
    sequence = cache_text(runtime, text)
    del runtime._sequences[sequence].tokens[-1]
    poison(runtime)
    runtime._sequences[sequence].tokens.append(text[-1])
    got = run_one(runtime, sequence, TREE)
    assert distance(got, recomputed(shared("llama"), text, TREE)) > 100 * CLOSE


# The cache over time


@models
def test_the_cache_grows_in_the_middle_of_a_text(name: str) -> None:
    runtime, model = runtime_of(name), MODELS[name]()
    text = text_of(50)
    length = 60 if runtime.max_context == 64 else 150
    sequence = cache_text(runtime, text)
    while len(text) + 4 < length:
        tree = Tree(tokens=[len(text) % VOCAB, 1, 2, 3, 4], parents=[-1, 0, 0, 2, 3])
        run_one(runtime, sequence, tree)
        runtime.keep(sequence, [0, 2, 3])
        text += [tree.tokens[0], 2, 3]
    tree = Tree.chain([7, 8, 9])
    got = run_one(runtime, sequence, tree)
    assert distance(got, recomputed(model, text, tree)) < CLOSE


@models
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prompts_in_pieces_of_any_size(name: str, chunk: int) -> None:
    runtime, model, text = runtime_of(name), MODELS[name](), text_of(40)
    default = runtime.prefill_chunk
    runtime.prefill_chunk = chunk
    try:
        got = run_one(runtime, cache_text(runtime, text), TREE)
    finally:
        runtime.prefill_chunk = default
    whole = run_one(runtime, cache_text(runtime, text), TREE)
    assert distance(got, whole) < 1e-5
    assert distance(got, recomputed(model, text, TREE)) < CLOSE


def test_pieces_end_at_fixed_positions() -> None:
    runtime = load(shared("llama"), prefill_chunk=16)
    text = text_of(50)
    sequence, sizes = runtime.open(), []
    while len(runtime.tokens(sequence)) < 50:
        chunk = runtime.next_chunk(sequence, text)
        run_one(runtime, sequence, chunk)
        runtime.keep(sequence, range(len(chunk)))
        sizes.append(len(chunk))
        if sizes == [16]:
            assert runtime.rewind(sequence, text[:5]) == 5
    assert sizes == [16, 11, 16, 16, 2]


@models
@pytest.mark.parametrize("left", [0, 1, 9, 20])
def test_rewind_and_go_on(name: str, left: int) -> None:
    runtime, model, text = runtime_of(name), MODELS[name](), text_of(20)
    sequence = cache_text(runtime, text)
    run_one(runtime, sequence, TREE)
    runtime.keep(sequence, [0, 1, 3])
    other = [*text[:left], *([62, 61, 60][: 3 if left < 20 else 0])]
    assert runtime.rewind(sequence, other) == left
    assert list(runtime.tokens(sequence)) == text[:left]
    cache_text(runtime, other, sequence)
    got = run_one(runtime, sequence, TREE)
    assert distance(got, recomputed(model, other, TREE)) < CLOSE


def test_rewind_beyond_what_is_cached() -> None:
    runtime, text = runtime_of("llama"), text_of(10)
    sequence = cache_text(runtime, text)
    assert runtime.rewind(sequence, [*text, 1, 2, 3]) == 10
    assert runtime.rewind(sequence, []) == 0
    assert list(runtime.tokens(sequence)) == []
    got = run_one(runtime, sequence, TREE)
    assert distance(got, recomputed(shared("llama"), [], TREE)) < CLOSE


# What a forward costs


@models
def test_only_the_rows_asked_for_reach_the_head(name: str) -> None:
    runtime = runtime_of(name)
    with head_rows(runtime.model) as rows:
        sequence = cache_text(runtime, text_of(40))
        assert rows == [0], "a prompt needs no logits"
        runtime.forward([Pass(sequence=sequence, tree=TREE, rows=TREE.rows)])
        runtime.keep(sequence, [0])
        tree = Tree(tokens=[1, 2, 3, 4, 5], parents=[-1, 0, 0, 2, 3], num_candidates=2)
        runtime.forward([Pass(sequence=sequence, tree=tree, rows=tree.rows)])
        runtime.keep(sequence, [0])
        tree = Tree(tokens=tree.tokens, parents=tree.parents, num_candidates=2, num_scratch_rows=1)
        runtime.forward([Pass(sequence=sequence, tree=tree, rows=tree.rows)])
        runtime.keep(sequence, [0])
    assert rows == [0, len(TREE), 2, 3]


def test_control_the_spy_counts_every_row() -> None:
    model = shared("llama")
    with head_rows(model) as rows, torch.inference_mode():
        model(torch.tensor([text_of(40)]), use_cache=False)
    assert rows == [40]


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    runtime = load(model)
    cache_text(runtime, text_of(20))
    assert not model.lm_head._forward_pre_hooks
    assert not model._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model)


def test_memory_counts_tied_weights_once() -> None:
    for name in ("llama", "llama-tied"):
        runtime = load(shared(name))
        size = sum(p.numel() * 4 for p in {id(p): p for p in shared(name).parameters()}.values())
        buffers = sum(b.numel() * b.element_size() for b in shared(name).buffers())
        assert runtime.memory()["weights"] == size + buffers
    tied, untied = load(shared("llama-tied")).memory(), load(shared("llama")).memory()
    assert untied["weights"] - tied["weights"] == VOCAB * 32 * 4


# Limits


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("exactness", ["ordinary", "same-shape"])
def test_positions_stay_inside_the_table(name: str, exactness: str) -> None:
    """Also those of rows that nobody reads."""
    model, text = build(name), text_of(62)
    runtime = load(model, exactness=exactness)
    with seen_inputs(model, "position_ids") as seen:
        sequence = cache_text(runtime, text)
        assert runtime.max_depth(sequence) == 1
        tree = runtime.fit(sequence, Tree(tokens=[1, 2, 3], parents=[-1, 0, 0]))
        got = run_one(runtime, sequence, tree)
        runtime.keep(sequence, [0, 1])
        with pytest.raises(ValueError, match="context of 64"):
            run_one(runtime, sequence, Tree.chain([1]))
    assert max(int(x.max()) for x in seen) == 63
    assert distance(got, recomputed(model, text, tree)) < CLOSE


def test_paths_of_unequal_length_stay_inside_the_context() -> None:
    model = build("falcon-alibi", max_position_embeddings=32)
    runtime = load(model)
    assert runtime.mode == "paths"
    sequence = cache_text(runtime, text_of(30))
    tree = Tree(tokens=[1, 2, 3], parents=[-1, 0, 0])
    got = run_one(runtime, sequence, tree)
    assert distance(got, recomputed(model, text_of(30), tree)) < CLOSE


def test_wrong_calls_are_refused() -> None:
    runtime = runtime_of("llama")
    sequence = cache_text(runtime, text_of(250))
    with pytest.raises(ValueError, match="position 256 is past the context of 256"):
        run_one(runtime, sequence, Tree.chain(range(7)))
    with pytest.raises(ValueError, match="keep without a forward"):
        runtime.keep(sequence, [0])
    bush = Tree(tokens=[1] * 300, parents=[-1, *[0] * 299])
    with pytest.raises(ValueError, match="300 nodes, at most 256"):
        run_one(runtime, runtime.open(), bush)
    with pytest.raises(InvalidRequest, match="exactness must be one of"):
        load(shared("llama"), exactness="nearly")
    with pytest.raises(InvalidRequest, match="prefill_chunk must be at least 1"):
        load(shared("llama"), prefill_chunk=0)


# Refused at load


@pytest.mark.parametrize("family", RECURRENT)
def test_models_that_cannot_roll_back_are_refused_by_name(family: str) -> None:
    model = build(family)
    with pytest.raises(UnsupportedModel, match=type(model).__name__):
        load(model)


@pytest.mark.parametrize(
    "backend", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"]
)
def test_backends_that_drop_a_mask_are_refused(backend: str) -> None:
    model = build("llama")
    model.config._attn_implementation_internal = backend  # as if it had been loaded so
    assert model.config._attn_implementation == backend
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*load it with attn_implement"):
        load(model)


@pytest.mark.parametrize("kind", ["linear_attention", "some_future_attention"])
def test_unknown_kinds_of_layers_are_refused(kind: str) -> None:
    model = build("gemma3")
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(UnsupportedModel, match=f"Gemma3ForCausalLM has layers of type {kind}"):
        load(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="LlamaModel has no LM head"):
        load(build("llama").model)


def test_training_mode_is_left_with_a_notice() -> None:
    model, notices = build("llama").train(), []
    runtime = load(model, notice=notices.append)
    assert not runtime.model.training
    assert len(notices) == 1
    assert "training mode" in notices[0]


# Same shapes: bits


def check_bits(runtime: TransformersRuntime, *, trials: int, seed: int, length: int) -> int:
    """A node's logits have the same bits in a tree, in a chain, and alone; nodes compared."""
    rng, compared = random.Random(seed), 0
    for _ in range(trials):
        text = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, length))]
        sequence = cache_text(runtime, text)
        parents = [-1, *(max(0, i - 1 - int(rng.expovariate(0.5))) for i in range(1, 24))]
        tree = Tree(tokens=[rng.randrange(VOCAB) for _ in parents], parents=parents)
        tree = within(runtime, sequence, tree)
        together = run_one(runtime, sequence, tree)
        for leaf in leaves(tree)[:3]:
            path = tree.path(leaf)
            tokens = [tree.tokens[node] for node in path]
            chain = run_one(runtime, sequence, Tree.chain(tokens))
            assert torch.equal(chain, together[path]), "a branch differs from a chain"
            alone = cache_text(runtime, text)
            rows = token_by_token(runtime, alone, tokens)
            assert torch.equal(rows, chain), "a chain differs from plain decoding"
            runtime.close(alone)
            compared += len(path)
        runtime.close(sequence)
    return compared


def within(runtime: TransformersRuntime, sequence: int, tree: Tree) -> Tree:
    """The engine's part: no deeper and no more than the runtime takes."""
    depth = runtime.max_depth(sequence)
    kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
    index = {node: i for i, node in enumerate(kept)}
    kept = [n for n in kept if index[n] < runtime.max_nodes]
    tree = Tree(
        tokens=[tree.tokens[n] for n in kept],
        parents=[-1, *(index[tree.parents[n]] for n in kept[1:])],
    )
    return runtime.fit(sequence, tree)


WIDE = dict(max_position_embeddings=1024)
REAL = dict(
    hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, **WIDE
)
SIZED = dict(hidden_size=256, intermediate_size=384, **WIDE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_same_shapes_give_the_same_bits(dtype: torch.dtype, attention: str) -> None:
    model = build("llama", dtype=dtype, attn_implementation=attention, **WIDE)
    runtime = load(model, exactness="same-shape")
    compared = check_bits(runtime, trials=8, seed=1, length=600)
    assert compared > (60 if runtime.row_class.branches else 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt2", "opt", "falcon-rope", "llama-mqa"])
def test_same_shapes_in_other_families(name: str, dtype: torch.dtype) -> None:
    wide = {} if name in ("gpt2", "opt") else WIDE
    runtime = load(build(name, dtype=dtype, **wide), exactness="same-shape")
    length = min(300, runtime.max_context - 12)
    assert check_bits(runtime, trials=4, seed=2, length=length) > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [VOCAB, 4096])
def test_same_shapes_at_the_embedded_models_width(dtype: torch.dtype, vocab_size: int) -> None:
    runtime = load(
        build("llama", dtype=dtype, vocab_size=vocab_size, **REAL), exactness="same-shape"
    )
    assert check_bits(runtime, trials=6, seed=1, length=500) > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_moved_branches_have_the_bits_of_a_chain(dtype: torch.dtype) -> None:
    """Rounding to half precision hides most differences: it takes many nodes to see one."""
    runtime = load(build("llama", dtype=dtype, **REAL), exactness="same-shape")
    rng, moved = random.Random(4), 0
    for start in (40, 70, 100, 201, 260, 330, 390, 650, 707):
        sequence = cache_text(runtime, [rng.randrange(VOCAB) for _ in range(start)])
        branches = [[rng.randrange(VOCAB) for _ in range(8)] for _ in range(4)]
        tree = within(runtime, sequence, Tree.from_paths(1, branches, max_nodes=64))
        together = run_one(runtime, sequence, tree)
        for leaf in leaves(tree):
            path = tree.path(leaf)
            chain = run_one(runtime, sequence, Tree.chain([tree.tokens[node] for node in path]))
            assert torch.equal(chain, together[path]), f"branch {path} behind {start} tokens"
            moved += len(path) - 1
        runtime.close(sequence)
    assert moved > (120 if runtime.row_class.branches else 40)


@pytest.mark.parametrize("how", [SIZED, WIDE], ids=["wide", "narrow"])
def test_control_ordinary_forwards_do_not_have_the_same_bits(how: dict[str, Any]) -> None:
    runtime = load(build("llama", **how))
    with pytest.raises(AssertionError, match="differs"):
        check_bits(runtime, trials=8, seed=1, length=300)


def test_control_dense_branches_do_not_have_the_bits_of_a_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = load(build("llama", **WIDE), exactness="same-shape")
    monkeypatch.setattr(
        "outpace.runtimes.transformers.place_aligned", lambda tree, *_: list(range(len(tree)))
    )
    with pytest.raises(AssertionError, match="a branch differs"):
        check_bits(runtime, trials=8, seed=1, length=300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    runtime = load(build("llama", dtype=dtype, **WIDE), exactness="same-shape")
    texts = [text_of(n, first=n) for n in (3, 120, 250, 124, 400)]
    trees = [Tree.chain(text_of(n, first=n)) for n in (1, 5, 2, 7, 3)]
    sequences = [cache_text(runtime, text) for text in texts]
    together = run(runtime, dict(zip(sequences, trees, strict=True)))
    for sequence, text, tree in zip(sequences, texts, trees, strict=True):
        alone = run_one(runtime, cache_text(runtime, text), tree)
        assert torch.equal(together[sequence].logits, alone)


def test_a_same_shape_forward_has_one_length_of_keys_and_no_more_rows_than_were_checked() -> None:
    model = build("llama", max_position_embeddings=1024)
    runtime = load(model, exactness="same-shape")
    lengths = [5, 300, *range(10, 29), 301, 302]
    trees = {cache_text(runtime, text_of(n, first=n)): Tree.chain([1, 2, 3]) for n in lengths}
    with seen_inputs(model, "input_ids") as ids, seen_inputs(model, "attention_mask") as masks:
        run(runtime, trees)
    assert [len(x) for x in ids] == [len(x) for x in masks]
    assert sum(len(x) for x in ids) == len(lengths)
    assert max(x.numel() for x in ids) <= runtime.row_class.most < 4 * len(lengths)
    counts = {256: 0, 512: 0}
    for mask in masks:
        counts[mask.shape[-1]] += len(mask)
    assert counts == {256: 20, 512: 3}


def test_trees_do_not_cross_into_a_larger_bucket() -> None:
    runtime = load(build("llama", **WIDE), exactness="same-shape")
    reach = runtime._reach
    for border in (256, 512):
        start = border - reach - 3
        sequence = cache_text(runtime, text_of(start))
        assert runtime.max_depth(sequence) == 3
        tokens = text_of(7, first=2)
        chain = run_one(runtime, sequence, Tree.chain(tokens[:4]))
        runtime.keep(sequence, range(4))
        assert runtime.max_depth(sequence) > 3, "the root alone may enter the next one"
        rest = run_one(runtime, sequence, Tree.chain(tokens[4:]))
        alone = token_by_token(runtime, cache_text(runtime, text_of(start)), tokens)
        assert torch.equal(torch.cat([chain, rest]), alone)


def test_control_a_tree_across_the_border_has_other_bits() -> None:
    runtime = load(build("llama", **SIZED), exactness="same-shape")
    start = 256 - runtime._reach - 3
    tokens = text_of(12)
    chain = run_one(runtime, cache_text(runtime, text_of(start)), Tree.chain(tokens))
    alone = token_by_token(runtime, cache_text(runtime, text_of(start)), tokens)
    assert not torch.equal(chain, alone)


def test_fit_leaves_out_what_cannot_stand_aligned_and_no_more() -> None:
    runtime = load(build("llama", **WIDE), exactness="same-shape")
    #  r - a - b
    #    - c - d
    tree = Tree(tokens=[9, 1, 2, 3, 4], parents=[-1, 0, 1, 0, 3])
    middle = cache_text(runtime, text_of(64))
    assert runtime.row_class.branches
    assert runtime.fit(middle, tree) is tree
    end = cache_text(runtime, text_of(63 + 64 - 16))
    assert runtime.fit(end, tree).tokens == [9, 1, 2]
    ordinary = load(build("llama", **WIDE))
    assert ordinary.fit(cache_text(ordinary, text_of(63 + 64 - 16)), tree) is tree


def test_a_long_chain_may_want_rows_too() -> None:
    """What a draft has not seen yet may be longer than any tree."""
    runtime = load(build("llama", **WIDE), exactness="same-shape")
    text = text_of(300)
    for sequence in (runtime.open(), cache_text(runtime, text_of(100))):
        rest = text[len(runtime.tokens(sequence)) :]
        work = Pass(sequence=sequence, tree=Tree.chain(rest), rows=[len(rest) - 1])
        got = runtime.forward([work])[0].logits
        want = recomputed(runtime.model, text[:-1], Tree.chain(text[-1:]))
        assert distance(got, want) < CLOSE


def test_rewind_keeps_whole_pieces_only_so_that_bits_are_a_cold_starts() -> None:
    runtime = load(build("llama", **SIZED), exactness="same-shape", prefill_chunk=32)
    text = text_of(80)
    sequence = cache_text(runtime, text)
    token_by_token(runtime, sequence, [1, 2, 3])
    other = [*text[:75], *text_of(10, first=3)]
    assert runtime.rewind(sequence, other) == 64
    warm = run_one(runtime, cache_text(runtime, other, sequence), TREE)
    cold = run_one(runtime, cache_text(runtime, other), TREE)
    assert torch.equal(warm, cold)
    # Decoded tokens have other bits than a prompt's: they are not taken for one.
    short = cache_text(runtime, text[:20])
    token_by_token(runtime, short, text[20:40])
    assert runtime.rewind(short, text) == 0


def test_auto_takes_same_shapes_in_half_precision_where_they_are_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notices: list[str] = []
    for cost, same_shape in ((1.1, True), (1.2, False)):
        monkeypatch.setattr(
            "outpace.runtimes.verdict.measure_cost", lambda *_, cost=cost, **__: cost
        )
        runtime = TransformersRuntime(
            build("llama", dtype=torch.bfloat16, **WIDE), notice=notices.append
        )
        assert runtime.same_shape is same_shape
        assert runtime.same_shape_cost == cost
    assert len(notices) == 1
    assert "would cost 20%" in notices[0]
    asked = TransformersRuntime(build("llama", **WIDE), exactness="same-shape")
    assert asked.same_shape, "a user who asks for it gets it at any cost"


def test_paths_have_no_same_shape() -> None:
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM runs trees as paths"):
        load(shared("bloom"), exactness="same-shape")
    runtime = TransformersRuntime(build("bloom", dtype=torch.bfloat16))
    assert not runtime.same_shape
    assert runtime.mode == "paths"


# Loading


def test_load_pretrained_takes_the_checkpoints_dtype(tmp_path: Any) -> None:
    build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    assert load_pretrained(tmp_path, dtype=None, device=cpu).dtype == torch.bfloat16
    model = load_pretrained(tmp_path, dtype=torch.float32, device=cpu, attn_implementation="eager")
    assert model.dtype == torch.float32
    assert load(model).attention == "eager"
    assert load(model).info()["class"] == "LlamaForCausalLM"


def test_info_says_what_runs() -> None:
    info = load(shared("gemma3")).info()
    assert info["layers"] == {"sliding_attention": 1, "full_attention": 1}
    assert info["trees"] == "tree"
    assert info["attention"] == "sdpa"
    assert info["parameters"] == sum(p.numel() for p in shared("gemma3").parameters())
    assert load(shared("bloom")).info()["trees"] == "paths"
