"""A journal loses nothing that it took, whatever moment it is cut at."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.errors import InvalidRequest
from outpace.journal import Journal

HEADER = {"model": "m", "limit": 3}


def test_entries_come_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    journal = Journal(path, HEADER, resume=False)
    journal.add({"a": 1})
    journal.add({"b": [1, 2]})
    journal.close()
    with Journal(path, HEADER, resume=True) as resumed:
        assert resumed.entries == [{"a": 1}, {"b": [1, 2]}]
    with Journal(path, HEADER, resume=False) as new:
        assert new.entries == [], "control: without resume it is new"


def test_a_kill_at_any_byte_loses_only_the_line_it_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path, HEADER, resume=False)
    ends = [path.stat().st_size]
    for i in range(3):
        journal.add({"i": i})
        ends.append(path.stat().st_size)
    journal.close()
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends[1:])
        with Journal(path, HEADER, resume=True) as resumed:
            assert [entry["i"] for entry in resumed.entries] == list(range(whole))
            resumed.add({"i": "next"})
        with Journal(path, HEADER, resume=True) as again:
            assert [entry["i"] for entry in again.entries] == [*range(whole), "next"]


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, HEADER, resume=False).close()
    with pytest.raises(InvalidRequest, match="differs in limit"):
        Journal(path, HEADER | {"limit": 4}, resume=True)
    for text in ("no json\n", "[1]\n", "5\n"):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match="is no journal"):
            Journal(path, HEADER, resume=True)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        Journal(tmp_path / "file" / "run.jsonl", HEADER, resume=False)
