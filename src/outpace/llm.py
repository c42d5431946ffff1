"""The Python API: a loaded model that generates by a method."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outpace.engine import Engine, Event, Request, TokenLogprob
from outpace.errors import InvalidRequest
from outpace.models import Model, load_model
from outpace.proposers import Method, Target, load_method
from outpace.sampling import SamplingParams, check_int
from outpace.stats import Stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outpace.runtimes.base import Runtime
    from outpace.text import Tokenizer

Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]

MAX_NODES = 16
_SEED_STEP = 0x9E3779B97F4A7C15  # splits one seed into those of several choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion: `tokens` hold the end token that ended it, `text` does not."""

    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob]
    seed: int
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A request's completions and what they cost.

    Args:
        choices: `n` completions; the fields below are the first one's.
        stats: of all choices; prompt tokens are counted once.
    """

    choices: tuple[Choice, ...]
    stats: Stats

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> str:
        """ "stop" (end token or stop string) or "length" (token budget or context)."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return self.choices[0].logprobs

    @property
    def seed(self) -> int:
        return self.choices[0].seed

    @property
    def method(self) -> str:
        return self.stats.method

    @property
    def exact(self) -> bool:
        return self.stats.exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step added to a stream; the last piece carries the whole result."""

    text: str
    tokens: list[int]
    index: int
    finish_reason: str | None = None
    result: Result | None = None

    def __str__(self) -> str:
        return self.text


class LLM:
    """A model with a method; several may share the weights (`with_method`).

    Args:
        model: from `outpace.models.load_model`.
        method: how to propose.
        max_nodes: most nodes of one tree; more cost more a step, see docs/benchmarks.md.
        engine: shared with other LLMs on the same weights; by default a new one.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        *,
        max_nodes: int = MAX_NODES,
        engine: _SharedEngine | None = None,
    ) -> None:
        check_int("max_nodes", max_nodes, 1)
        self.model = model
        self.method = method
        self._engine = engine or _SharedEngine(
            Engine(
                model.runtime,
                tokenizer=model.tokenizer,
                end_ids=model.eos_ids,
                max_nodes=max_nodes,
            )
        )

    @classmethod
    def from_runtime(
        cls,
        runtime: Runtime,
        *,
        method: Method,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        max_nodes: int = MAX_NODES,
    ) -> LLM:
        """An LLM around any runtime."""
        model = Model(
            name=type(runtime).__name__,
            runtime=runtime,
            tokenizer=tokenizer,
            eos_ids=tuple(eos_ids),
            fingerprint="",
        )
        return cls(model, method, max_nodes=max_nodes)

    def with_method(self, method: str | Method, **options: Any) -> LLM:
        """The same weights and cache with another method."""
        return LLM(self.model, _method(self.model, method, options), engine=self._engine)

    def generate(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Result:
        """Generates until an end token, a stop string, the token budget or the context's end.

        Args:
            prompt: text (a user message for chat models, unless `raw`), chat messages, or ids.
            raw: text is continued as it stands, without the chat template.
            sampling: fields of `SamplingParams`.
        """
        return self.generate_batch([prompt], raw=raw, **sampling)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, raw: bool = False, **sampling: Any
    ) -> list[Result]:
        """Generates for several prompts side by side; each result equals its solo run."""
        results = {
            number: piece.result
            for number, piece in self.stream_batch(prompts, raw=raw, **sampling)
            if piece.result is not None
        }
        return [results[number] for number in range(len(prompts))]

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Iterator[Piece]:
        """Like `generate`, piece by piece; closing the iterator stops the work."""
        return _pieces(self.stream_batch([prompt], raw=raw, **sampling))

    def stream_batch(
        self, prompts: Sequence[Prompt], *, raw: bool = False, **sampling: Any
    ) -> Generator[tuple[int, Piece], None, None]:
        """Like `generate_batch`, piece by piece: (number of the prompt, piece) as they come."""
        params = make_params(self.model.tokenizer, sampling)
        if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
            raise InvalidRequest("prompts must be a list of prompts; generate takes a single one")
        runs = []
        for number, prompt in enumerate(prompts):
            ids = prompt_ids(self.model.tokenizer, prompt, raw=raw)
            seed = secrets.randbits(63) if params.seed is None else params.seed
            runs.append(_Run(number, ids, params, seed, self.method))
        return self._engine.run(runs)

    def info(self) -> dict[str, Any]:
        """What is loaded and how it runs."""
        runtime = self.model.runtime
        return {
            "model": self.model.name,
            "method": self.method.name,
            "vocabulary": runtime.vocab_size,
            "context": runtime.max_context,
            "device": str(runtime.device),
            "dtype": str(runtime.dtype).removeprefix("torch."),
            "exactness": runtime.exactness,
            "max_nodes": runtime.max_nodes,
            "memory": {**runtime.memory(), "method": self.method.memory()},
            "fingerprint": self.model.fingerprint,
            **runtime.info(),
        }

    def close(self) -> None:
        """Drops cached texts and running requests, whose streams then raise InvalidRequest.

        Weights go with the last reference.
        """
        self._engine.close()


