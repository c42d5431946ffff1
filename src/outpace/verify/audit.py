"""Audit of a completion: is each token the target's own greedy choice, and the end its end?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from outpace.errors import InvalidRequest, NumericalError
from outpace.llm import LLM, prompt_ids
from outpace.proposers.plain import Plain
from outpace.text import Detokenizer
from outpace.verify.ids import IDENTICAL, TIE, WRONG, first_difference, rounding_of
from outpace.verify.teacher import forced_logits, logits_after

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.models import Model
    from outpace.verify.completions import Completion

# Where a text ended, beside where the target would have.
WITH_TARGET, EARLY, CUT, LATE = "with the target", "early", "cut", "late"

_WIDTH = 32  # tokens of one forward; what they round differently is within the tolerance
_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what a budget leaves of the last one
_MAX_SPELLING = 4  # tokens that may share one character


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the target says of a completion.

    Args:
        line: of the completion.
        verdict: "identical" where every token is the argmax, "numerical tie" where every one is
            within the tolerance, else "wrong".
        compared: "ids"; "respelt ids" where the target spells the text by other tokens than the
            tokenizer does; "text" where the tokenizer does not give the text back.
        tokens: how many the completion has, an end token included.
        ended: "with the target"; "early" where the model is said to have ended and goes on here;
            "cut" where the target goes on too, but a budget or nobody knows what ended the text;
            "late" where it goes on behind its end token; None behind a wrong token.
        at: index of the first wrong token, else of the one with the largest gap.
        offset: the character at which the text of token `at` begins; None without a tokenizer.
        gap: how far that token's logit lies below the best one's; compared as text, by how much
            the target's token leads all others.
        found: that token; None where the text ended, or is compared as text.
        expected: the target's own token there.
        found_text, expected_text: their texts; None without a tokenizer.
    """

    line: int
    verdict: str
    compared: str
    tokens: int
    ended: str | None = None
    at: int | None = None
    offset: int | None = None
    gap: float | None = None
    found: int | None = None
    expected: int | None = None
    found_text: str | None = None
    expected_text: str | None = None


