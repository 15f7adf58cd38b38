"""Lengths of time and numbers of bytes, as a person writes them: ``"1h30m"``, ``"500GB"``."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, fields
from fractions import Fraction

from lightning_ckpt_policy._compose import shown

LEAST_SECONDS = 1e-6  # a division of a time by less may overflow
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME_NAMES = {
    name: seconds
    for names, seconds in (
        ("s sec second seconds", 1),
        ("m min minute minutes", 60),
        ("h hour hours", 3600),
        ("d day days", 86400),
    )
    for name in names.split()
}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_CLOCK = re.compile(r"\s*(?:(\d+):)?(\d+):([0-5]\d(?:\.\d+)?)\s*")  # what YAML itself takes for a number of seconds
_PLAIN = re.compile(rf"\s*{_NUMBER}\s*", re.IGNORECASE)
_TIME_PART = re.compile(rf"\s*{_NUMBER}\s*([a-z]+)\s*", re.IGNORECASE)
_BYTES = {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_BYTES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T", "P", "E"), 1)}
_BYTE_NAMES = {name.lower(): size for name, size in _BYTES.items()}
_BYTE_TEXT = re.compile(rf"\s*{_NUMBER}\s*([a-z]+)\s*", re.IGNORECASE)


@functools.lru_cache(maxsize=256)
def seconds_in(text: str) -> float:
    """The seconds that a text such as ``"1h30m"``, ``"1:30:00"`` or ``"5400"`` stands for; NaN if it stands for none.

    >>> seconds_in("1h30m"), seconds_in("0.5 s"), seconds_in("1:30:00"), seconds_in("30"), seconds_in("soon")
    (5400.0, 0.5, 5400.0, 30.0, nan)
    """
    if plain := _PLAIN.fullmatch(text):
        return float(plain[1])
    if clock := _CLOCK.fullmatch(text):
        return int(clock[1] or 0) * 3600 + int(clock[2]) * 60 + float(clock[3])
    total, position = 0.0, 0
    while position < len(text):
        part = _TIME_PART.match(text, position)
        if part is None or part[2].lower() not in _TIME_NAMES:
            return math.nan
        total += float(part[1]) * _TIME_NAMES[part[2].lower()]
        position = part.end()
    return total if text else math.nan


def duration(field: str, value: object, example: str) -> str:
    """``value``, seconds or a text that `seconds_in` takes, in one form for each length.

    Raises:
        ValueError: It isn't a finite length of time above 0. The message names ``field``, the value and ``example``.

    >>> [duration("mtbf", value, "mtbf='8h'") for value in (5400, "90 min", "1:30:00", 0.25)]
    ['1h30m', '1h30m', '1h30m', '0.25s']
    """
    seconds = math.nan
    if isinstance(value, str):
        seconds = seconds_in(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{field}={shown(value)}: a length of time above 0 was expected, in seconds (5400), with units d, h, m, s "
            f"(1h30m) or as h:mm:ss (1:30:00); write for example {example}"
        )
    return shown_seconds(seconds)


def shown_seconds(seconds: float) -> str:
    """A length of time with units, from which `seconds_in` gives the very same number.

    >>> shown_seconds(90061.0), shown_seconds(1.5)
    ('1d1h1m1s', '1.5s')
    """
    if not seconds.is_integer() or seconds <= 0 or seconds >= 2**53:
        return f"{seconds!r}s"
    left, text = int(seconds), ""
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, _TIMES[unit])
        text += f"{count}{unit}" if count else ""
    return text


@functools.lru_cache(maxsize=256)
def bytes_in(text: str) -> int:
    """The bytes that a text such as ``"500GB"``, ``"1.5 TiB"`` or ``"5e11"`` stands for; 0 if for no whole number.

    >>> bytes_in("500GB"), bytes_in("1.5 KiB"), bytes_in("500"), bytes_in("1.5")
    (500000000000, 1536, 500, 0)
    """
    match = _BYTE_TEXT.fullmatch(text + "B" if _PLAIN.fullmatch(text) else text)
    if match is None or match[2].lower() not in _BYTE_NAMES or len(text) > 40:
        return 0
    size = Fraction(match[1]) * _BYTE_NAMES[match[2].lower()]
    return int(size) if size.denominator == 1 else 0


def byte_size(field: str, value: object, example: str) -> str:
    """``value``, a number of bytes or a text such as ``"500GB"``, in one canonical form.

    Decimal units are powers of 1000 (kB, MB, GB, TB, PB, EB), binary ones of 1024 (KiB, MiB, GiB, TiB, PiB, EiB).

    Raises:
        ValueError: It isn't a whole number of bytes above 0. The message names ``field``, the value and ``example``.

    >>> [byte_size("budget", value, "'500GB'") for value in (2 * 10**12, 2e12, "0.5 tb")]
    ['2TB', '2TB', '500GB']
    """
    size = 0
    if isinstance(value, str):
        size = bytes_in(value)
    elif not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        size = int(value)
    if not 0 < size < 1 << 63:
        raise ValueError(
            f"{field}={shown(value)}: a number of bytes above 0 was expected, whole (5e11) or with a unit (B, kB, MB, "
            f"GB, TB, PB, KiB, MiB, GiB, TiB, PiB); write for example {example}"
        )
    return shown_bytes(size)


def shown_bytes(size: int) -> str:
    """A whole number of bytes with the largest unit that loses nothing.

    >>> shown_bytes(1536), shown_bytes(2 * 10**9), shown_bytes(7)
    ('1536B', '2GB', '7B')
    """
    fitting = [(unit_size, unit) for unit, unit_size in _BYTES.items() if size and size % unit_size == 0]
    unit_size, unit = max(fitting, default=(1, "B"))
    return f"{size // unit_size}{unit}"


@dataclass(frozen=True, kw_only=True, repr=False)
class HoursMinutesSeconds:
    """Base of what is made of a length of time: three fields that are added up."""

    hours: float = 0
    minutes: float = 0
    seconds: float = 0

    def __post_init__(self) -> None:
        name = type(self).__name__
        parts = ("hours", "minutes", "seconds")
        for part in parts:
            object.__setattr__(self, part, _part(name, part, getattr(self, part)))
        if not LEAST_SECONDS <= self.total_seconds < math.inf:
            values = ", ".join(f"{part}={getattr(self, part)}" for part in parts)
            kind = f"of at least {LEAST_SECONDS:g} s" if 0 < self.total_seconds < 1 else "above 0"
            raise ValueError(f"{values}: a finite interval {kind} was expected; write {name}(minutes=30)")

    @property
    def total_seconds(self) -> float:
        """The length in seconds."""
        return self.hours * 3600 + self.minutes * 60 + self.seconds

    def __repr__(self) -> str:
        shown_fields = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                whole = isinstance(value, float) and value.is_integer()
                shown_fields.append(f"{f.name}={int(value) if whole else value!r}")
        return f"{type(self).__name__}({', '.join(shown_fields)})"


def _part(owner: str, name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={shown(value)}: a finite number of at least 0 was expected; write {owner}({name}=30)")
    return number
