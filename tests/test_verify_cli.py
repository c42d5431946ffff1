"""`outpace verify`: verdicts, exit codes and files, with seeded faults beside right controls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner, Result
from scripted import Bushy, Drawn, Perfect, Scripted
from tiny import VOCAB, TableRuntime, byte_tokenizer, probs_table, random_table, serve, shared

import outpace
from outpace import accept as rules
from outpace.cli import cli
from outpace.cli import verify as command
from outpace.llm import LLM
from outpace.proposers.base import Step
from outpace.tree import Tree

SIZE = 16
PROMPTS = ["0123", "44", "5050505", "1"]
SAMPLED = ("--temperature", "0.8", "--samples", "150")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], None]:
    """Makes `outpace.load` give this LLM."""

    def use(llm: LLM) -> None:
        monkeypatch.setattr(outpace, "load", lambda *_, **__: llm, raising=False)

    return use


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> dict[str, Scripted]:
    """What runs under the names of methods; names that are not here are the real ones."""
    methods: dict[str, Scripted] = {}
    load = LLM.with_method

    def with_method(llm: LLM, method: Any, **options: Any) -> LLM:
        return load(llm, methods[method]) if method in methods else load(llm, method, **options)

    monkeypatch.setattr(LLM, "with_method", with_method)
    return methods


def table_llm() -> LLM:
    runtime = TableRuntime(random_table(SIZE, seed=1))
    return serve(runtime, tokenizer=byte_tokenizer(SIZE), eos_ids=[SIZE - 1])


def prompts_file(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["verify", *args], prog_name="outpace")


def check(folder: Path, *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a run over the prompts."""
    settings = ["--prompts", prompts_file(folder), "--max-new-tokens", "12", "--json"]
    shown = run(*settings, *args)
    assert shown.exit_code in (0, 1), shown.output
    return shown.exit_code, json.loads(shown.stdout)


def texts(llm: LLM, **sampling: float) -> list[list[int]]:
    ids = [llm.model.tokenizer.prompt_ids(p, raw=False) for p in PROMPTS]  # type: ignore[union-attr]
    results = llm.generate_batch(ids, max_new_tokens=12, **sampling)
    return [p + r.tokens for p, r in zip(ids, results, strict=True)]


# Right methods


def test_every_method_that_needs_nothing_is_identical(
    tmp_path: Path, use: Callable[[LLM], None]
) -> None:
    use(table_llm())
    names = ("plain", "lookup", "lookahead", "combined", "medusa")
    code, report = check(tmp_path, "--method", ",".join(names), *SAMPLED[:2], "--samples", "0")
    assert (code, report["verdict"], report["fits"]) == (0, "identical", [])
    found = [(run["method"], run["temperature"]) for run in report["runs"]]
    assert found == [(name, t) for t in (0.0, 0.8) for name in names]
    for entry in report["runs"]:
        assert (entry["identical"], entry["ties"], entry["wrong"]) == (4, 0, 0)
        assert [prompt["prompt"] for prompt in entry["prompts"]] == [0, 1, 2, 3]


def test_what_stands_in_for_heads_and_a_draft_is_said(
    tmp_path: Path, use: Callable[[LLM], None], methods: dict[str, Scripted]
) -> None:
    llm = table_llm()
    use(llm)
    methods["draft"] = Perfect(*texts(llm))
    shown = run("--method", "medusa,draft", "--prompts", prompts_file(tmp_path))
    assert shown.exit_code == 0
    assert "medusa: no --heads, so untrained random heads stand in" in shown.stderr
    assert "draft: no --draft, so the model itself stands in" in shown.stderr
    assert shown.stdout.splitlines()[-1] == "verdict: identical"


