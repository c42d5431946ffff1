"""The audit of completions: one changed token is found at its index, and the end is judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tiny import VOCAB, PlannedRuntime, TableRuntime, serve, shared
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outpace.errors import InvalidRequest, NumericalError
from outpace.llm import LLM
from outpace.verify.audit import CUT, EARLY, LATE, WITH_TARGET, Audit, audit
from outpace.verify.completions import Completion, read_completions
from outpace.verify.ids import IDENTICAL, TIE, WRONG

PROMPT = [5, 6, 7] * 4
END = 15


def check(llm: LLM, tokens: Sequence[int], reason: str | None = None) -> Audit:
    completion = Completion(line=3, prompt=PROMPT, tokens=list(tokens), finish_reason=reason)
    return audit(llm.model, completion)


def planned(*plan: int, runner_up: int = 0) -> LLM:
    runtime = PlannedRuntime(plan, num_prompt=len(PROMPT), vocab_size=16, runner_up=runner_up)
    return serve(runtime, eos_ids=[END, 14])


@pytest.mark.parametrize("at", [0, 1, 31, 32, 39])
def test_one_changed_token_is_found_at_its_index(at: int) -> None:
    llm = serve(shared("llama"))
    tokens = llm.generate(PROMPT, max_new_tokens=40).tokens
    right = check(llm, tokens)
    assert right.verdict in (IDENTICAL, TIE) and right.line == 3 and right.tokens == 40
    changed = [*tokens]
    changed[at] = (tokens[at] + 1) % VOCAB
    found = check(llm, changed)
    assert (found.verdict, found.at) == (WRONG, at)
    assert (found.found, found.expected) == (changed[at], tokens[at])
    assert found.gap is not None and found.gap > 1e-3 and found.ended is None


@pytest.mark.parametrize(("margin", "verdict"), [(0.0, IDENTICAL), (5e-5, TIE), (2e-4, WRONG)])
def test_a_token_within_the_tolerance_is_a_tie(margin: float, verdict: str) -> None:
    table = torch.tensor([-9.0, 0.0, -margin, -5.0]).expand(4, -1).clone()
    llm = serve(TableRuntime(table))
    completion = Completion(line=1, prompt=[1], tokens=[1, 1, 2, 1])
    found = audit(llm.model, completion)
    assert found.verdict == verdict
    assert found.gap == (pytest.approx(margin, rel=1e-3) if margin else None)
    assert found.at == (2 if margin else None)


@pytest.mark.parametrize(
    ("tokens", "reason", "verdict", "ended", "at"),
    [
        ([3, 4, END], "stop", IDENTICAL, WITH_TARGET, None),
        ([3, 4, 14], "stop", IDENTICAL, WITH_TARGET, None),  # any of the end tokens
        ([3, 4], "stop", IDENTICAL, WITH_TARGET, None),  # the engine left it out
        ([3, 4], None, IDENTICAL, WITH_TARGET, None),
        ([3], "length", IDENTICAL, CUT, None),
        ([3], None, IDENTICAL, CUT, None),
        ([3], "stop", WRONG, EARLY, 1),
        ([3, END], "stop", WRONG, None, 1),
        ([3, 4, END, 3], "length", WRONG, LATE, 3),
        ([3, 4, 3], None, WRONG, None, 2),
        ([], "stop", WRONG, EARLY, 0),
        ([], None, IDENTICAL, CUT, None),
    ],
)
def test_the_end_is_judged(
    tokens: list[int], reason: str | None, verdict: str, ended: str | None, at: int | None
) -> None:
    found = check(planned(3, 4, END), tokens, reason)
    assert (found.verdict, found.ended, found.at) == (verdict, ended, at)
    if ended == EARLY:
        assert found.found is None and found.gap is not None and found.gap > 1.0


def test_a_model_without_end_tokens_says_nothing_of_the_end() -> None:
    llm = serve(PlannedRuntime([3, 4], num_prompt=len(PROMPT), vocab_size=16))
    assert check(llm, [3], "stop").ended is None


def text_model(plan: Sequence[int], tokenizer: PreTrainedTokenizerFast, prompt: str = "ab") -> LLM:
    size = max(tokenizer.get_vocab().values()) + 1
    num_prompt = len(tokenizer(prompt)["input_ids"])
    runtime = PlannedRuntime(plan, num_prompt=num_prompt, vocab_size=size, runner_up=size - 1)
    return serve(runtime, tokenizer=tokenizer, eos_ids=[size - 1])


def check_text(llm: LLM, text: str, reason: str | None = None) -> Audit:
    return audit(llm.model, Completion(line=1, prompt="ab", text=text, finish_reason=reason))


def merging_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Bytes, "ab" (256) and an end token (257)."""
    alphabet = bytes_to_unicode()
    vocab = {alphabet[i]: i for i in range(256)} | {"ab": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = settings.get("normalizer")
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


A, B, C, AB, STOP = ord("a"), ord("b"), ord("c"), 256, 257


@pytest.mark.parametrize(
    ("plan", "text", "verdict", "compared", "offset"),
    [
        ([AB, C, STOP], "abc", IDENTICAL, "ids", None),
        ([AB, C, STOP], "abc<end>", IDENTICAL, "ids", None),
        ([AB, C, STOP], "abd", WRONG, "ids", 2),
        ([A, B, C, STOP], "abc", IDENTICAL, "respelt ids", None),  # not how text is tokenised
        ([C, A, B, C, A, B, STOP], "cabcab", IDENTICAL, "respelt ids", None),
        ([A, B, C, STOP], "abd", WRONG, "respelt ids", 2),
        ([C, *"é".encode(), STOP], "cé", IDENTICAL, "ids", None),
        ([C, *"é".encode(), STOP], "cè", WRONG, "ids", 1),
        ([AB, STOP], "abc", WRONG, "ids", 2),
        ([AB, STOP], "ab\ufffd", IDENTICAL, "ids", None),  # a character that a budget cut
    ],
)
def test_text_is_judged_however_the_target_spells_it(
    plan: list[int], text: str, verdict: str, compared: str, offset: int | None
) -> None:
    found = check_text(text_model(plan, merging_tokenizer()), text)
    assert (found.verdict, found.compared) == (verdict, compared)
    assert found.offset == offset
    if plan == [AB, STOP] and verdict == WRONG:
        assert (found.found_text, found.expected_text) == ("c", "<end>")
    assert found.ended == (None if verdict == WRONG else WITH_TARGET)


def test_text_that_does_not_come_back_is_compared_as_text() -> None:
    tokenizer = merging_tokenizer(normalizer=normalizers.Lowercase())
    llm = text_model([ord("X"), ord("Y"), C, STOP], tokenizer)
    right = check_text(llm, "XYc", "stop")
    assert (right.verdict, right.compared, right.ended) == (IDENTICAL, "text", WITH_TARGET)
    wrong = check_text(llm, "XZc")
    assert (wrong.verdict, wrong.compared, wrong.offset) == (WRONG, "text", 1)
    assert (wrong.at, wrong.expected, wrong.expected_text) == (1, ord("Y"), "Y")
    assert check_text(llm, "X", "stop").ended == EARLY
    assert check_text(llm, "XYcZ").verdict == WRONG  # the target ends before


def test_prompts_and_ids_that_cannot_be_are_named_with_their_line() -> None:
    llm = planned(3, END)
    with pytest.raises(InvalidRequest, match="line 3: id 16 is outside"):
        check(llm, [16])
    with pytest.raises(InvalidRequest, match="line 3: prompt and completion have 312 tokens"):
        check(llm, [3] * 300)
    with pytest.raises(InvalidRequest, match="line 3: a text needs the model's tokenizer"):
        audit(llm.model, Completion(line=3, prompt=PROMPT, text="a"))
    broken = serve(TableRuntime(torch.full((16, 16), torch.nan)))
    with pytest.raises(NumericalError, match="after 0 tokens of line 3 are nan"):
        check(broken, [3])


def write(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries))
    return path


