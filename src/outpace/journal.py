"""A file of results that survives being killed at any moment: one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import InvalidRequest


class Journal:
    """Entries on disk, each there for good once `add` returns.

    Args:
        path: made when it is missing; its folder too.
        header: what the run is; a file of another run is not gone on with.
        resume: go on with an existing file; else it is written anew.

    Raises:
        InvalidRequest: when the file belongs to another run, or cannot be read or written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        first = json.loads(json.dumps(dict(header)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume and path.exists():
                self._read(first)
            else:
                path.write_bytes(b"")
            self._file = path.open("ab")
            if not path.stat().st_size:
                self._append(first)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written: {error}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry and waits until the disk has it."""
        entry = json.loads(json.dumps(dict(entry)))
        self._append(entry)
        self.entries.append(dict(entry))

    def close(self) -> None:
        """The entries stay on disk."""
        self._file.close()

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, header: dict[str, Any]) -> None:
        """Takes over whole lines; one that a kill cut short is dropped from the file."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise InvalidRequest(f"{self.path} is no journal: {error}") from error
        if not all(isinstance(line, dict) for line in lines):
            raise InvalidRequest(f"{self.path} is no journal: a line holds no JSON object")
        if not lines:
            return
        differing = sorted(
            name for name in {*header, *lines[0]} if header.get(name) != lines[0].get(name)
        )
        if differing:
            raise InvalidRequest(
                f"{self.path} is of another run, which differs in {', '.join(differing)}: leave "
                "--resume out to write it anew, or name another file"
            )
        self.entries = lines[1:]
