"""Text to ids and back: prompts and chat templates, streaming detokeniser, stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import InvalidCheckpoint, InvalidRequest

if TYPE_CHECKING:
    from outpace.sampling import SamplingParams

REPLACEMENT = "\ufffd"
MAX_HELD = 3  # an incomplete UTF-8 sequence is at most three bytes, and a token at least one
MAX_WINDOW = 16


class Tokenizer:
    """A tokenizer of transformers with the prompt rules of outpace.

    Args:
        inner: a loaded tokenizer.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._token_texts: dict[int, str] | None = None
        self._special = set(inner.all_special_ids)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer of a model folder.

        Raises:
            InvalidCheckpoint: when its files are missing or broken.
        """
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(folder))
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidCheckpoint(f"no usable tokenizer in {folder}: {reason}") from error

    @property
    def token_texts(self) -> dict[int, str]:
        """Token id -> its own string in the vocabulary."""
        if self._token_texts is None:
            self._token_texts = {i: text for text, i in self.inner.get_vocab().items()}
        return self._token_texts

    @property
    def size(self) -> int:
        """One more than the largest id that has a text."""
        return max(self.token_texts) + 1

    @property
    def eos_ids(self) -> list[int]:
        """The tokenizer's own end token, if it has one."""
        return [] if self.inner.eos_token_id is None else [int(self.inner.eos_token_id)]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of text as it stands; with `special` the tokenizer's own BOS rule applies."""
        return list(self.inner.encode(text, add_special_tokens=special))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids without special tokens; ids beyond the vocabulary give nothing."""
        known = [t for t in tokens if t in self.token_texts and t not in self._special]
        text: str = self.inner.decode(
            known, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation by the chat template, ready for the assistant's answer.

        Raises:
            InvalidRequest: for malformed messages, or when the model has no chat template.
        """
        if not self.inner.chat_template:
            raise InvalidRequest(
                "the model has no chat template, so it takes no messages: pass text, with raw "
                "(--raw) to continue it as it stands"
            )
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise InvalidRequest(f"a message needs role and content, not {message!r}")
            if not isinstance(message["role"], str) or not isinstance(message["content"], str):
                raise InvalidRequest(f"role and content of a message must be text: {message!r}")
        from jinja2 import TemplateError

        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        ids = self.encode(text, special=False)
        bos = self.inner.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def prompt_ids(
        self, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int], *, raw: bool
    ) -> list[int]:
        """The ids of a prompt, the same for library, command line and server.

        Text is one user message where the model has a chat template and `raw` is off; a list is
        chat messages or ids.

        Raises:
            InvalidRequest: for an empty or malformed prompt.
        """
        if isinstance(prompt, str):
            chat = not raw and bool(self.inner.chat_template)
            ids = (
                self.encode_chat([{"role": "user", "content": prompt}])
                if chat and prompt
                else self.encode(prompt)
            )
        elif prompt and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            ids = [int(t) for t in prompt]  # type: ignore[call-overload]
        elif prompt:
            ids = self.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = []
        if not ids:
            raise InvalidRequest("the prompt is empty: give at least one token")
        return ids

    def stream(self, params: SamplingParams) -> TextStream:
        """The text of one completion as it grows, with its stop strings."""
        return TextStream(self, params)


class Detokenizer:
    """Turns ids into text one by one, and never emits half a character.

    Each push decodes the ids since the last but one clean border, so that a tokenizer's rule for
    the first space of a text does not strike in the middle of it.

    Args:
        tokenizer: decodes the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._emitted = ""  # of the text of context and pending, what was given out

    def push(self, token: int) -> str:
        """Appends an id and gives the text that no later id can change."""
        self._pending.append(token)
        text = self._tokenizer.decode([*self._context, *self._pending])
        if text.endswith(REPLACEMENT):
            if len(self._pending) <= MAX_HELD:
                return ""
            if len(self._pending) < MAX_WINDOW:  # only the last character may still be completed
                return self._emit(text[:-1])
        piece = self._emit(text)
        self._context, self._pending = self._pending, []
        self._emitted = self._tokenizer.decode(self._context)
        return piece

    def flush(self) -> str:
        """What is held back; bytes that are no character become U+FFFD."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode([*self._context, *self._pending])
        piece = self._emit(text)
        self._pending = []
        return piece

    def _emit(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        self._emitted = max(self._emitted, text, key=len)
        return piece


class StopStrings:
    """Finds the earliest of several strings in text that comes in pieces.

    Args:
        strings: what to look for; none finds nothing.
        include: leave the string that was found in the text.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = strings
        self._include = include
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a string was found (then nothing follows)."""
        text = self._held + piece
        hits = [(at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if hits:
            at, found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[: at + len(found) if self._include else at], True
        held = max((_overlap(text, s) for s in self._strings), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back as a possible beginning."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """One completion's text: detokenised, cut at stop strings, which wait for `min_tokens`."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._num_free = params.min_tokens - 1 if params.stop else 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain; sets `stopped` when it completes a stop."""
        piece = self._detokenizer.push(token)
        if self._num_free > 0:
            self._num_free -= 1
            return piece
        text, self.stopped = self._stops.push(piece)
        return text

    def flush(self) -> str:
        """The rest of the text; nothing behind a stop string."""
        if self.stopped:
            return ""
        text, self.stopped = self._stops.push(self._detokenizer.flush())
        return text if self.stopped else text + self._stops.flush()


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
