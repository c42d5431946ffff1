"""The command line against a scripted model, and a tiny real one in processes of their own."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tiny import build, byte_tokenizer

import outpace
from outpace.accept import RULES
from outpace.cli import cli, options
from outpace.cli.terminal import LoadProgress, stats_lines
from outpace.engine import TokenLogprob
from outpace.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound
from outpace.llm import Choice, Piece
from outpace.llm import Result as Generated
from outpace.proposers import METHODS
from outpace.sampling import SamplingParams
from outpace.stats import Stats

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "from outpace.cli import main; main()"]


class FakeLLM:
    """Answers with `words`, one a piece, and remembers what it was asked."""

    def __init__(self) -> None:
        self.words: Sequence[str] = ("Riv", "ers", " flöw")
        self.failure: BaseException | None = None  # raised after the first piece
        self.loads: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def load(self, model: str, *, notice: Any, progress: Any, **arguments: Any) -> FakeLLM:
        self.loads.append({"model": model, **arguments})
        progress(1, 2, "Converting")
        progress(2, 2, "Converting")
        notice("a notice")
        return self

    def stream(self, prompt: Any, **arguments: Any) -> Iterator[Piece]:
        self.calls.append((list(prompt) if isinstance(prompt, list) else prompt, arguments))
        for number, word in enumerate(self.words):
            if number and self.failure is not None:
                raise self.failure
            last = number == len(self.words) - 1
            result = self.result(arguments.get("n", 1)) if last else None
            yield Piece(text=word, tokens=[number], index=0, result=result)

    def generate(self, prompt: Any, **arguments: Any) -> Generated:
        *_, last = self.stream(prompt, **arguments)
        assert last.result is not None
        return last.result

    def info(self) -> dict[str, Any]:
        return {"model": "fake", "parameters": 1234567, "memory": {"weights": 2**21}, "gap": 1 / 3}

    def result(self, n: int) -> Generated:
        stats = Stats(
            method="lookup",
            exact=True,
            exactness="ordinary",
            completion_tokens=3,
            steps=2,
            drafted=4,
            accepted=1,
            seconds=2.0,
            first_token_seconds=1.0,
            first_tokens=1,
        )
        choices = [
            Choice(
                index=index,
                text="".join(self.words),
                tokens=[0, 1, 2],
                finish_reason="stop",
                logprobs=[TokenLogprob(0, -0.5, [(0, -0.5)])],
                seed=7 + index,
                stats=stats,
            )
            for index in range(n)
        ]
        return Generated(choices=tuple(choices), stats=stats)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM()
    monkeypatch.setattr(outpace, "load", llm.load, raising=False)
    monkeypatch.delenv("OUTPACE_CACHE", raising=False)
    return llm


def run(*args: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(cli, args, input=stdin, prog_name="outpace")


def test_help_comes_without_torch() -> None:
    script = (
        "import sys\n"
        "from outpace.cli import cli\n"
        "try: cli(['generate', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules))\n"
        "import outpace; outpace.SamplingParams; print('torch' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-2:] == ["set()", "True"], shown.stderr


def test_options_match_what_the_library_takes() -> None:
    assert options.METHODS == tuple(METHODS)
    assert options.ACCEPTANCE_RULES == tuple(RULES)
    for method in METHODS.values():
        taken = {name for name, takers in options.METHOD_OPTIONS.items() if method.name in takers}
        assert taken == set(method.options()) - PYTHON_ONLY, method.name
    sampling = {option.name for option in (*options.SAMPLING, *options.CHOICES)}
    assert sampling == {f.name for f in fields(SamplingParams)} - PYTHON_ONLY


PYTHON_ONLY = {
    "processors",
    "methods",
    "choices",
}  # functions and objects have no spelling in a shell


def test_help_pages_in_the_docs_are_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
    assert page["render"]() == page["PAGE"].read_text(encoding="utf-8")


def test_text_goes_to_stdout_and_all_else_to_stderr(fake: FakeLLM) -> None:
    shown = run("generate", "Hi", "--stats")
    assert shown.exit_code == 0
    assert shown.stdout == "Rivers flöw\n"
    assert shown.stderr.splitlines() == [
        "Converting ...",
        "a notice",
        *stats_lines(fake.result(1).stats).splitlines(),
    ]
    assert "3 tokens in 2.00 s, the first after 1.00 s, 2.0 tokens/s; 2 steps" in shown.stderr
    assert "1 of 4 drafted accepted (25.0%)" in shown.stderr


def test_no_second_newline_after_a_text_that_ends_with_one(fake: FakeLLM) -> None:
    fake.words = ("a\n", "")
    assert run("generate", "Hi").stdout == "a\n"


def test_omitted_options_stay_with_the_library(fake: FakeLLM) -> None:
    assert run("generate", "Hi").exit_code == 0
    assert fake.loads == [
        {
            "model": "smollm2",
            "method": "plain",
            "device": "auto",
            "dtype": "auto",
            "exactness": "auto",
            "runtime": "auto",
            "cache": None,
        }
    ]
    assert fake.calls == [("Hi", {"raw": False})]


SAMPLING = {
    "--temperature 0.8": {"temperature": 0.8},
    "--temperature 0": {"temperature": 0.0},
    "--top-k 0": {"top_k": 0},
    "--top-p 0.9": {"top_p": 0.9},
    "--min-p 0.1": {"min_p": 0.1},
    "--repetition-penalty 1.2": {"repetition_penalty": 1.2},
    "--presence-penalty -1": {"presence_penalty": -1.0},
    "--frequency-penalty 0.5": {"frequency_penalty": 0.5},
    "--logit-bias 5=-100 --logit-bias 7=1.5": {"logit_bias": {5: -100.0, 7: 1.5}},
    "--bad-word x --bad-word yz": {"bad_words": ("x", "yz")},
    "--min-tokens 2": {"min_tokens": 2},
    "--seed 0": {"seed": 0},
    "--n 2": {"n": 2},
    "--stop a --stop b": {"stop": ("a", "b")},
    "--stop-token-id 0": {"stop_token_ids": (0,)},
    "--ignore-eos": {"ignore_eos": True},
    "--include-stop": {"include_stop": True},
    "--json --logprobs 0": {"logprobs": 0},
    "--acceptance typical": {"acceptance": "typical"},
    "--typical-threshold 0.2": {"typical_threshold": 0.2},
    "--typical-alpha 0.4": {"typical_alpha": 0.4},
    "--max-new-tokens 0": {"max_new_tokens": 0},
}


@pytest.mark.parametrize("args", SAMPLING)
def test_sampling_options_reach_the_library(fake: FakeLLM, args: str) -> None:
    assert run("generate", "Hi", *args.split()).exit_code == 0
    assert fake.calls == [("Hi", {"raw": False, **SAMPLING[args]})]


def test_every_sampling_option_is_in_the_table_above() -> None:
    tried = {name for arguments in SAMPLING.values() for name in arguments}
    assert tried == {option.name for option in (*options.SAMPLING, *options.CHOICES)}


@pytest.mark.parametrize(
    ("args", "arguments"),
    [
        (
            "lookup --max-ngram 5 --min-ngram 2 --num-draft-tokens 9 --num-branches 1",
            {"max_ngram": 5, "min_ngram": 2, "num_tokens": 9, "num_branches": 1},
        ),
        (
            "lookahead --window-size 7 --ngram-size 4 --num-guesses 3 --num-draft-tokens 6",
            {"window_size": 7, "ngram_size": 4, "num_guesses": 3, "num_tokens": 6},
        ),
        (
            "draft --draft small --num-draft-tokens 3 --num-branches 2 --min-confidence 0",
            {"draft": "small", "num_tokens": 3, "num_branches": 2, "min_confidence": 0.0},
        ),
        (
            "medusa --heads folder --num-heads 2 --num-nodes 9",
            {"heads": "folder", "num_heads": 2, "num_nodes": 9},
        ),
        ("combined", {}),
        ("combined --heads folder --draft small", {"heads": "folder", "draft": "small"}),
    ],
)
def test_method_options_reach_the_library(
    fake: FakeLLM, args: str, arguments: dict[str, Any]
) -> None:
    args = f"{args} --model m --device cpu --dtype float32 --exactness ordinary"
    assert run("generate", "Hi", "--method", *args.split()).exit_code == 0
    [load] = fake.loads
    assert load == {
        "model": "m",
        "method": args.split()[0],
        "runtime": "auto",
        "device": "cpu",
        "dtype": "float32",
        "exactness": "ordinary",
        "cache": None,
        **arguments,
    }


def test_the_cache_folder_comes_from_the_environment(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", "somewhere")
    run("generate", "Hi")
    monkeypatch.setenv("OUTPACE_CACHE", "")
    run("generate", "Hi")
    assert [load["cache"] for load in fake.loads] == [Path("somewhere"), None]


def test_json_is_one_object_and_nothing_else(fake: FakeLLM) -> None:
    body = json.loads(run("generate", "Hi", "--json").stdout)
    assert set(body) == {"text", "tokens", "finish_reason", "method", "exact", "stats", "seed"}
    assert body["text"] == "Rivers flöw"
    assert (body["tokens"], body["finish_reason"], body["seed"]) == ([0, 1, 2], "stop", 7)
    assert (body["method"], body["exact"]) == ("lookup", True)
    assert body["stats"] == fake.result(1).stats.asdict()

    args = ("generate", "Hi", "--json", "--n", "2", "--logprobs", "1")
    body = json.loads(run(*args).stdout)
    assert [choice["seed"] for choice in body["choices"]] == [7, 8]
    entry = {"token": 0, "logprob": -0.5, "top": [[0, -0.5]]}
    assert body["logprobs"] == [entry] == body["choices"][1]["logprobs"]


def test_several_completions_follow_one_another(fake: FakeLLM) -> None:
    shown = run("generate", "Hi", "--n", "2")
    assert shown.stdout == "Rivers flöw\n" * 2
    assert shown.stderr.splitlines()[-2:] == ["[1 of 2]", "[2 of 2]"]


def test_the_prompt_may_come_from_stdin_or_with_a_system_message(fake: FakeLLM) -> None:
    run("generate", "-", stdin="två\nlines \n\n".encode())
    run("generate", "Hi", "--raw")
    run("generate", "Hi", "--system", "Be brief.")
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert fake.calls == [
        ("två\nlines \n", {"raw": False}),
        ("Hi", {"raw": True}),
        ([system, user], {"raw": False}),
    ]


BAD = {
    "generate": "Missing argument 'PROMPT'",
    "generate Hi --nonsense": "No such option",
    "generate Hi --method magic": "'magic' is not one of 'plain', 'lookup'",
    "generate Hi --acceptance rejecting": "'rejecting' is not one of 'coupled'",
    "generate Hi --temperature warm": "'warm' is not a valid float",
    "generate Hi --temperature -1": "temperature must be at least 0",
    "generate Hi --temperature nan": "temperature must be",
    "generate Hi --top-p 1.5": "top_p must be more than 0 and at most 1, not 1.5",
    "generate Hi --logit-bias 5": "'5' is not ID=BIAS",
    "generate Hi --logit-bias a=1": "'a=1' is not ID=BIAS",
    "generate Hi --method lookup --window-size 3": "--window-size does not go with --method lookup",
    "generate Hi --num-draft-tokens 3": "--num-draft-tokens does not go with --method plain",
    "generate Hi --method draft": "--method draft needs --draft",
    "generate Hi --method medusa": "--method medusa needs --heads",
    "generate Hi --draft small": "--draft does not go with --method plain, only with draft",
    "generate Hi --logprobs 2": "--logprobs are reported with --json only",
    "generate Hi --raw --system x": "leave --raw out",
    "generate Hi --stop \udcff": "the character at offset 0 is not valid UTF-8",
    "generate a\udcff": "the character at offset 1 is not valid UTF-8",
    "generate -": "the prompt is empty",
    "chat --n 2": "No such option",
    "chat --top-k -5": "top_k must be a whole number of at least 0",
    "info": "Missing argument 'MODEL'",
}


@pytest.mark.parametrize("args", BAD)
def test_a_bad_request_is_one_line_and_loads_nothing(fake: FakeLLM, args: str) -> None:
    shown = run(*args.split())
    assert (shown.exit_code, shown.stdout) == (2, "")
    [line] = shown.stderr.splitlines()
    assert line.startswith("Error: ")
    assert BAD[args] in line
    assert fake.loads == []


def test_an_empty_prompt_is_refused(fake: FakeLLM) -> None:
    assert run("generate", "").exit_code == 2
    assert run("generate", "-", stdin=b"\n").stderr.startswith("Error: the prompt is empty")
    assert fake.loads == []


def test_invalid_utf8_on_stdin_names_the_offset(fake: FakeLLM) -> None:
    shown = run("generate", "-", stdin=b"abc\xff\n")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("Error: stdin is not valid UTF-8 at byte offset 3:")
    shown = run("chat", stdin=b"abc\nd\xc3\n")
    assert shown.exit_code == 2
    assert shown.stdout == "Rivers flöw\n"
    assert "byte offset 5" in shown.stderr.splitlines()[-1]


def test_without_arguments_the_help_is_shown() -> None:
    shown = run()
    assert shown.exit_code == 2
    assert "generate" in shown.stderr and "Error" not in shown.stderr
    assert run("--version").stdout == f"outpace {outpace.__version__}\n"


def test_an_error_of_the_library_is_one_line(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ModelNotFound("there is no model\nunder 'x': give a folder")

    monkeypatch.setattr(outpace, "load", load)
    shown = run("generate", "Hi")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr == "Error: there is no model under 'x': give a folder\n"
    shown = run("generate", "Hi", "--debug")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("Traceback")
    assert shown.stderr.endswith("\nError: there is no model under 'x': give a folder\n")


def test_an_error_in_mid_stream_is_one_line_and_a_bug_is_not_hidden(fake: FakeLLM) -> None:
    fake.failure = InvalidCheckpoint("broken")
    shown = run("generate", "Hi")
    assert (shown.exit_code, shown.stdout) == (2, "Riv")
    assert shown.stderr.endswith("\nError: broken\n")
    fake.failure = RuntimeError("a bug")
    assert run("generate", "Hi").exception is fake.failure


def test_an_interruption_ends_with_130(fake: FakeLLM) -> None:
    fake.failure = KeyboardInterrupt()
    shown = run("generate", "Hi")
    assert (shown.exit_code, shown.stdout) == (130, "Riv")
    assert shown.stderr.endswith("\nInterrupted\n")


def test_chat_keeps_the_talk(fake: FakeLLM) -> None:
    shown = run(
        "chat", "--system", "S", "--seed", "3", stdin=b"one\n\ntwo\r\n/reset\nthree\n/quit\nx"
    )
    assert shown.exit_code == 0
    assert shown.stdout == "Rivers flöw\n" * 3
    assert ">" not in shown.stderr  # nobody types: nothing is asked for
    system = {"role": "system", "content": "S"}
    one = {"role": "user", "content": "one"}
    answer = {"role": "assistant", "content": "Rivers flöw"}
    two, three = {"role": "user", "content": "two"}, {"role": "user", "content": "three"}
    assert [prompt for prompt, _ in fake.calls] == [
        [system, one],
        [system, one, answer, two],
        [system, three],
    ]
    assert all(arguments == {"seed": 3} for _, arguments in fake.calls)


def test_chat_ends_with_an_error_only_where_nobody_types(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.failure = InvalidRequest("the prompt is too long")
    assert run("chat", stdin=b"one\ntwo\n").exit_code == 2
    assert len(fake.calls) == 1

    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    shown = run("chat", stdin=b"one\ntwo\n")
    assert shown.exit_code == 0
    assert "> Error: the prompt is too long; or start anew with /reset\n" in shown.stderr
    assert [len(prompt) for prompt, _ in fake.calls] == [1, 1, 1]


def test_info_is_readable_by_people_and_by_programs(fake: FakeLLM) -> None:
    assert run("info", "fake").stdout.splitlines() == [
        "model       fake",
        "parameters  1,234,567",
        "memory      weights 2 MiB",
        "gap         0.3333",
    ]
    assert json.loads(run("info", "fake", "--json").stdout) == fake.info()
    assert fake.loads[0]["method"] == "plain"


def test_a_terminal_gets_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with LoadProgress() as progress:
        progress(1, 4, "Converting")
        progress.notice("[a] notice")
        progress(4, 4, "Converting")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Converting" in shown.err and "100%" in shown.err and "[a] notice" in shown.err
    assert "..." not in shown.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 64 tokens, "0" to "o", with room for an answer that takes long."""
    path = tmp_path_factory.mktemp("model")
    build("llama", max_position_embeddings=20_000).save_pretrained(path)
    byte_tokenizer(64).save_pretrained(path)
    return path