def test_heads_go_to_the_union_too(
    tmp_path: Path, use: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(table_llm())
    given: list[tuple[str, dict[str, Any]]] = []
    original = LLM.with_method

    def with_method(llm: LLM, method: Any, **options: Any) -> LLM:
        given.append((method, options))
        return original(llm, method)

    monkeypatch.setattr(LLM, "with_method", with_method)
    code, _ = check(tmp_path, "--method", "lookup,combined", "--heads", "a", "--draft", "b")
    assert code == 0
    assert given[-2:] == [("lookup", {}), ("combined", {"heads": "a", "draft": "b"})]


def test_draws_fit_and_the_control_does_not(tmp_path: Path, use: Callable[[LLM], None]) -> None:
    use(table_llm())
    code, report = check(tmp_path, "--method", "lookup", *SAMPLED)
    assert (code, report["verdict"]) == (0, "identical")
    assert [(fit["method"], fit["acceptance"]) for fit in report["fits"]] == [
        ("lookup", "coupled"),
        ("lookup", "rejection"),
    ]
    for fit in report["fits"]:
        assert fit["control_p_value"] < fit["level"] == 1e-3 / 2 < fit["p_value"]
        assert fit["samples"] == 300 and fit["drafted"] > 0


# Seeded faults


def test_a_draw_reported_with_another_q_is_named(
    tmp_path: Path, use: Callable[[LLM], None], methods: dict[str, Scripted]
) -> None:
    use(table_llm())
    honest = methods["draft"] = Drawn(random_table(SIZE, seed=2), branching=[2, 1])
    code, report = check(tmp_path, "--method", "draft", *SAMPLED)
    assert (code, [fit["verdict"] for fit in report["fits"]]) == (0, ["fits", "fits"])

    def lie(step: Step, number: int) -> Tree:
        tree = honest.guess(step, number)
        assert isinstance(tree, Tree) and tree.draft_probs is not None
        return replace(tree, draft_probs=torch.full_like(tree.draft_probs, 1 / SIZE))

    methods["draft"] = Scripted(lie)
    code, report = check(tmp_path, "--method", "draft", *SAMPLED)
    assert (code, report["verdict"]) == (1, "wrong")
    assert [fit["verdict"] for fit in report["fits"]] == ["fits", "wrong"]
    assert all(run["wrong"] == 0 for run in report["runs"])


def test_a_forgotten_residual_is_named(
    tmp_path: Path,
    use: Callable[[LLM], None],
    methods: dict[str, Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(table_llm())
    methods["draft"] = Drawn(random_table(SIZE, seed=2), branching=[2, 1])
    monkeypatch.setattr(rules, "_residual", lambda p, q, token: (p, q))
    code, report = check(tmp_path, "--method", "draft", *SAMPLED)
    assert (code, report["verdict"]) == (1, "wrong")
    assert [fit["verdict"] for fit in report["fits"]] == ["fits", "wrong"]


def test_noise_keyed_by_step_is_named(
    tmp_path: Path,
    use: Callable[[LLM], None],
    methods: dict[str, Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = table_llm()
    use(llm)
    methods["draft"] = Perfect(*texts(llm), *texts(llm, temperature=0.8, seed=7))
    arguments = ("--method", "draft", "--temperature", "0.8", "--samples", "0")
    assert check(tmp_path, *arguments)[0] == 0
    monkeypatch.setattr(rules.TargetRows, "position", lambda self, _: len(self.sampler.tokens))
    code, report = check(tmp_path, *arguments)
    assert (code, report["verdict"]) == (1, "wrong")
    greedy, seeded = report["runs"]
    assert greedy["wrong"] == 0 < seeded["wrong"]
    wrong = next(entry for entry in seeded["prompts"] if entry["verdict"] == "wrong")
    assert wrong["at"] is not None and wrong["gap"] > 1e-3


def test_a_shifted_mask_is_named(
    tmp_path: Path,
    use: Callable[[LLM], None],
    methods: dict[str, Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = serve(shared("llama"), tokenizer=byte_tokenizer(VOCAB))
    use(llm)
    methods["medusa"] = Bushy(*texts(llm), rights=[3, 1], vocab_size=VOCAB)
    arguments = ("--method", "medusa", "--limit", "3")
    assert check(tmp_path, *arguments)[0] == 0
    mask = Tree.mask

    def shifted(tree: Tree) -> npt.NDArray[np.bool_]:
        seen = mask(tree)
        return seen if len(tree) == max(tree.depths) + 1 else np.roll(seen, 1, axis=1)

    monkeypatch.setattr(Tree, "mask", shifted)
    code, report = check(tmp_path, *arguments)
    assert (code, report["verdict"]) == (1, "wrong") and report["runs"][0]["wrong"] > 0


def test_a_test_without_power_says_so(tmp_path: Path, use: Callable[[LLM], None]) -> None:
    sure = probs_table([[1e-9] * (SIZE - 1) + [1.0]])
    use(serve(TableRuntime(sure), tokenizer=byte_tokenizer(SIZE)))
    arguments = ("--method", "plain", "--temperature", "0.8", "--samples", "20")
    code, report = check(tmp_path, *arguments)
    assert (code, report["verdict"]) == (1, "no power")
    shown = run("--prompts", prompts_file(tmp_path), "--max-new-tokens", "3", *arguments)
    assert "this test has no power; raise --samples, or --temperature" in shown.stdout


# Completions


def completions_file(folder: Path, *entries: dict[str, Any]) -> str:
    path = folder / "completions.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    return str(path)


def test_one_changed_token_is_found_at_its_index(
    tmp_path: Path, use: Callable[[LLM], None]
) -> None:
    llm = serve(shared("llama"), tokenizer=byte_tokenizer(VOCAB))
    use(llm)
    results = [llm.generate(prompt, max_new_tokens=20) for prompt in PROMPTS]
    entries: list[dict[str, Any]] = [
        {"prompt": prompt, "tokens": result.tokens}
        for prompt, result in zip(PROMPTS, results, strict=True)
    ]
    entries[1] = {"prompt": PROMPTS[1], "text": results[1].text}
    right = run("--completions", completions_file(tmp_path, *entries), "--json")
    assert right.exit_code == 0, right.output
    report = json.loads(right.stdout)
    assert report["verdict"] in ("identical", "numerical tie") and report["tolerance"] == 1e-4
    assert [entry["line"] for entry in report["completions"]] == [1, 2, 3, 4]

    changed = [*results[2].tokens]
    changed[13] = (changed[13] + 1) % VOCAB
    entries[2]["tokens"] = changed
    file = completions_file(tmp_path, *entries)
    wrong = run("--completions", file, "--json")
    assert wrong.exit_code == 1
    verdicts = [entry["verdict"] == "wrong" for entry in json.loads(wrong.stdout)["completions"]]
    assert verdicts == [False, False, True, False]
    found = json.loads(wrong.stdout)["completions"][2]
    assert (found["at"], found["found"], found["expected"]) == (
        13,
        changed[13],
        results[2].tokens[13],
    )
    shown = run("--completions", file)
    assert shown.exit_code == 1 and "line 3: wrong at token 13 (character 13), " in shown.stdout


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "lookup,magic"], "--method takes plain, lookup"),
        (
            ["--method", "lookup", "--draft", "x"],
            "--draft goes with --method draft or combined only",
        ),
        (
            ["--method", "lookup", "--heads", "x"],
            "--heads goes with --method medusa or combined only",
        ),
        (["--resume"], "--resume needs --out"),
        (["--prompts", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--completions", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--completions", "a", "--method", "lookup"], "--method does not go with --completions"),
        (["--completions", "a", "--limit", "3"], "--limit does not go with --completions"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--limit", "0"], "'--limit'"),
        (["--seed", "-3"], "seed must be a whole number"),
    ],
)
def test_bad_input_is_two_and_one_line(arguments: list[str], message: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 2 and message in shown.stderr
    assert shown.stderr.count("\n") == 1 and shown.stdout == ""


# Files


def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, use: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(table_llm())
    out = tmp_path / "out" / "verify.jsonl"
    arguments = ("--method", "lookup,combined", *SAMPLED, "--out", str(out), "--resume")
    code, whole = check(tmp_path, *arguments)
    lines = out.read_bytes().splitlines(keepends=True)
    assert code == 0 and len(lines) == 1 + 2 * 2 * 4 + 2 * 2
    for kept in (6, 18):
        out.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])  # killed while writing
        assert check(tmp_path, *arguments) == (0, whole)
        assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)

    monkeypatch.setattr(LLM, "generate_batch", None)  # all is there: nothing is decoded
    assert len(json.loads(json.dumps(whole))["fits"]) == 4
    shown = run("--prompts", prompts_file(tmp_path), *arguments, "--max-new-tokens", "13")
    assert shown.exit_code == 2 and "differs in max_new_tokens" in shown.stderr


def test_options_of_the_command_are_described() -> None:
    for option in command.params:
        assert getattr(option, "help", None), option.name