class _Run:
    """One prompt with its `n` choices on the way."""

    def __init__(
        self, number: int, prompt: list[int], params: SamplingParams, seed: int, method: Method
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.method = method
        self.seeds = [(seed + i * _SEED_STEP) % 2**64 for i in range(params.n)]
        self.events: list[list[Event]] = [[] for _ in self.seeds]
        self.num_open = params.n

    def request(self, index: int, request_id: int) -> Request:
        """What the engine runs for choice `index`."""
        return Request(
            id=request_id,
            prompt=self.prompt,
            params=self.params,
            seed=self.seeds[index],
            method=self.method,
        )

    def add(self, index: int, event: Event) -> Piece:
        """Books an event of choice `index` and gives the piece for the user."""
        self.events[index].append(event)
        self.num_open -= event.finish_reason is not None
        return Piece(
            text=event.text,
            tokens=event.tokens,
            index=index,
            finish_reason=event.finish_reason,
            result=self._result() if self.num_open == 0 else None,
        )

    def _result(self) -> Result:
        choices = []
        for index, (events, seed) in enumerate(zip(self.events, self.seeds, strict=True)):
            last = events[-1]
            choices.append(
                Choice(
                    index=index,
                    text="".join(event.text for event in events),
                    tokens=[token for event in events for token in event.tokens],
                    finish_reason=last.finish_reason or "length",
                    logprobs=[entry for event in events for entry in event.logprobs],
                    seed=seed,
                    stats=last.stats,
                )
            )
        total = choices[0].stats
        if len(choices) > 1:
            total = replace(
                total,
                drafted_by_depth=list(total.drafted_by_depth),
                accepted_by_depth=list(total.accepted_by_depth),
                time_split=dict(total.time_split),
            )
            for choice in choices[1:]:
                total.add(choice.stats)
        return Result(choices=tuple(choices), stats=total)


class _SharedEngine:
    """An engine that several callers may step at once; each receives its own events."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._inbox: dict[int, deque[Event]] = {}
        self._left: deque[int] = deque()  # requests whose streams were closed before their end

    def run(self, runs: Sequence[_Run]) -> Generator[tuple[int, Piece], None, None]:
        """Adds all choices of all runs and yields their pieces until the last one ends.

        Raises:
            InvalidRequest: at once, before anything is added.
        """
        requests = [
            (run, index, run.request(index, next(self._ids)))
            for run in runs
            for index in range(run.num_open)
        ]
        for _, _, request in requests:
            self._engine.check(request)
        return self._run(requests)

    def _run(
        self, requests: Sequence[tuple[_Run, int, Request]]
    ) -> Generator[tuple[int, Piece], None, None]:
        open_runs: dict[int, tuple[_Run, int]] = {}
        try:
            with self._lock:
                for run, index, request in requests:
                    self._inbox[request.id] = deque()
                    open_runs[request.id] = (run, index)
                    self._engine.add(request)
            while open_runs:
                for request_id, event in self._take(list(open_runs)):
                    run, index = open_runs[request_id]
                    if event.finish_reason is not None:
                        del open_runs[request_id]
                        self._inbox.pop(request_id, None)
                    if event.error is not None:
                        raise event.error
                    yield run.number, run.add(index, event)
        finally:
            self._left.extend(open_runs)
            # Never waits: the collector may close a stream while this very thread holds the lock.
            if self._lock.acquire(blocking=False):
                try:
                    self._cancel_left()
                finally:
                    self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._engine.close()
            self._inbox.clear()

    def _take(self, ids: Sequence[int]) -> list[tuple[int, Event]]:
        """The caller's events; steps the engine when there are none yet."""
        with self._lock:
            self._cancel_left()
            if not all(i in self._inbox for i in ids):
                raise InvalidRequest("the LLM was closed while the request ran: send it again")
            if not any(self._inbox[i] for i in ids):
                for event in self._engine.step():
                    if event.request in self._inbox:
                        self._inbox[event.request].append(event)
                self._cancel_left()
            taken = [(i, event) for i in ids for event in self._inbox[i]]
            for i in ids:
                self._inbox[i].clear()
            return taken

    def _cancel_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self._engine.cancel(request_id)
            self._inbox.pop(request_id, None)


def load(
    model: str | Path | PreTrainedModel = "smollm2",
    *,
    tokenizer: Any = None,
    method: str | Method = "plain",
    device: str = "auto",
    dtype: str = "auto",
    exactness: str = "auto",
    runtime: str = "auto",
    cache: str | Path | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    max_nodes: int = MAX_NODES,
    **method_options: Any,
) -> LLM:
    """Loads a model and a method.

    Args:
        model: a name ("smollm2", or owner/name on the hub), a folder, a GGUF file, or a loaded
            causal LM of transformers.
        tokenizer: goes with a loaded model; without one, prompts and results are ids only.
        method: a name in `outpace.proposers.METHODS`, or a Method.
        device: "auto", "cpu", "cuda", "mps".
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16".
        exactness: "same-shape", "ordinary" or "auto"; see `TransformersRuntime`.
        runtime: "native" (int8 on the CPU), "transformers" or "auto"; see `load_model`.
        cache: folder for converted models.
        notice: receives one-line messages.
        progress: receives (done, total, label) while files are converted or read.
        max_nodes: most nodes of one tree; more cost more a step, see docs/benchmarks.md.
        method_options: the method's own; see `outpace.proposers`.

    Raises:
        OutpaceError: one of its subclasses, each naming the cause and what to do.
    """
    loaded = load_model(
        model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        exactness=exactness,
        runtime=runtime,
        cache=cache,
        notice=notice,
        progress=progress,
    )
    return LLM(loaded, _method(loaded, method, method_options), max_nodes=max_nodes)


def _pieces(run: Generator[tuple[int, Piece], None, None]) -> Iterator[Piece]:
    """A run's pieces; closing this closes the run."""
    with closing(run):
        for _, piece in run:
            yield piece


def make_params(tokenizer: Tokenizer | None, sampling: Mapping[str, Any]) -> SamplingParams:
    """Checked sampling parameters; single stop strings and bad words as text are welcome.

    Raises:
        InvalidRequest: for an unknown name or a value out of range.
    """
    names = {f.name for f in fields(SamplingParams)}
    unknown = sorted(set(sampling) - names)
    if unknown:
        raise InvalidRequest(
            f"unknown parameter {unknown[0]!r}; there are: {', '.join(sorted(names))}"
        )
    values = dict(sampling)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if isinstance(values.get("bad_words"), str):
        values["bad_words"] = (values["bad_words"],)
    for name in ("stop", "stop_token_ids", "processors", "bad_words"):
        if name in values:
            values[name] = _as_tuple(values[name])
    if isinstance(values.get("bad_words"), tuple):
        values["bad_words"] = tuple(
            word for entry in values["bad_words"] for word in _bad_word(tokenizer, entry)
        )
    return SamplingParams(**values)


def prompt_ids(tokenizer: Tokenizer | None, prompt: Prompt, *, raw: bool) -> list[int]:
    """The prompt's ids, the same wherever it comes from."""
    if tokenizer is not None:
        return tokenizer.prompt_ids(prompt, raw=raw)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray))
    if not is_list or not all(type(token) is int for token in prompt):
        raise InvalidRequest("a prompt of text needs a tokenizer: pass tokenizer=, or token ids")
    return [token for token in prompt if isinstance(token, int)]


