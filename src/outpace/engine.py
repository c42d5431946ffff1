"""The loop: schedule, propose, forward, accept, keep; and the only place that ends a text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outpace.accept import Accepted, accept
from outpace.errors import InvalidRequest
from outpace.proposers.base import Outcome, Step
from outpace.runtimes.base import Output, Pass
from outpace.sampling import Sampler, SamplingParams
from outpace.stats import Stats
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.proposers.base import Method, Proposer
    from outpace.runtimes.base import Runtime
    from outpace.text import TextStream, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to produce.

    Args:
        id: chosen by the caller, unique among the running requests.
        prompt: token ids, at least one.
        params: its sampling; `n` is the caller's business.
        seed: keys all its randomness.
        method: what proposes.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    method: Method


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities under the raw model distribution: the token's and the likeliest ones'."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one step added to a request; `finish_reason` ("stop", "length") on its last one.

    A request that failed ends with `error` and the reason "error"; the others go on.
    """

    request: int
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stats: Stats
    error: Exception | None = None


@dataclass(slots=True, kw_only=True)
class _Running:
    request: Request
    sequence: int
    sampler: Sampler
    proposer: Proposer
    text: TextStream | None
    end_ids: frozenset[int]
    budget: int
    stats: Stats
    added: float
    clock: float = 0.0
    ended: str | None = None

    def lap(self, phase: str | None) -> None:
        """Books the time since the last lap under a phase; None books it nowhere."""
        now = time.perf_counter()
        if phase is not None:
            self.stats.time_split[phase] += now - self.clock
        self.clock = now

    @property
    def num_left(self) -> int:
        return self.budget - self.stats.completion_tokens