def test_completions_are_read_from_json_lines(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi\u2028there"}]
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "a", "text": "b", "engine": "other"},
        "",
        {"messages": messages, "tokens": [1, 2], "finish_reason": "length"},
        {"prompt": [1, 2], "text": "", "messages": None},
    )
    assert read_completions(file) == [
        Completion(line=1, prompt="a", text="b"),
        Completion(line=3, prompt=messages, tokens=[1, 2], finish_reason="length"),
        Completion(line=4, prompt=[1, 2], text=""),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ([1], "line 2: a completion is a JSON object"),
        ({"text": "a"}, "line 2: give either prompt or messages"),
        ({"prompt": "a", "messages": [], "text": "a"}, "give either prompt or messages"),
        ({"prompt": "a"}, "give either text or tokens"),
        ({"prompt": "a", "text": 3}, "text must be a string"),
        ({"prompt": "a", "tokens": [1, "2"]}, "tokens must be a list of token ids"),
        ({"prompt": "a", "tokens": [True]}, "tokens must be a list of token ids"),
        ({"prompt": "a", "tokens": [-1]}, "tokens must be a list of token ids"),
        ({"prompt": "a", "text": "a", "finish_reason": "eos"}, "finish_reason must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "text": "b"}, entry)
    with pytest.raises(InvalidRequest, match=message):
        read_completions(file)


def test_files_without_completions_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("empty", b"\n", "holds no completions"),
        ("bytes", b"\xff", "cannot be read as UTF-8"),
        ("absent", None, "cannot be read"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidRequest, match=message):
            read_completions(tmp_path / name)
