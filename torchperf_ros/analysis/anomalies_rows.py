"""Rows of a `timestamp,value` file, read one at a time and kept as they were written."""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from torchperf_ros.core.errors import TorchperfError

_MISSING = frozenset({"", "nan", "na", "n/a", "null", "none", "-", "?"})
_DELIMITERS = ",;\t"
_EPOCH_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))  # from so large on, numbers are nano-, micro-, milliseconds
_TIME_NAMES = ("timestamp", "time", "date", "datetime", "time_s", "ts")
_VALUE_NAMES = ("value",)
_EXAMPLES = "for example 2024-05-01 12:00:00 or 1714564800"


class SeriesError(TorchperfError):
    """A file is no `timestamp,value` series; the message names file, line, value and what would be right."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        line: its number in the file, from 1 on.
        timestamp, text: both fields as they stand in the file.
        time_s: the timestamp in seconds; ISO times without a zone count as UTC.
        value: the number; NaN where it is missing.
    """

    line: int
    timestamp: str
    text: str
    time_s: float
    value: float


class Rows:
    """The rows of a file. A first line whose fields are names is a header; `names` are those of the two columns."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Read the first line.

        Args:
            path: for messages.
            file: open for reading, at its start.

        Raises:
            SeriesError: it is empty, no text, or the first line has a single field.
        """
        self._path = path
        self.names = ("timestamp", "value")
        self.has_header = False
        text = TextIOWrapper(file, encoding="utf-8-sig", newline="")
        self._lines = _readable(text, path)
        first = next((line for line in self._lines if line.strip()), None)
        if first is None:
            raise SeriesError(f"{path} is empty: it needs rows of timestamp,value")
        self._delimiter = max(_DELIMITERS, key=first.count)
        fields = next(csv.reader([first], delimiter=self._delimiter))
        if len(fields) < 2:  # noqa: PLR2004
            raise SeriesError(f"{path}:1: {first.strip()!r} has one field; a row is timestamp,value")
        self._first: str | None = first
        self._columns = (0, 1)
        if not _is_number(fields[1]) and fields[1].strip().lower() not in _MISSING - {""} and not _is_time(fields[0]):
            self.has_header = True
            self._columns = _columns(fields)
            self.names = (fields[self._columns[0]], fields[self._columns[1]])
            self._first = None

    def __iter__(self) -> Iterator[Row]:
        """All rows in order; empty lines are no rows.

        Raises:
            SeriesError: a row cannot be read.
        """
        reader = csv.reader(self._rest(), delimiter=self._delimiter)
        offset = int(self.has_header)
        try:
            for fields in reader:
                if fields:
                    yield self._row(reader.line_num + offset, fields)
        except csv.Error as error:
            raise SeriesError(f"{self._path}:{reader.line_num + offset}: {error}") from error

    def _rest(self) -> Iterator[str]:
        if self._first is not None:
            yield self._first
        yield from self._lines

    def _row(self, line: int, fields: list[str]) -> Row:
        where = f"{self._path}:{line}"
        if len(fields) <= max(self._columns):
            raise SeriesError(f"{where}: {self._delimiter.join(fields)!r} has {len(fields)} fields; "
                              f"a row is {','.join(self.names)}")  # fmt: skip
        timestamp, text = (fields[column] for column in self._columns)
        time_s = _seconds(timestamp)
        if time_s is None:
            raise SeriesError(f"{where}: timestamp {timestamp!r} is neither an ISO time nor a number; {_EXAMPLES}")
        value = math.nan
        if text.strip().lower() not in _MISSING:
            try:
                value = float(text)
            except ValueError:
                raise SeriesError(
                    f"{where}: value {text!r} is no number; a missing one is an empty field or NaN"
                ) from None
        return Row(line, timestamp, text, time_s, value)


def _readable(lines: TextIOWrapper, path: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise SeriesError(
            f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): a CSV file is"
        ) from error


def _columns(names: list[str]) -> tuple[int, int]:
    """Of the time and of the value: by name where both are there, else the first two."""
    plain = [name.strip().lower() for name in names]
    time = next((plain.index(name) for name in _TIME_NAMES if name in plain), 0)
    value = next((plain.index(name) for name in _VALUE_NAMES if name in plain), 1 if time == 0 else 0)
    return time, value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_time(text: str) -> bool:
    return _seconds(text) is not None


def _seconds(text: str) -> float | None:
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        return _iso_seconds(text)
    if not math.isfinite(number):
        return None
    return next((number / unit for least, unit in _EPOCH_UNITS if abs(number) >= least), number)


def _iso_seconds(text: str) -> float | None:
    # Python 3.10 reads neither a Z nor fractions of other than 3 or 6 digits
    text = re.sub(r"[zZ]$", "+00:00", text.replace("/", "-"))
    text = re.sub(r"\.(\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
