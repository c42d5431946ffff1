"""Text and token ids: prompts to ids, ids to streamed text, stop strings."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import InvalidCheckpoint, InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outpace.sampling import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 4  # an incomplete UTF-8 sequence spans fewer tokens than this
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A tokenizer of transformers, with one way from prompts to ids and one from ids to text.

    Args:
        inner: loaded; it is not changed.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        from tokenizers.decoders import ByteLevel

        self.inner = inner
        self._backend: Any = getattr(inner, "backend_tokenizer", None)
        self._byte_level = isinstance(getattr(self._backend, "decoder", None), ByteLevel)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model's folder.

        Raises:
            InvalidCheckpoint: when its files are missing or broken.
        """
        try:
            return cls(_loader(folder).from_pretrained(folder, local_files_only=True))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InvalidCheckpoint(
                f"the tokenizer in {folder} cannot be read: {_first_line(error)}"
            ) from error

    @cached_property
    def token_texts(self) -> dict[int, str]:
        """id -> the token's own string in the vocabulary, added tokens included."""
        return {token: text for text, token in self.inner.get_vocab().items()}

    @cached_property
    def size(self) -> int:
        """One more than the largest id; a model's vocabulary may be padded beyond it."""
        return max(self.token_texts, default=-1) + 1

    @property
    def eos_ids(self) -> list[int]:
        """The tokenizer's own end token, if it has one."""
        return [] if self.inner.eos_token_id is None else [int(self.inner.eos_token_id)]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; special tokens that it spells out become these tokens.

        Args:
            text: valid Unicode, else `InvalidRequest` is raised.
            special: whether the tokenizer adds the tokens that open a text (BOS).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = error.object[error.start]
            raise InvalidRequest(f"the text holds the lone surrogate {surrogate!a}") from error
        ids: list[int] = self.inner(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer starts.

        BOS stands exactly once where the tokenizer uses it, whether or not the template writes it.

        Args:
            messages: each with the strings `role` and `content`; other keys go to the template.

        Raises:
            InvalidRequest: when there is no template, or it cannot render the messages.
        """
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise InvalidRequest(
                "the model has no chat template for messages: give the prompt as text, "
                "which is then continued as it stands (--raw)"
            )
        for index, message in enumerate(messages):
            _check_message(index, message)
        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
        ids = self.encode(str(text), special=False)
        bos = self._bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def prompt_ids(
        self, prompt: str | Sequence[Mapping[str, str]] | Sequence[int], *, raw: bool
    ) -> list[int]:
        """The ids of a prompt, the same for the library, the command line and the server.

        Args:
            prompt: text (one user message where there is a chat template, unless `raw`), messages,
                or ids, which are taken as they are.
            raw: text is continued as it stands.

        Raises:
            InvalidRequest: for a prompt that is empty, malformed, or needs a missing template.
        """
        ids: list[int] = []
        if isinstance(prompt, str):
            if not prompt:
                ids = []  # also where the tokenizer would open an empty text with BOS
            elif raw or not self.inner.chat_template:
                ids = self.encode(prompt)
            else:
                ids = self.encode_chat([{"role": "user", "content": prompt}])
        elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise InvalidRequest(f"a prompt is text, messages or ids, not {type(prompt).__name__}")
        elif all(type(token) is int for token in prompt):
            ids = [token for token in prompt if isinstance(token, int)]
        elif not any(isinstance(message, Mapping) for message in prompt):
            raise InvalidRequest("a prompt that is a list holds either messages or integer ids")
        elif raw:
            raise InvalidRequest("messages need the chat template: raw is for text only")
        else:
            ids = self.encode_chat(prompt)  # type: ignore[arg-type]
        if not ids:
            raise InvalidRequest("the prompt is empty: give at least one character or token")
        return ids

    @cached_property
    def _bos(self) -> int | None:
        """The BOS token, if the tokenizer opens a plain text with it."""
        bos: int | None = self.inner.bos_token_id
        opens = bos is not None and self.encode("a")[:1] == [bos]
        return bos if opens and self.encode("a", special=False)[:1] != [bos] else None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, with U+FFFD for bytes that are not UTF-8.

        Special tokens and ids that the tokenizer does not know stand for no text.
        """
        stream = Detokenizer(self)
        return "".join([*(stream.push(token) for token in tokens), stream.flush()])

    def stream(self, params: SamplingParams) -> TextStream:
        """The text of a request's output, token by token."""
        return TextStream(self, params)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text: all that are flagged, named or not."""
        if self._backend is None:
            return frozenset(self.inner.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def spelling(self, token: int) -> bytes | None:
        """The bytes that a known token always stands for; None where neighbours have a say."""
        text = self.token_texts[token]
        if self._byte_level:  # a token with a foreign character is an added one, written plainly
            table = _byte_alphabet()
            return bytes(table[c] for c in text) if table.keys() >= set(text) else text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte and self.join([token]) != text else None

    def join(self, tokens: Sequence[int]) -> str:
        """The decoder's own text of ids, special tokens included."""
        decoder = self.inner if self._backend is None else self._backend
        options = {"clean_up_tokenization_spaces": False} if self._backend is None else {}
        return str(decoder.decode(list(tokens), skip_special_tokens=False, **options))


class Detokenizer:
    """Turns one sequence's ids into text as they come.

    All pieces and `flush()` together are the text of all ids. No piece holds a part of a
    character: bytes that may still become one are held back, at most three of them. Bytes that
    are not UTF-8 become U+FFFD, one for each maximal part of a character, as Unicode recommends.

    Args:
        tokenizer: whose ids are pushed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: list[int] = []  # the token before, which decides on spaces between the two
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if token in self._tokenizer.special_ids or token not in self._tokenizer.token_texts:
            return ""
        spelling = self._tokenizer.spelling(token)
        if spelling is None:
            return self._utf8.decode(b"", final=True) + self._push_whole(token)
        text = self._release()
        if spelling == b" " and not self._last:  # some decoders drop the space that opens a text
            spelling = self._tokenizer.join([token]).encode()
        self._last = [token]
        return text + self._utf8.decode(spelling)

    def flush(self) -> str:
        """What was held back; the sequence ends here."""
        return self._release() + self._utf8.decode(b"", final=True)

    def _push_whole(self, token: int) -> str:
        """The text of a token whose bytes are not known, as the decoder adds it to its context."""
        self._held.append(token)
        if self._text_of_held().endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        return self._release()

    def _release(self) -> str:
        if not self._held:
            return ""
        text = self._text_of_held()
        self._last, self._held = self._held[-1:], []
        return text

    def _text_of_held(self) -> str:
        before = self._tokenizer.join(self._last)
        return self._tokenizer.join(self._last + self._held)[len(before) :]


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    The one that is complete first wins, of several that end together the longest. How the text is
    cut into pieces changes nothing.

    Args:
        stops: non-empty strings.
        include: whether the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str, *, search: bool = True) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string ends it (then nothing follows).

        Args:
            piece: continues the text.
            search: without it, a stop string that ends within this piece is passed over.
        """
        text, new = self._held + piece, len(self._held)
        if search:
            starts = [(text.find(stop, max(new - len(stop) + 1, 0)), stop) for stop in self._stops]
            if hits := [(at + len(stop), at) for at, stop in starts if at >= 0]:
                end, at = min(hits)
                self._held = ""
                return text[: end if self._include else at], True
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The beginning of a stop string that never came to its end."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one request's output: detokenised, cut at the first stop string.

    A stop string counts when a token behind the first `min_tokens` completes it.

    Args:
        tokenizer: whose ids are pushed.
        params: `stop`, `include_stop` and `min_tokens` are read.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stopped = False
        self._tokens = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._unsearched = params.min_tokens

    def push(self, token: int) -> str:
        """The text that is certain now; `stopped` tells whether this token completed a stop."""
        piece = self._tokens.push(token)
        text, self.stopped = self._stops.push(piece, search=self._unsearched <= 0)
        self._unsearched -= 1
        return text

    def flush(self) -> str:
        """What was held back, unless a stop string cut it off."""
        if self.stopped:
            return ""
        text, _ = self._stops.push(self._tokens.flush(), search=False)
        return text + self._stops.flush()


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"message {index} is not a mapping with role and content")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise InvalidRequest(f"message {index} needs the string {key!r}")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` goes on from."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _loader(folder: Path) -> Any:
    """The class that reads the folder; asking AutoTokenizer for it costs more than a second."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        generic = settings.get("tokenizer_class") == "TokenizersBackend"
    except (OSError, ValueError, AttributeError):
        generic = False  # AutoTokenizer knows what else there may be
    if generic:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet: dict[int, str] = bytes_to_unicode()
    return {char: byte for byte, char in alphabet.items()}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