def test_every_method_writes_the_same_from_a_folder(folder: Path, tmp_path: Path) -> None:
    args = ["generate", "ABCABC", "--model", str(folder), "--max-new-tokens", "24", "--json"]
    args += ["--temperature", "0.7", "--seed", "5"]
    bodies = {}
    for method in ("plain", "lookup", "lookahead", "combined"):
        bodies[method] = json.loads(run(*args, "--method", method).stdout)
    draft = run(*args, "--method", "draft", "--draft", str(folder))
    bodies["draft"] = json.loads(draft.stdout)
    assert len(bodies["plain"]["tokens"]) == 24
    for method, body in bodies.items():
        assert body["method"] == method
        assert body["tokens"] == bodies["plain"]["tokens"]
        assert body["stats"]["completion_tokens"] == 24
    assert bodies["draft"]["stats"]["accepted"] > 0
    args[-1] = "6"  # the seed decides, or the comparison above says nothing
    assert json.loads(run(*args).stdout)["tokens"] != bodies["plain"]["tokens"]

    shown = run("info", str(folder), "--json")
    assert json.loads(shown.stdout)["vocabulary"] == 64
    assert run("info", str(tmp_path / "absent")).exit_code == 2


def _start(folder: Path) -> subprocess.Popen[str]:
    args = ["generate", "ABC", "--model", str(folder), "--ignore-eos"]
    return subprocess.Popen(
        [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_in_mid_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where this suite runs in the background, Ctrl-C is ignored, and children inherit that.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", [*COMMAND[:2], f"{listen}; {COMMAND[2]}"])
    with _start(folder) as process:
        assert process.stdout is not None
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("\nInterrupted\n")
    assert "Traceback" not in errors


def test_a_closed_pipe_ends_it_quietly(folder: Path) -> None:
    with _start(folder) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(8)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors and "Broken pipe" not in errors


def test_every_option_has_a_help_text() -> None:
    for command in cli.commands.values():
        for param in command.params:
            assert isinstance(param, click.Argument) or param.help, param.name  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("generate hi --max-new-tokens 3 --model FOLDER >/dev/full", "does not fit"),
        ("generate - --model FOLDER <&-", "stdin is closed"),
        ("chat --model FOLDER <&-", "stdin is closed"),
        ("bench --model FOLDER --out OUT --temperature nan", "temperature"),
        ("bench --model FOLDER --out OUT --seed -1", "seed"),
        ("bench --model FOLDER --out OUT --prompts LONG", "context"),
    ],
)
def test_closed_full_or_wrong_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, args: str, message: str
) -> None:
    out, long = tmp_path / "out", tmp_path / "long.txt"
    long.write_text("0" * 100_000)
    for name, path in (("FOLDER", folder), ("OUT", out), ("LONG", long)):
        args = args.replace(name, f"'{path}'")
    command = " ".join(f"'{part}'" for part in COMMAND)
    done = subprocess.run(["sh", "-c", f"{command} {args}"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert message in done.stderr.strip().splitlines()[-1]
    assert not out.exists()
