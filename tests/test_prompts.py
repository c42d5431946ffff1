"""Prompt files: the layouts in use, an even spread, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.errors import InvalidRequest
from outpace.prompts import OWN, Prompt, own_prompts, read_prompts


def written(tmp_path: Path, *entries: Any, name: str = "p.jsonl") -> Path:
    path = tmp_path / name
    lines = [e if isinstance(e, str) else json.dumps(e) for e in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_every_layout(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "c"}]
    path = written(
        tmp_path,
        {"question_id": 1, "category": "math", "turns": ["a", "later"]},
        "",
        {"prompt": "b"},
        {"messages": messages, "category": "chat"},
    )
    assert read_prompts(path) == [
        Prompt(category="math", content="a"),
        Prompt(category="all", content="b"),
        Prompt(category="chat", content=messages),
    ]
    text = written(tmp_path, "one", "", '{"prompt": "two"}', name="p.txt")
    assert [p.content for p in read_prompts(text)] == ["one", '{"prompt": "two"}']


@pytest.mark.parametrize("end", ["\u2028", "\x85", "\x0c"])
def test_only_a_newline_ends_a_line(tmp_path: Path, end: str) -> None:
    line = json.dumps({"prompt": f"a{end}b"}, ensure_ascii=False).replace("\\f", "\\u000c")
    path = written(tmp_path, line, {"prompt": "c"})
    assert [p.content for p in read_prompts(path)] == [f"a{end}b", "c"]


def test_a_limit_is_spread_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, *({"prompt": str(i), "category": str(i // 4)} for i in range(12)))
    assert [p.content for p in read_prompts(path, limit=3)] == ["0", "4", "8"]
    assert len({p.category for p in read_prompts(path, limit=3)}) == 3
    assert len(read_prompts(path, limit=100)) == 12


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is no JSON object"),
        ("{}", "line 2 needs one of"),
        ({"prompt": "a", "turns": ["b"]}, "line 2 needs one of"),
        ({"prompt": ""}, "line 2 has an empty or malformed prompt"),
        ({"prompt": 5}, "malformed prompt"),
        ({"turns": []}, "malformed turns"),
        ({"messages": "hi"}, "malformed messages"),
        ({"messages": [{"role": "user", "content": "a"}, 5]}, "malformed messages"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(path)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.jsonl cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InvalidRequest, match="holds no prompt"):
        read_prompts(written(tmp_path, "", "  "))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_prompts(tmp_path / "b.txt")


def test_own_prompts_are_of_several_kinds() -> None:
    assert len(own_prompts(100)) == len(OWN) == 12
    assert len({prompt.category for prompt in own_prompts(12)}) > 8
    assert len(own_prompts(2)) == 2
