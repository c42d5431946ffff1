"""What `make demo` shows, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import byte_tokenizer, serve, shared

import outpace
from outpace import demo
from outpace.llm import LLM


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A random Llama in the embedded model's place, and prompts that its tokenizer knows."""
    llm = serve(shared("llama"), tokenizer=byte_tokenizer(64))

    def load(**arguments: Any) -> LLM:
        assert arguments["cache"] is None
        return llm

    monkeypatch.delenv("OUTPACE_CACHE", raising=False)
    monkeypatch.setattr(outpace, "load", load, raising=False)
    monkeypatch.setattr(demo, "PROMPTS", {"copying": "ABCABCAB", "writing": "[bold]"})
    monkeypatch.setattr(demo, "WARM_UP", "ABC")
    return llm


def test_every_method_is_shown_and_compared(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    shown = capsys.readouterr().out
    for prompt in demo.PROMPTS.values():
        assert prompt in shown
        assert shown.count(llm.generate(prompt, max_new_tokens=96).text[:40]) >= 4
    rows = [line.split() for line in shown.splitlines() if line.count("│") == 6]
    assert [row[1] for row in rows] == list(demo.METHODS)
    assert [row[-2] for row in rows] == ["yes"] * 4
    assert rows[0][5] == "1.00"
    assert "greedy, ordinary forwards, 2 prompts, at most 96 tokens" in " ".join(shown.split())


def test_a_difference_is_named(llm: LLM) -> None:
    plain = [llm.generate(prompt, max_new_tokens=8) for prompt in demo.PROMPTS.values()]
    other = llm.generate("ABC", max_new_tokens=8, logit_bias={plain[1].tokens[0]: -100})
    assert demo._difference(plain, plain) == "yes"
    assert demo._difference(plain, [plain[0], other]) == "no: writing differs from token 1 on"
    short = llm.generate(demo.PROMPTS["copying"], max_new_tokens=5)
    assert demo._difference(plain, [short, plain[1]]) == "no: copying differs from token 6 on"
