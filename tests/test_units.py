from __future__ import annotations

import math
from typing import Any

import jsonargparse
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ckpt_policy import AdaptiveInterval, EveryNEpochs, KeepUnder, PhaseSchedule, Retention, Trigger
from lightning_ckpt_policy._units import byte_size, bytes_in, duration, seconds_in, shown_bytes, shown_seconds


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        ("500GB", "500GB"),
        ("500 gb", "500GB"),
        ("0.5TB", "500GB"),
        ("2000 GB", "2TB"),
        ("1.5 TiB", "1536GiB"),
        ("1kB", "1kB"),
        ("1KB", "1kB"),
        ("1e3 GB", "1TB"),
        ("7B", "7B"),
        ("500", "500B"),
        ("5e11", "500GB"),
        (5e11, "500GB"),
        (1024, "1KiB"),
        (10**12, "1TB"),
        (3, "3B"),
    ],
)
def test_byte_size(value: Any, canonical: str) -> None:
    assert byte_size("budget", value, "'500GB'") == canonical


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "GB",
        "5 XB",
        "1.5",
        math.nan,
        math.inf,
        "-5GB",
        "1.5B",
        "0GB",
        "5G",
        "1e30EB",
        "5GB5",
        0,
        -1,
        1.5,
        True,
        None,
    ],
)
def test_bad_byte_size(bad: Any) -> None:
    with pytest.raises(ValueError) as caught:
        byte_size("budget", bad, "'500GB'")
    message = str(caught.value)
    assert message.startswith(f"budget={bad!r}: a number of bytes above 0 was expected")
    assert message.endswith("write for example '500GB'")


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (1, "1s"),
        (0.25, "0.25s"),
        (5400, "1h30m"),
        ("90m", "1h30m"),
        ("1 hour 30 minutes", "1h30m"),
        ("1.5h", "1h30m"),
        ("36H", "1d12h"),
        ("0.1 s", "0.1s"),
        ("5400", "1h30m"),
        ("1:30:00", "1h30m"),
        ("01:30:00.5", "5400.5s"),
        ("100:00:00", "4d4h"),
        ("1:30", "1m30s"),
    ],
)
def test_duration(value: Any, canonical: str) -> None:
    assert duration("min", value, "min='1m'") == canonical


@pytest.mark.parametrize(
    "bad", ["", "1:75", "1:2:3:4", "h", "5 weeks", "-1h", "1h30", "0s", "1e999h", 0, -1, math.nan, math.inf, True, None]
)
def test_bad_duration(bad: Any) -> None:
    with pytest.raises(ValueError) as caught:
        duration("min", bad, "min='1m'")
    assert str(caught.value).startswith(f"min={bad!r}: a length of time above 0 was expected")


class Config:
    def __init__(self, budget: Retention, times: Trigger) -> None:
        self.budget, self.times = budget, times


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # instantiate_classes: the old name works with every version
@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        *(("budget", text, "500GB") for text in ("500GB", "500 gb", "0.5TB", "5e11", "500000000000", "'5e11'")),
        *(("times", text, "1h30m") for text in ("1.5h", "90 min", "1h30m", "5400", "'5400'", "5.4e3", "1:30:00")),
        *(("times", text, "1h30m") for text in ("'1:30:00'", "01:30:00", "90:00", "1 hour 30 minutes")),
    ],
)
def test_yaml_and_python_take_the_same(field: str, text: str, value: str) -> None:
    budget, time = (text, "1h") if field == "budget" else ("1GB", text)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Config, "config")
    made = parser.instantiate_classes(
        parser.parse_string(f"""
config:
  budget: {{class_path: lightning_ckpt_policy.KeepUnder, init_args: {{budget: {budget}}}}}
  times:
    class_path: lightning_ckpt_policy.PhaseSchedule
    init_args:
      by: time
      phases:
        - [{time}, {{class_path: lightning_ckpt_policy.AdaptiveInterval, init_args: {{mtbf: {time}}}}}]
        - [null, {{class_path: lightning_ckpt_policy.EveryNEpochs}}]
""")
    ).config
    plain = text.strip("'")
    if field == "budget":
        assert made.budget == KeepUnder(plain) == KeepUnder(value)
    else:
        phases = [(value, AdaptiveInterval(mtbf=plain)), (None, EveryNEpochs())]
        assert made.times == PhaseSchedule(phases, by="time")
        assert AdaptiveInterval(mtbf=plain).mtbf == value


@given(st.integers(1, (1 << 63) - 1))
def test_bytes_come_back(size: int) -> None:
    assert bytes_in(shown_bytes(size)) == size


@given(st.floats(1e-9, 1e12) | st.integers(1, 10**9).map(float))
def test_seconds_come_back(seconds: float) -> None:
    assert seconds_in(shown_seconds(seconds)) == seconds