def audit(model: Model, completion: Completion, *, raw: bool = False) -> Audit:
    """Judges one greedy completion by teacher forcing.

    Args:
        model: the target.
        completion: what is judged.
        raw: a prompt of text was continued as it stands, without the chat template.

    Raises:
        InvalidRequest: naming the line, for ids that do not exist or a text that does not fit.
    """
    try:
        prompt = prompt_ids(model.tokenizer, completion.prompt, raw=raw)
        return _Auditor(model, completion, prompt).audit()
    except InvalidRequest as error:
        raise InvalidRequest(f"line {completion.line}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miss:
    """A token that is not the argmax; fields as in `Audit`."""

    at: int | None = None
    gap: float | None = None
    found: int | None = None
    expected: int | None = None


@dataclass(slots=True)
class _Auditor:
    """One completion beside the target; `tail` is an end token that its text spells out."""

    model: Model
    completion: Completion
    prompt: list[int]
    tail: list[int] = field(default_factory=list)

    def audit(self) -> Audit:
        if self.completion.text is None:
            return self._judge(self.completion.tokens or [], "ids")
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise InvalidRequest("a text needs the model's tokenizer: give tokens")
        text = self.completion.text.rstrip(_CUT_CHARACTER)
        for end in self.model.eos_ids:
            spelling = tokenizer.token_texts.get(end)
            if spelling and text.endswith(spelling):
                text, self.tail = text.removesuffix(spelling), [end]
                break
        tokens = tokenizer.encode(text, special=False) if text else []
        if tokenizer.decode(tokens) != text:
            return self._judge_text(text)
        done = self._judge([*tokens, *self.tail], "ids")
        while done.verdict == WRONG and done.ended is None and done.at is not None:
            if done.at >= len(tokens):  # the tail
                break
            respelt = self._respell(tokens[: done.at], done.expected, text)
            if respelt is None:
                break
            before, tokens = done.at, respelt
            done = self._judge([*tokens, *self.tail], "respelt ids")
            if done.at is not None and done.at <= before:
                break
        return done

    def _judge(self, tokens: Sequence[int], compared: str) -> Audit:
        """Judges ids up to the first wrong one, and the end if they are right."""
        self._check(tokens)
        ends, tolerance = self.model.eos_ids, self._tolerance
        worst, ended, verdict = _Miss(), None, IDENTICAL
        rows = forced_logits(self.model.runtime, self.prompt, tokens, width=_WIDTH)
        for i, row in enumerate(rows):
            token = tokens[i] if i < len(tokens) else None
            if i > 0 and tokens[i - 1] in ends:
                ended = WITH_TARGET if token is None else LATE
                if ended == LATE:
                    worst, verdict = _Miss(at=i, found=token), WRONG
                break
            if token is None and not ends:
                break
            miss = self._miss(row, i, token)
            assert miss.gap is not None
            if token is None:
                stopped = self.completion.finish_reason == "stop"
                ended = WITH_TARGET if miss.gap <= tolerance else EARLY if stopped else CUT
                if ended == CUT:
                    break
            if miss.gap > (worst.gap or 0.0):
                worst, verdict = miss, TIE if miss.gap <= tolerance else WRONG
            if verdict == WRONG:
                break
        return self._audit(tokens, worst, verdict=verdict, compared=compared, ended=ended)

    def _judge_text(self, text: str) -> Audit:
        """Compares with the text that the target itself writes; ids that nobody knows are not."""
        llm = LLM(self.model, Plain())
        own, shown = [], ""
        for piece in llm.stream(self.prompt):
            own += piece.tokens
            shown += piece.text
            if len(shown) >= len(text) or not text.startswith(shown):
                break
        llm.close()
        if shown == text:
            own = [token for token in own if token not in self.model.eos_ids]
            return self._judge([*own, *self.tail], "text")
        row = logits_after(self.model.runtime, self.prompt, own[:-1])
        best = torch.topk(row.float(), 2).values
        lead = float(best[0] - best[1])
        miss = _Miss(at=len(own) - 1, gap=lead, expected=own[-1])
        verdict = TIE if lead <= self._tolerance else WRONG
        done = self._audit(own[:-1], miss, verdict=verdict, compared="text", ended=None)
        return replace(done, offset=first_difference(shown, text))

    def _respell(self, tokens: list[int], expected: int | None, text: str) -> list[int] | None:
        """Ids of the text that go on with the target's own token; None where it has another text.

        Where that token ends within a character, the target's next ones are taken too.

        Args:
            tokens: the ids that are right.
            expected: the target's token behind them.
            text: the whole text.
        """
        tokenizer = self.model.tokenizer
        assert tokenizer is not None and expected is not None
        tokens = [*tokens, expected]
        for _ in range(_MAX_SPELLING):
            stream = Detokenizer(tokenizer)
            shown = "".join(stream.push(token) for token in tokens)
            if tokens[-1] in tokenizer.special_ids or not text.startswith(shown):
                return None
            if not stream.flush():
                rest = text[len(shown) :]
                tokens += tokenizer.encode(rest, special=False) if rest else []
                return tokens if tokenizer.decode(tokens) == text else None
            row = logits_after(self.model.runtime, self.prompt, tokens)
            tokens.append(int(row.float().argmax()))
        return None

    @property
    def _tolerance(self) -> float:
        return rounding_of(self.model.runtime)

    def _check(self, tokens: Sequence[int]) -> None:
        runtime = self.model.runtime
        for token in [*self.prompt, *tokens]:
            if token >= runtime.vocab_size:
                raise InvalidRequest(
                    f"id {token} is outside the vocabulary of {runtime.vocab_size}"
                )
        size = len(self.prompt) + len(tokens)
        if size > runtime.max_context:
            raise InvalidRequest(
                f"prompt and completion have {size} tokens, the context {runtime.max_context}"
            )

    def _miss(self, logits: Tensor, at: int, token: int | None) -> _Miss:
        """By how much a token, or the best end token where there is none, is not the argmax."""
        scores = logits.float()
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise NumericalError(
                f"the target's logits after {at} tokens of line {self.completion.line} are "
                f"{float(scores[best])}: load the model with dtype bfloat16 or float32"
            )
        ends = list(self.model.eos_ids)
        wanted = ends if token is None or token in ends else [token]  # any end is as good
        gap = float(scores[best] - scores[wanted].max())
        return _Miss(at=at, gap=gap, found=token, expected=best)

    def _audit(
        self, tokens: Sequence[int], miss: _Miss, *, verdict: str, compared: str, ended: str | None
    ) -> Audit:
        tokenizer = self.model.tokenizer
        place: dict[str, int | str | None] = {}
        if tokenizer is not None and miss.at is not None:
            stream = Detokenizer(tokenizer)  # whole characters only
            place["offset"] = sum(len(stream.push(token)) for token in tokens[: miss.at])
            for name, token in (("found_text", miss.found), ("expected_text", miss.expected)):
                if token is not None:
                    place[name] = tokenizer.decode([token]) or tokenizer.token_texts.get(token)
        return Audit(
            line=self.completion.line,
            verdict=verdict,
            compared=compared,
            tokens=len(tokens),
            ended=ended,
            **asdict(miss),
            **place,  # type: ignore[arg-type]
        )