class Engine:
    """Runs requests side by side on one runtime; they join and leave between steps.

    Args:
        runtime: the target.
        tokenizer: turns ids into text; without it events carry ids only, and stop strings are
            refused.
        end_ids: the model's own end tokens.
        max_batch: most sequences in one forward.
        max_nodes: most nodes of one sequence's tree.
        max_idle: finished sequences whose cache is kept for prompts with the same beginning.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        max_batch: int = 32,
        max_nodes: int = 64,
        max_idle: int = 1,
    ) -> None:
        self.runtime = runtime
        self.tokenizer = tokenizer
        # A tokenizer's end token may lie beyond the model's vocabulary, a config may say -1.
        self.end_ids = tuple(t for t in end_ids if 0 <= t < runtime.vocab_size)
        self.max_batch = max_batch
        self.max_nodes = min(max_nodes, runtime.max_nodes)
        self.max_idle = max_idle
        self._waiting: deque[tuple[Request, float]] = deque()
        self._running: list[_Running] = []
        self._idle: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether any request still waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: when it can never run; nothing is computed then.
        """
        self.check(request)
        self._waiting.append((request, time.perf_counter()))

    def check(self, request: Request) -> None:
        """Refuses a request that can never run.

        Raises:
            InvalidRequest: naming what is wrong with it.
        """
        size = len(request.prompt)
        if size == 0:
            raise InvalidRequest("the prompt is empty: give at least one token")
        bad = [t for t in request.prompt if not 0 <= t < self.runtime.vocab_size]
        if bad:
            raise InvalidRequest(
                f"prompt id {bad[0]} is outside the vocabulary of {self.runtime.vocab_size}"
            )
        if size > self.runtime.max_context:
            raise InvalidRequest(
                f"the prompt has {size} tokens, the model's context is {self.runtime.max_context}:"
                " shorten the prompt"
            )
        request.params.check_vocabulary(self.runtime.vocab_size)
        if request.params.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer: load one, or use stop_token_ids")

    def cancel(self, request_id: int) -> None:
        """Drops a request; it costs nothing from the next step on. Unknown ids are ignored."""
        self._waiting = deque(w for w in self._waiting if w[0].id != request_id)
        for running in [r for r in self._running if r.request.id == request_id]:
            self._release(running)

    def close(self) -> None:
        """Drops all requests and frees every sequence."""
        self._waiting.clear()
        for running in list(self._running):
            self._release(running)
        for sequence in self._idle:
            self.runtime.close(sequence)
        self._idle.clear()

    def step(self) -> list[Event]:
        """One forward over all decoding requests, after at most one chunk of prefill."""
        events = self._admit()
        self._prefill()
        batch = [r for r in self._running if self._uncached(r) == 1][: self.max_batch]
        if not batch:
            return events
        trees: list[tuple[_Running, Tree]] = []
        for running in batch:
            running.lap(None)
            try:
                trees.append((running, self._propose(running)))
            except Exception as error:  # a draft or a user's code: ends its own request only
                events.append(self._end(running, error))
        if not trees:
            return events
        outputs = self.runtime.forward(
            [Pass(sequence=running.sequence, tree=tree, rows=tree.rows) for running, tree in trees]
        )
        for running, _ in trees:
            running.lap("forward")
        for (running, tree), output in zip(trees, outputs, strict=True):
            try:
                events.append(self._accept(running, tree, output))
            except Exception as error:  # overflowing logits, or a user's processor
                events.append(self._end(running, error))
        return events

    # Schedule

    def _admit(self) -> list[Event]:
        """Starts waiting requests while there is room; those that cannot run end at once."""
        events = []
        while self._waiting and len(self._running) < self.max_batch:
            request, added = self._waiting.popleft()
            stats = Stats(
                method=request.method.name,
                exact=request.params.exact,
                exactness=self.runtime.exactness,
                prompt_tokens=len(request.prompt),
            )
            limit = request.params.max_new_tokens
            room = self.runtime.max_context - len(request.prompt)
            budget = room if limit is None else min(room, limit)
            if budget == 0:
                events.append(_last_event(request, stats, added, "length"))
                continue
            try:
                self._running.append(self._start(request, stats, added=added, budget=budget))
            except Exception as error:  # a method that cannot start ends its own request only
                events.append(_last_event(request, stats, added, "error", error))
        return events

    def _end(self, running: _Running, error: Exception) -> Event:
        """Releases a request that failed."""
        self._release(running)
        return _last_event(running.request, running.stats, running.added, "error", error)

    def _start(self, request: Request, stats: Stats, *, added: float, budget: int) -> _Running:
        params, prompt = request.params, list(request.prompt)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self.end_ids)
        sampler = Sampler(
            params,
            prompt=prompt,
            seed=request.seed,
            vocab_size=self.runtime.vocab_size,
            end_ids=sorted(stop_ids),
            device=self.runtime.device,
        )
        text = None if self.tokenizer is None else self.tokenizer.stream(params)
        proposer = request.method.start()
        sequence, stats.reused_tokens = self._open(prompt[:-1])  # last: nothing fails after it
        return _Running(
            request=request,
            sequence=sequence,
            sampler=sampler,
            proposer=proposer,
            text=text,
            end_ids=frozenset(stop_ids),
            budget=budget,
            stats=stats,
            added=added,
        )

    def _open(self, tokens: list[int]) -> tuple[int, int]:
        """A sequence for a prompt: an idle one that shares its beginning, else a new one."""
        if not self._idle:
            return self.runtime.open(), 0
        shared = {s: _num_shared(self.runtime.tokens(s), tokens) for s in self._idle}
        sequence = max(self._idle, key=lambda s: shared[s])
        if shared[sequence] == 0 and len(self._idle) < self.max_idle:
            return self.runtime.open(), 0
        self._idle.remove(sequence)
        return sequence, self.runtime.rewind(sequence, tokens)

    def _release(self, running: _Running) -> None:
        if running in self._running:
            self._running.remove(running)
        running.proposer.close()
        self._idle.append(running.sequence)
        while len(self._idle) > self.max_idle:
            self.runtime.close(self._idle.pop(0))

    def _uncached(self, running: _Running) -> int:
        """Tokens of the text that are not cached; 1, the root, when it is ready to decode."""
        return len(running.sampler.tokens) - len(self.runtime.tokens(running.sequence))

    def _prefill(self) -> None:
        """Runs one chunk of the first prompt that is not cached yet."""
        running = next((r for r in self._running if self._uncached(r) > 1), None)
        if running is None:
            return
        running.lap(None)
        tree = self.runtime.next_chunk(running.sequence, running.sampler.tokens[:-1])
        output = self.runtime.forward([Pass(sequence=running.sequence, tree=tree, rows=[])])[0]
        path = range(len(tree))
        self.runtime.keep(running.sequence, path)
        running.lap("forward")
        running.proposer.observe(Outcome(tree=tree, path=path, tokens=[], output=output))
        running.lap("propose")

    # One request's share of a step

    def _propose(self, running: _Running) -> Tree:
        depth = min(running.num_left - 1, self.runtime.max_depth(running.sequence))
        step = Step(
            tokens=running.sampler.tokens,
            max_nodes=self.max_nodes,
            max_depth=depth,
            sampler=running.sampler,
            branches=self.runtime.branches,
        )
        tree = self.runtime.fit(running.sequence, running.proposer.propose(step))
        if tree.tokens[0] != step.tokens[-1] or max(tree.depths[: tree.num_candidates]) > depth:
            raise ValueError(f"{running.request.method.name} proposed a tree that does not fit")
        running.lap("propose")
        return tree

    def _accept(self, running: _Running, tree: Tree, output: Output) -> Event:
        running.lap("other")
        accepted = accept(tree, output.logits, running.sampler)
        running.lap("accept")
        tokens = [*(tree.tokens[i] for i in accepted.path[1:]), accepted.token]
        tokens, text = self._cut(running, tokens)
        logprobs = self._logprobs(running, accepted, tokens, output)
        path = accepted.path[: len(tokens)]
        self.runtime.keep(running.sequence, path)
        running.sampler.commit(tokens)
        stats = running.stats
        stats.count_step(tree, accepted.path, len(tokens))
        stats.seconds = time.perf_counter() - running.added
        if stats.first_token_seconds is None:
            stats.first_token_seconds, stats.first_tokens = stats.seconds, len(tokens)
        running.lap("other")
        if running.ended is None:
            running.proposer.observe(Outcome(tree=tree, path=path, tokens=tokens, output=output))
            running.lap("propose")
        else:
            self._release(running)
        return Event(
            request=running.request.id,
            tokens=tokens,
            text=text,
            logprobs=logprobs,
            finish_reason=running.ended,
            stats=stats,
        )

    def _cut(self, running: _Running, tokens: list[int]) -> tuple[list[int], str]:
        """The tokens up to the one that ends the text, if one does, and their text."""
        stream, pieces, emitted = running.text, [], running.stats.completion_tokens
        for i, token in enumerate(tokens):
            emitted += 1
            if token in running.end_ids:
                running.ended = "stop"
            elif stream is not None:
                pieces.append(stream.push(token))
                if stream.stopped:
                    running.ended = "stop"
            if running.ended is None and emitted >= running.budget:
                running.ended = "length"
            if running.ended is not None:
                tokens = tokens[: i + 1]
                break
        if running.ended is not None and stream is not None:
            pieces.append(stream.flush())
        return tokens, "".join(pieces)

    def _logprobs(
        self, running: _Running, accepted: Accepted, tokens: Sequence[int], output: Output
    ) -> list[TokenLogprob]:
        """One entry a delivered token, from the raw logits of the node that it follows."""
        count = running.request.params.logprobs
        if count is None:
            return []
        entries = []
        for node, token in zip(accepted.path, tokens, strict=False):
            row = torch.log_softmax(output.logits[node].float(), dim=-1)
            top = torch.topk(row, min(count, row.numel())) if count else None
            best = (
                [] if top is None else zip(top.indices.tolist(), top.values.tolist(), strict=True)
            )
            entries.append(TokenLogprob(token, float(row[token]), list(best)))
        return entries


def _last_event(
    request: Request, stats: Stats, added: float, reason: str, error: Exception | None = None
) -> Event:
    """The event of a request that ends without another token."""
    stats.seconds = time.perf_counter() - added
    return Event(
        request=request.id,
        tokens=[],
        text="",
        logprobs=[],
        finish_reason=reason,
        stats=stats,
        error=error,
    )


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
