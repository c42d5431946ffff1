"""The verdicts of a run, in memory and, where a journal is given, on disk as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.journal import Journal


class Ledger:
    """Entries of the tests "ids", "fit" and "completion"; a resumed journal's are there already.

    Args:
        journal: keeps each entry as soon as it is added.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.entries: list[dict[str, Any]] = [] if journal is None else [*journal.entries]
        self._journal = journal

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()

    def add(self, test: str, temperature: float | None, **entry: Any) -> None:
        """Books a verdict; `temperature` is None for completions."""
        entry = {"test": test, "temperature": temperature, **entry}
        self.entries.append(entry)
        if self._journal is not None:
            self._journal.add(entry)

    def done(self, test: str, temperature: float | None, key: tuple[str, ...]) -> set[Any]:
        """The values of `key` of the entries of a test."""
        return {
            tuple(entry[name] for name in key)
            for entry in self.entries
            if entry["test"] == test and entry["temperature"] == temperature
        }
