"""`outpace train`: text, states, heads, tree and folder, on a language that counts."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny import TableRuntime, byte_tokenizer, serve

from outpace.cli import cli
from outpace.errors import InvalidRequest
from outpace.heads import MedusaHeads
from outpace.heads import load as load_heads
from outpace.llm import LLM
from outpace.proposers.base import Target
from outpace.training import data, medusa, turns
from outpace.training.examples import Base, Positions, split
from outpace.training.hidden import Text, answer_states, cached_texts
from outpace.training.pipeline import train_medusa
from outpace.training.tree_search import best_nodes
from outpace.training.validate import MAX_RANK, Ranks, ranks, tokens_per_step

CYCLE = 12
train_command = importlib.import_module("outpace.cli.train")  # the package names the command


def counting() -> TableRuntime:
    """The target that says x + 1 mod 12."""
    table = torch.full((CYCLE, CYCLE), -8.0)
    for x in range(CYCLE):
        table[x, (x + 1) % CYCLE] = 8.0
    return TableRuntime(table)


def counting_texts(count: int = 40, length: int = 12) -> list[Text]:
    runtime = counting()
    texts = []
    for i in range(count):
        answer = [(i + 1 + j) % CYCLE for j in range(length)]
        example = data.Example(prompt=[i % CYCLE], answer=answer)
        texts.append(Text(hidden=answer_states(runtime, example), answer=torch.tensor(answer)))
    return texts


def counting_positions(*, num_heads: int = 3) -> tuple[Positions, Positions]:
    base = Base.of(counting())
    learning, held = split(counting_texts())
    return (
        Positions(learning, num_heads=num_heads, base=base),
        Positions(held, num_heads=num_heads, base=base),
    )


def settings(**changes: Any) -> medusa.Settings:
    values: dict[str, Any] = dict(
        num_heads=3, vocab_size=CYCLE, epochs=30, batch_size=32, learning_rate=0.02, patience=60
    )
    return medusa.Settings(**(values | changes))


def checksum(runtime: TableRuntime) -> str:
    return hashlib.sha256(runtime.table.numpy().tobytes()).hexdigest()


# Heads


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("vocab_size", [None, CYCLE])
def test_head_i_learns_to_count_by_i(
    tmp_path: Path, dependent: bool, vocab_size: int | None
) -> None:
    # Frozen, the target's head must be overcome by the blocks alone: that takes longer.
    pace = dict(epochs=30) if vocab_size else dict(epochs=100, learning_rate=0.05, patience=200)
    positions, held_out = counting_positions()
    before = positions.base.output.clone(), positions.base.embeddings.clone()
    heads, progress = medusa.train(
        positions,
        held_out,
        settings=settings(dependent=dependent, vocab_size=vocab_size, **pace),
        folder=tmp_path,
    )
    found = ranks(heads, held_out)
    assert all(found.top(i, 1) >= 0.99 for i in range(3)), [found.top(i, 1) for i in range(3)]
    assert progress.losses[-1][1] < progress.losses[0][1]
    assert torch.equal(before[0], positions.base.output), "training changed the base's LM head"
    assert torch.equal(before[1], positions.base.embeddings), "training changed the embeddings"
    wrong = [found_in_order(heads, positions, order) for order in ([1, 2, 0], [2, 0, 1])]
    assert max(wrong) < 0.2, "heads in another order must not look right"


def found_in_order(heads: MedusaHeads, positions: Positions, order: list[int]) -> float:
    """Top-1 share of all heads when head order[i] speaks for head i."""
    batch = positions.batch(torch.arange(len(positions)))
    logits = heads(batch.hidden, batch.embeddings, project=positions.project)
    said = heads.tokens(logits.argmax(-1))[:, order]
    known = batch.labels >= 0
    return float((said == batch.labels)[known].float().mean())


@pytest.mark.parametrize("dependent", [False, True])
def test_every_head_has_a_gradient_in_the_first_step(dependent: bool) -> None:
    positions, _ = counting_positions()
    own = settings(dependent=dependent)
    heads = medusa.new_heads(own, positions)
    batch = positions.batch(torch.arange(8))
    start = heads(batch.hidden, batch.embeddings)
    assert torch.allclose(start[:, 0], positions.project(batch.hidden)), "starts as the base's head"
    medusa.batch_loss(heads, positions, batch, own).backward()
    assert all(float(block[0].weight.grad.abs().max()) > 0 for block in heads.blocks)
    without = replace(batch, labels=torch.full_like(batch.labels, -1))  # control: nothing to learn
    heads.zero_grad()
    medusa.batch_loss(heads, positions, without, own).backward()
    assert all(float(block[0].weight.grad.abs().max()) == 0 for block in heads.blocks)


def test_a_killed_training_goes_on_to_the_same_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, held_out = counting_positions()
    own = settings(epochs=3)
    whole, straight = medusa.train(positions, held_out, settings=own, folder=tmp_path / "a")
    write, calls = medusa._write, []

    def killed(*args: Any) -> None:
        write(*args)
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt

    (tmp_path / "a").mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(medusa, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            medusa.train(positions, held_out, settings=own, folder=tmp_path / "b")
    resumed, again = medusa.train(positions, held_out, settings=own, folder=tmp_path / "b")
    assert again == straight
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    other, _ = medusa.train(
        positions, held_out, settings=replace(own, seed=1), folder=tmp_path / "c"
    )
    assert not torch.equal(other.blocks[0][0].weight, whole.blocks[0][0].weight), "control"
    with pytest.raises(InvalidRequest, match="differs in seed"):
        medusa.train(positions, held_out, settings=replace(own, seed=1), folder=tmp_path / "b")


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    positions, held_out = counting_positions()
    (tmp_path / medusa.CHECKPOINT).write_bytes(b"half")
    with pytest.raises(InvalidRequest, match=r"checkpoint.pt is broken"):
        medusa.train(positions, held_out, settings=settings(), folder=tmp_path)


def test_nothing_to_learn_is_an_error_before_training() -> None:
    base = Base.of(counting())
    short = [Text(hidden=torch.zeros(1, CYCLE), answer=torch.tensor([3]))] * 4
    with pytest.raises(InvalidRequest, match="none of 4 texts"):
        Positions(short, num_heads=2, base=base)
    some = Positions([*short, *counting_texts(2)], num_heads=2, base=base)
    assert (some.num_masked, len(some)) == (4, 22)


def test_labels_end_with_their_text() -> None:
    positions, _ = counting_positions(num_heads=3)
    batch = positions.batch(torch.arange(len(positions)))
    expected = batch.hidden.argmax(-1)[:, None] + torch.arange(2, 5)
    known = batch.labels >= 0
    assert torch.equal(batch.labels[known], (expected % CYCLE)[known])
    assert not known[10].any() or known[10].tolist() == [True, False, False]
    roots = batch.embeddings[:, 0].argmax(-1)
    assert torch.equal(roots, (batch.hidden.argmax(-1) + 1) % CYCLE)


# Tree


def test_the_tree_is_the_best_of_its_size() -> None:
    generator = torch.Generator().manual_seed(3)
    found = Ranks(ranks=torch.randint(0, 4, (500, 3), generator=generator) ** 2)
    nodes, worth = best_nodes(found, 12)
    assert worth == sorted(worth, reverse=True)
    assert all(node[:-1] in nodes[:i] or len(node) == 1 for i, node in enumerate(nodes))
    assert 1 + sum(worth) == pytest.approx(tokens_per_step(found, nodes))
    chain = [(0,) * depth for depth in range(1, 4)]
    assert tokens_per_step(found, nodes[:3]) >= tokens_per_step(found, chain)
    assert MAX_RANK > 9 and (9,) in best_nodes(found, 64)[0]


def test_unknown_tokens_pass_no_node() -> None:
    found = Ranks(ranks=torch.tensor([[0, -1], [MAX_RANK, 0]]))
    assert best_nodes(found, 8) == ([(0,)], [0.5])
    assert found.top(1, 1) == 1.0


# Text


def text_llm(*, template: bool = True) -> LLM:
    """A random target of 64 byte tokens with a chat template and an end token."""
    tokenizer = byte_tokenizer(64)
    if template:
        tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    generator = torch.Generator().manual_seed(5)
    return serve(
        TableRuntime(2 * torch.randn(64, 64, generator=generator)), tokenizer=tokenizer, eos_ids=[7]
    )


def recipe(**changes: Any) -> data.Recipe:
    values: dict[str, Any] = dict(
        base_fingerprint="f", max_turn=32, max_answer=24, answer_temperature=1.0
    )
    return data.Recipe(**(values | changes))


def test_text_goes_on_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SHARD_TURNS", 8)
    llm, lines = text_llm(), list[str]()
    whole = data.generate(llm, tmp_path / "a", 300, recipe=recipe(), report=lines.append)
    assert whole.answer_tokens >= 300 and "tokens/s" in lines[-1] and "min left" in lines[-1]
    data.generate(llm, tmp_path / "b", 60, recipe=recipe())
    assert len(data.shard_files(tmp_path / "b")) < len(data.shard_files(tmp_path / "a"))
    again = data.generate(llm, tmp_path / "b", 300, recipe=recipe())
    assert again == whole
    counts, examples = data.read(tmp_path / "b")
    assert (counts, examples) == data.read(tmp_path / "a")
    prompts = [tuple(example.prompt) for example in examples]
    assert len(prompts) == len(set(prompts)) == counts.examples
    with pytest.raises(InvalidRequest, match="another recipe, which differs in seed"):
        data.generate(llm, tmp_path / "b", 300, recipe=recipe(seed=2))


def test_prompts_are_answered_once_each(tmp_path: Path) -> None:
    llm = text_llm()
    prompts = ["abc", "ABC", "abc"]
    counts = data.generate(llm, tmp_path, 10_000, recipe=recipe(prompts=3), prompts=prompts)
    assert (counts.examples + counts.empty, counts.duplicates) == (2, 1)


def test_without_a_template_prompts_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*--prompts"):
        data.generate(text_llm(template=False), tmp_path, 10, recipe=recipe())


def test_broken_shards_are_named(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").write_text('{"examples": 0}\n{"prompt": [1], "ans\n')
    with pytest.raises(InvalidRequest, match=r"shard-00000.jsonl, line 2"):
        data.read(tmp_path)
    with pytest.raises(InvalidRequest, match="holds no examples"):
        data.read(tmp_path / "none")


@pytest.mark.parametrize(("period", "start"), [(1, 10), (7, 10), (40, 10)])
def test_loops_are_found_where_they_start(period: int, start: int) -> None:
    unit = [100 + i for i in range(period)]
    tokens = [*range(start), *(unit * 40)[: 4 * period + 30]]
    assert data.loop_start(tokens) == start + period
    assert data.loop_start(tokens[: start + period + 20]) is None
    assert data.loop_start(list(range(300))) is None


# States and the whole way


def test_states_are_the_runtimes_own(tmp_path: Path) -> None:
    llm = text_llm()
    data.generate(llm, tmp_path, 200, recipe=recipe())
    runtime = llm.model.runtime
    texts = cached_texts(runtime, tmp_path, limit_gb=1.0)
    examples = data.read(tmp_path)[1]
    assert len(texts) == len(examples)
    for text, example in zip(texts, examples, strict=True):
        before = [example.prompt[-1], *example.answer[:-1]]
        assert text.hidden.argmax(-1).tolist() == before
    forwards = runtime.num_forwards  # type: ignore[attr-defined]
    cached_texts(runtime, tmp_path, limit_gb=1.0)
    assert runtime.num_forwards == forwards, "computed again"  # type: ignore[attr-defined]
    lines: list[str] = []
    assert cached_texts(runtime, tmp_path, limit_gb=1e-9, report=lines.append) == []
    assert "limit of 1e-09 GB holds the states of 0 of" in lines[0]


def test_the_saved_heads_speed_up_their_target(tmp_path: Path) -> None:
    llm = text_llm()
    runtime = llm.model.runtime
    assert isinstance(runtime, TableRuntime)
    table = checksum(runtime)
    done = train_medusa(
        llm,
        tmp_path,
        num_tokens=2500,
        recipe=recipe(answer_temperature=0.0),
        settings=medusa.Settings(
            num_heads=2, dependent=True, epochs=12, batch_size=32, learning_rate=0.02, patience=40
        ),
        dtype=torch.float32,
    )
    assert checksum(runtime) == table, "training changed the target"
    target = Target(runtime=runtime, token_texts={}, fingerprint="")
    heads = load_heads(tmp_path, target=target)
    assert heads.choices is not None and len(heads.choices) == done.best.nodes - 1
    for name in ("trees.json", "provenance.json", "curves.png"):
        assert (tmp_path / name).stat().st_size > 0
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["data"]["answer_tokens"] >= 1 and facts["trees"][0]["tokens_per_step"] > 1
    prompt = [9, 1, 4]
    plain = llm.generate(prompt, max_new_tokens=24, ignore_eos=True)
    fast = llm.with_method("medusa", heads=str(tmp_path)).generate(
        prompt, max_new_tokens=24, ignore_eos=True
    )
    assert fast.tokens == plain.tokens
    assert fast.stats.steps < 0.8 * plain.stats.steps, (fast.stats.steps, plain.stats.steps)


def test_more_heads_than_the_context_are_refused(tmp_path: Path) -> None:
    llm = text_llm()
    with pytest.raises(InvalidRequest, match="heads reach past the context"):
        train_medusa(
            llm,
            tmp_path,
            num_tokens=10,
            recipe=recipe(),
            settings=medusa.Settings(num_heads=400),
        )


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(InvalidRequest, match="num_heads"):
        medusa.Settings(num_heads=0)
    with pytest.raises(InvalidRequest, match="learning_rate"):
        medusa.Settings(learning_rate=0.0)
    positions, _ = counting_positions()
    with pytest.raises(InvalidRequest, match="vocab_size is 13"):
        medusa.new_heads(settings(vocab_size=13), positions)


def test_user_turns_begin_freely_with_openings_and_about_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD_TURNS", 8)
    monkeypatch.setattr(turns, "OPENINGS", ("AB",))
    monkeypatch.setattr(turns, "TASKS", ("Z{}Z",))
    llm = text_llm()
    data.generate(llm, tmp_path, 400, recipe=recipe())
    tokenizer = llm.model.tokenizer
    assert tokenizer is not None
    shards = [data.read_shard(path)[1] for path in data.shard_files(tmp_path)][:4]
    asked = [[tokenizer.decode(example.prompt) for example in shard] for shard in shards]
    assert all(text.startswith("<AB") for text in asked[1])
    assert not all(text.startswith("<AB") for text in asked[0] + asked[2])
    answers = [tokenizer.decode(example.answer).strip() for example in shards[2]]
    assert asked[3] and all(text[2:-2] in answers for text in asked[3])


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["train", "medusa", *arguments], catch_exceptions=False)


def test_the_command_trains_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "load", lambda values: text_llm())
    options = ["--tokens", "300", "--max-answer", "24", "--heads", "2", "--epochs", "1"]
    first = run("--out", str(tmp_path), *options)
    assert first.exit_code == 0 and "tokens per step, speed-up" in first.stdout
    assert "held-out top-1" in first.stderr and "(saved)" in first.stdout
    again = run("--out", str(tmp_path), *options)
    assert again.exit_code == 0
    assert "Writing text" not in again.stderr and "Step" not in again.stderr, "done already"
    other = run("--out", str(tmp_path), *options, "--heads", "1")
    assert other.exit_code == 2 and "differs in num_heads" in other.stderr


def test_the_command_refuses_or_skips_broken_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_command, "load", lambda values: text_llm())
    prompts = tmp_path / "prompts.jsonl"
    good = [json.dumps({"prompt": "abc"[: i + 1]}) for i in range(3)]
    prompts.write_text("\n".join([good[0], '{"prompt": ', good[1], '{"text": 1}', good[2]]))
    options = ["--prompts", str(prompts), "--tokens", "20", "--heads", "1", "--epochs", "1"]
    refused = run("--out", str(tmp_path / "out"), *options)
    assert refused.exit_code == 2 and "prompts.jsonl, line 2 is no JSON" in refused.stderr
    assert not (tmp_path / "out").exists()
    skipped = run("--out", str(tmp_path / "out"), *options, "--skip-broken")
    assert skipped.exit_code == 0
    assert [f"line {n}" in skipped.stderr for n in (2, 4)] == [True, True]
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert facts["recipe"]["prompts"] == 3
