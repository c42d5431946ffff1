"""The benchmark: interleaved, paired, the same ids or no ratio, and nothing lost by a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, Scripted
from tiny import TableRuntime, build, byte_tokenizer, random_table, serve, shared

from outpace.bench.arms import Arm, Completion, Measured, MethodArm
from outpace.bench.figures import (
    decode_rate,
    divergences,
    is_degenerate,
    method_figures,
    speedups,
    spread,
)
from outpace.bench.forward_cost import ForwardCost, measure_forward_cost
from outpace.bench.harness import Item, run
from outpace.bench.hf import HFArm, hf_arms
from outpace.bench.plots import draw_all
from outpace.bench.report import render
from outpace.bench.results import provenance, summarise
from outpace.errors import InvalidRequest
from outpace.journal import Journal
from outpace.proposers import Combined, Draft, Lookahead, Lookup, Plain
from outpace.proposers.base import Method, Step
from outpace.runtimes.base import Output, Pass
from outpace.runtimes.transformers import TransformersRuntime
from outpace.tree import Tree

VOCAB = 32
ITEMS = [Item(number=i, category="ab"[i % 2], prompt=[i + 1, 2, 3]) for i in range(5)]


class Fake(Arm):
    """Takes a known time for known tokens, and notes when it ran."""

    def __init__(self, name: str, log: list[str], *, step: int = 1, speed: float = 10.0) -> None:
        self.name, self.baseline, self.log = name, "plain", log
        self.step, self.speed = step, speed

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
        self.log.append(f"{self.name} {len(prompts)} {max_new_tokens}")
        tokens = [7] + [prompt_token for prompt_token in range(max_new_tokens - 1)]
        steps = [1] + [self.step] * ((max_new_tokens - 1) // self.step)
        done = Completion(
            tokens=tokens,
            step_tokens=steps,
            first_token_seconds=1.0,
            seconds=1.0 + (len(tokens) - 1) / self.speed,
        )
        return Measured(completions=[done] * len(prompts), seconds=2.0, memory={"weights": 8})


def journal_of(tmp_path: Path, name: str = "j", *, resume: bool = False) -> Journal:
    return Journal(tmp_path / f"{name}.jsonl", {"run": 1}, resume=resume)


COST = ForwardCost(context=8, seconds={1: 0.010, 4: 0.012, 8: 0.020})


# The order of a run


def test_arms_take_turns_at_being_first_and_warm_up_is_not_counted(tmp_path: Path) -> None:
    log: list[str] = []
    arms = [Fake(name, log) for name in ("plain", "b", "c")]
    with journal_of(tmp_path) as journal:
        run(arms, ITEMS[:4], journal, max_new_tokens=9)
    assert [line for line in log if line.endswith("16")] == ["plain 1 16", "b 1 16", "c 1 16"]
    timed = [line.split()[0] for line in log if line.endswith(" 9")]
    assert timed == ["plain", "b", "c", "b", "c", "plain", "c", "plain", "b", "plain", "b", "c"]
    assert len(journal.entries) == 12


def test_groups_run_side_by_side_and_lone_arms_do_not(tmp_path: Path) -> None:
    log: list[str] = []
    lone = Fake("lone", log)
    lone.batches = False
    with journal_of(tmp_path) as journal:
        run([Fake("plain", log), lone], ITEMS, journal, max_new_tokens=9, concurrency=[1, 2])
        entries = journal.entries
    sizes = [len(e["numbers"]) for e in entries if e["concurrency"] == 2]
    assert sizes == [2, 2, 1]
    assert {e["arm"] for e in entries if e["concurrency"] == 2} == {"plain"}
    results = summarise(
        entries, [Fake("plain", log), lone], categories={}, concurrency=[1, 2], cost=COST
    )
    assert set(results["concurrency"]["1"]) == {"plain", "lone"}
    assert set(results["concurrency"]["2"]) == {"plain"}


@pytest.mark.parametrize("early", [False, True])
def test_55_side_by_side_too_other_ids_have_no_ratio(tmp_path: Path, early: bool) -> None:
    class Other(Fake):
        def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
            measured = super().run(prompts, max_new_tokens)
            if max_new_tokens == 9:
                done = measured.completions[0]
                tokens = done.tokens[:5] if early else [*done.tokens[:-1], 30]
                measured.completions[0] = replace(done, tokens=tokens)
            return measured

    arms = [Fake("plain", []), Fake("same", []), Other("other", [])]
    with journal_of(tmp_path) as journal:
        run(arms, ITEMS, journal, max_new_tokens=9, concurrency=[2])
        categories = {item.number: item.category for item in ITEMS}
        results = summarise(
            journal.entries, arms, categories=categories, concurrency=[2], cost=COST
        )
    ratios = {name: figures["speedup"] for name, figures in results["concurrency"]["2"].items()}
    assert ratios == {"plain": 1.0, "same": 1.0, "other": None}
    assert results["concurrency"]["2"]["other"]["tokens_per_second"] > 0


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole: list[str] = []
    with journal_of(tmp_path, "whole") as journal:
        run([Fake("plain", whole), Fake("b", whole)], ITEMS, journal, max_new_tokens=9)
        want = journal.entries

    class Killed(Exception):
        pass

    class Mortal(Fake):
        def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
            if len(self.log) > 5:
                raise Killed
            return super().run(prompts, max_new_tokens)

    log: list[str] = []
    with journal_of(tmp_path) as journal, pytest.raises(Killed):
        run([Mortal("plain", log), Mortal("b", log)], ITEMS, journal, max_new_tokens=9)
    again: list[str] = []
    with journal_of(tmp_path, resume=True) as journal:
        assert 0 < len(journal.entries) < 10, "control: it stopped on the way"
        run([Fake("plain", again), Fake("b", again)], ITEMS, journal, max_new_tokens=9)
        assert journal.entries == want
    assert len([x for x in again if x.endswith(" 9")]) + len(log) - 2 == 10, "nothing ran twice"


# Figures


def completion(tokens: Sequence[int], rate: float = 10.0, **stats: Any) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "step_tokens": [1] * len(tokens),
        "first_token_seconds": 0.5,
        "seconds": 0.5 + (len(tokens) - 1) / rate,
        "stats": stats or None,
    }


def test_a_rate_counts_what_came_after_the_first_step() -> None:
    assert decode_rate(completion(range(11), rate=20.0)) == pytest.approx(20.0)
    assert decode_rate(completion([5])) is None
    first_step_of_four = completion(range(8)) | {"step_tokens": [4, 4], "seconds": 0.9}
    assert decode_rate(first_step_of_four) == pytest.approx(10.0)


def test_different_ids_have_no_ratio_and_are_named() -> None:
    base = {0: completion([1, 2, 3]), 1: completion([1, 2, 3]), 2: completion([1, 2, 3])}
    own = {
        0: completion([1, 2, 3], rate=20.0),
        1: completion([1, 9, 3], rate=99.0),
        2: completion([1, 2], rate=99.0),  # stops early
    }
    assert speedups(own, base) == {0: pytest.approx(2.0)}
    assert divergences(own, base) == [
        {"prompt": 1, "at": 1, "expected": 2, "found": 9},
        {"prompt": 2, "at": 2, "expected": 3, "found": None},
    ]
    early = {n: completion([1]) for n in base}  # a baseline that stops early flatters nobody
    assert speedups(base, early) == {}
    assert [d["expected"] for d in divergences(base, early)] == [None] * 3


def test_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0]) == {
        "median": 2.5,
        "lower": 1.25,
        "upper": 3.75,
        "mean": 2.5,
        "prompts": 4,
    }
    assert spread([2.0])["lower"] == 2.0
    assert spread([])["median"] is None


def test_loops_are_flagged_and_left_out_of_the_second_mean() -> None:
    loop, text = [1, 2, 3] * 20, list(range(60))
    assert is_degenerate(loop)
    assert not is_degenerate(text)
    assert not is_degenerate([1, 1, 1])
    assert not is_degenerate([*range(30), *range(20)])
    base = {0: completion(loop), 1: completion(text)}
    own = {0: completion(loop, rate=90.0), 1: completion(text, rate=20.0)}
    figures = method_figures(
        own, base, categories={0: "a", 1: "b"}, exact=True, memory={}, cost=None
    )
    assert figures["degenerate"] == [0]
    assert figures["speedup_spread"]["mean"] == pytest.approx(5.5)
    assert figures["speedup_without_degenerate"]["mean"] == pytest.approx(2.0)
    assert figures["categories"]["a"]["speedup"] == pytest.approx(9.0)


def stats_of(**changes: Any) -> dict[str, Any]:
    split = {"propose": 0.0, "forward": 1.0, "accept": 0.0, "other": 0.0}
    return {
        "steps": 10,
        "nodes": 10,
        "drafted": 0,
        "accepted": 0,
        "completion_tokens": 10,
        "drafted_by_depth": [],
        "accepted_by_depth": [],
        "time_split": split,
    } | changes


def test_acceptance_and_why() -> None:
    base = {0: completion(range(10), **stats_of())}
    split = {"propose": 0.02, "forward": 1.0, "accept": 0.0, "other": 0.0}
    own = {
        0: completion(
            range(10),
            **stats_of(
                nodes=60,
                drafted=50,
                accepted=5,
                completion_tokens=15,
                drafted_by_depth=[10, 5],
                accepted_by_depth=[4, 1],
                time_split=split,
            ),
        )
    }
    figures = method_figures(own, base, categories={0: "a"}, exact=True, memory={}, cost=COST)
    assert figures["acceptance"] == 0.1
    assert figures["acceptance_by_depth"] == [
        {"depth": 1, "drafted": 10, "acceptance": 0.4},
        {"depth": 2, "drafted": 5, "acceptance": 0.2},
    ]
    balance = figures["break_even"]
    # 6 nodes cost 16 ms, 2 ms around them: 18 ms where plain takes 10.
    assert balance["tokens_per_step_needed"] == pytest.approx(1.8)
    assert balance["acceptance_needed"] == pytest.approx(0.8 / 5)
    assert balance["acceptance"] == pytest.approx(0.1)
    assert "must bring 1.80 tokens, brings 1.50, and so does not pay" in balance["why"]


def test_acceptance_by_position() -> None:
    long = completion(range(40)) | {"step_tokens": [1, 3] * 10}
    figures = method_figures(
        {0: long}, {0: long}, categories={0: "a"}, exact=True, memory={}, cost=None
    )
    first, second = figures["acceptance_by_position"]
    assert (first["from"], first["to"], second["from"]) == (0, 31, 32)
    assert first["accepted_per_step"] == 1.0
    assert figures["tokens_per_step"] == 2.0


def test_cost_between_and_beyond_the_measured_counts() -> None:
    assert COST.at(1) == 0.010
    assert COST.at(6) == pytest.approx(0.016)
    assert COST.at(16) == pytest.approx(0.040)


def test_forward_cost_counts_the_work_of_the_runtime() -> None:
    class Slow(TableRuntime):
        def forward(self, batch: Sequence[Pass]) -> list[Output]:
            if batch[0].rows:
                self.sizes.append(len(batch[0].tree))
            return super().forward(batch)

    runtime = Slow(random_table(VOCAB, seed=1), max_context=64, max_nodes=16)
    runtime.sizes = []
    cost = measure_forward_cost(runtime, repeats=2)
    assert sorted(cost.seconds) == [1, 2, 4, 8, 12, 16]
    assert runtime.sizes == sorted(cost.seconds) * 3
    assert runtime.num_open == 0
    assert all(seconds > 0 for seconds in cost.seconds.values())


# Real arms


def arms_of(*methods: Any) -> list[Arm]:
    llm = serve(TransformersRuntime(shared("llama")), Plain())
    return [MethodArm(m.name, llm.with_method(m), {"temperature": 0.0, "seed": 7}) for m in methods]


def test_two_runs_agree_on_everything_but_time(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        with journal_of(tmp_path, name) as journal:
            run(arms_of(Plain(), Lookup()), ITEMS, journal, max_new_tokens=24)
            figures = summarise(
                journal.entries,
                arms_of(Plain(), Lookup()),
                categories={item.number: item.category for item in ITEMS},
                concurrency=[1],
                cost=COST,
            )["methods"]
        counted = ("tokens_per_step", "acceptance", "acceptance_by_depth", "identical", "prompts")
        found.append({m: {k: figures[m][k] for k in counted} for m in figures})
    assert found[0] == found[1]
    assert found[0]["lookup"]["identical"] == len(ITEMS)
    assert found[0]["lookup"]["tokens_per_step"] > 1.0, "control: it did accept something"


def test_no_arm_profits_from_what_another_one_cached(tmp_path: Path) -> None:
    with journal_of(tmp_path) as journal:
        run(arms_of(Plain(), Lookup()), ITEMS[:2], journal, max_new_tokens=8)
        for entry in journal.entries:
            assert [c["stats"]["reused_tokens"] for c in entry["completions"]] == [0]


def check_runs_alike(methods: Sequence[Method], tmp_path: Path) -> None:
    """The same prompt three times: the third run knows no more than the first."""
    items = [Item(number=i, category="a", prompt=[5, 6, 7] * 4) for i in range(3)]
    with journal_of(tmp_path) as journal:
        run(arms_of(*methods), items, journal, max_new_tokens=24)
        entries = journal.entries
    for method in methods:
        found = [
            (c["step_tokens"], c["stats"]["drafted"], c["stats"]["accepted"])
            for e in entries
            if e["arm"] == method.name
            for c in e["completions"]
        ]
        assert len(found) == 3 and found[1:] == found[:1] * 2


def test_55_a_repeated_prompt_is_not_accepted_more(tmp_path: Path) -> None:
    draft = Draft(runtime=TransformersRuntime(shared("llama", 1), exactness="ordinary"))
    check_runs_alike([Plain(), Lookup(), Lookahead(), Combined(), draft], tmp_path)


def test_55_control_a_method_that_remembers_is_caught(tmp_path: Path) -> None:
    known: list[list[int]] = []

    def recall(step: Step, _: int) -> list[int]:
        n = len(step.tokens)
        texts = [text for text in known if text[:n] == step.tokens]
        known.append(list(step.tokens))
        return max(texts, key=len)[n : n + 4] if texts else []

    with pytest.raises(AssertionError):
        check_runs_alike([Plain(), Scripted(recall)], tmp_path)


def test_a_method_that_changes_the_text_is_named(tmp_path: Path) -> None:
    class Liar(MethodArm):
        def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
            measured = super().run(prompts, max_new_tokens)
            for done in measured.completions:
                done.tokens[3] = (done.tokens[3] + 1) % VOCAB
            return measured

    honest, other = arms_of(Plain(), Lookup())
    liar = Liar("lookup", other.llm, {"seed": 7})  # type: ignore[attr-defined]
    with journal_of(tmp_path) as journal:
        run([honest, liar], ITEMS, journal, max_new_tokens=12)
        figures = summarise(
            journal.entries,
            [honest, liar],
            categories={i.number: i.category for i in ITEMS},
            concurrency=[1],
            cost=COST,
        )["methods"]["lookup"]
    assert figures["identical"] == 0
    assert {d["at"] for d in figures["divergences"]} == {3}
    assert figures["speedup"] is None, "a ratio of different texts means nothing"


def test_transformers_own_ways_run_on_the_same_weights() -> None:
    runtime = TransformersRuntime(shared("llama"))
    llm = serve(runtime, Plain())
    plain = llm.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True).tokens
    arms = hf_arms(llm, [llm], 0.0)
    assert [arm.name for arm in arms] == ["hf", "hf-lookup"]
    for arm in arms:
        done = arm.run([[1, 2, 3]], 12).completions[0]
        assert done.tokens == plain
        assert sum(done.step_tokens) == 12
        assert 0 < done.first_token_seconds < done.seconds
    assert isinstance(arms[0], HFArm)
    with pytest.raises(InvalidRequest, match="greedy"):
        hf_arms(llm, [], 0.8)
    with pytest.raises(InvalidRequest, match="runs on transformers, not TableRuntime"):
        hf_arms(serve(TableRuntime(random_table(VOCAB, seed=1)), Plain()), [], 0.0)


def test_scratch_nodes_count_in_the_cost() -> None:
    tree = Tree(tokens=[1, 1, 2], parents=[-1, 0, 1], num_candidates=1, num_scratch_rows=1)
    llm = serve(TransformersRuntime(shared("llama")), Script(tree))
    stats = llm.generate([1], max_new_tokens=1, ignore_eos=True).stats
    assert (stats.steps, stats.nodes, stats.drafted) == (1, 3, 0)


# The command

KILL = """
import sys
from outpace.bench import harness
from outpace.journal import Journal
real, count = Journal.add, [0]
def add(self, entry):
    real(self, entry)
    count[0] += 1
    if count[0] == 3:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