def _as_tuple(value: Any) -> Any:
    """A collection as a tuple, None as an empty one; SamplingParams refuses all else."""
    if value is None:
        return ()
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping)):
        return tuple(value)
    return value


def _bad_word(tokenizer: Tokenizer | None, entry: Any) -> list[Any]:
    """Token sequences of a bad word; text is banned at the start of a word and within one."""
    if not isinstance(entry, str):
        return [_as_tuple(entry)]
    if tokenizer is None:
        raise InvalidRequest("bad_words as text need a tokenizer: give token ids")
    if not entry.strip():
        raise InvalidRequest("bad_words must not be empty or blank")
    spellings = {tuple(tokenizer.encode(text, special=False)) for text in (entry, " " + entry)}
    return sorted(spellings)


def _method(model: Model, method: str | Method, options: Mapping[str, Any]) -> Method:
    if isinstance(method, Method):
        if options:
            raise InvalidRequest(f"options {sorted(options)} go with a method's name only")
        return method
    return load_method(method, _target(model), **options)


def _target(model: Model) -> Target:
    texts = {} if model.tokenizer is None else model.tokenizer.token_texts
    return Target(
        runtime=model.runtime,
        token_texts=texts,
        fingerprint=model.fingerprint,
        cache=model.cache,
    )