Journal.add = add
from outpace.cli import cli
cli(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "model"
    build("llama", max_position_embeddings=20_000).save_pretrained(folder)
    byte_tokenizer(64).save_pretrained(folder)
    return folder


def command(model: Path, out: Path, *more: str, script: str | None = None) -> Any:
    base = [sys.executable, "-c", script] if script else [sys.executable, "-m", "outpace"]
    args = ["bench", "--model", str(model), "--methods", "lookup", "--limit", "3"]
    args += ["--max-new-tokens", "12", "--out", str(out), *more]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*base, *args], capture_output=True, text=True, env=env, check=False)


def test_the_command_survives_a_kill_and_writes_a_report(
    model_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed = command(model_folder, out, script=KILL)
    assert killed.returncode == -signal.SIGKILL
    assert len((out / "journal.jsonl").read_text().splitlines()) == 4, "a header and three entries"
    refused = command(model_folder, out, "--resume", "--seed", "8")
    assert refused.returncode == 2
    assert "differs in seed" in refused.stderr
    done = command(model_folder, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert "lookup" in done.stdout
    assert "3 of 3" in done.stdout
    results = json.loads((out / "results.json").read_text())
    named = {"tokens_per_second", "speedup", "tokens_per_step", "acceptance", "exact", "identical"}
    for name in ("plain", "lookup"):
        method = results["methods"][name]
        assert named | {"memory", "time_split", "categories"} <= method.keys()
        assert method["identical"] == method["prompts"] == 3
        assert method["memory"]["weights"] > 0
        assert method["memory"]["peak"] >= method["memory"]["scratch"] >= 0
    assert {"command", "commit", "versions", "machine", "dtype"} <= results.keys()
    assert results["methods"]["plain"]["speedup"] == 1.0
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", ""), "the page fetches nothing"
    assert page.count("data:image/png;base64,") == 5
    for name in ("speedup_by_category", "acceptance_by_depth", "forward_cost", "time_split"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="apt-get install chromium")
def test_the_report_opens_in_a_browser_without_network(tmp_path: Path) -> None:
    log: list[str] = []
    arms = [Fake("plain", log), Fake("b", log, step=2)]
    with journal_of(tmp_path) as journal:
        run(arms, ITEMS, journal, max_new_tokens=9, concurrency=[1, 2])
        summary = summarise(
            journal.entries,
            arms,
            categories={i.number: i.category for i in ITEMS},
            concurrency=[1, 2],
            cost=COST,
        )
    llm = serve(TransformersRuntime(shared("llama")), Plain())
    results = {**provenance(llm), **summary}
    page, shot = tmp_path / "report.html", tmp_path / "shot.png"
    page.write_text(render(results, draw_all(results)))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,4000"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
    home = f"--user-data-dir={tmp_path / 'profile'}"
    dom = subprocess.run(
        [*browser, *offline, home, f"--screenshot={shot}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert dom.count("<img") == 6, "a plot is missing"
    for unit in ("tokens/s", "MiB", "(ms)"):
        assert unit in dom
    assert len(shot.read_bytes()) > 50_000, "the page is blank"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nothing"], "--methods takes plain"),
        (["--methods", "draft"], "write draft:DRAFT"),
        (["--methods", "lookup:x"], "write lookup"),
        (["--methods", "combined:x"], "write combined, not"),
        (["--methods", "combined+heads"], "write combined+heads:HEADS"),
        (["--methods", "medusa:x,medusa:y"], "names medusa twice"),
        (["--concurrency", "0"], "starts at 1"),
        (["--concurrency", "a"], "takes numbers"),
        (["--prompts", "absent.jsonl"], "absent.jsonl cannot be read"),
    ],
)
def test_bad_options_are_named_before_anything_loads(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from outpace.cli import cli

    args = ["bench", "--model", "absent", "--out", str(tmp_path), *arguments]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert message in result.output
