"""The quantities of a network's settings, as text and as numbers: a link's bandwidth and latency."""

import re
from typing import Any

from cos598d.errors import UsageError

BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(words: str) -> float | None:
    """ "1gbit", "100mbit" or "512kbit" as bits per second; None for "none". Raises UsageError for anything else."""
    if words == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", words.lower())
    rate = float(match[1]) * BITS[match[2]] if match else 0.0
    if not 1e4 <= rate <= 1e12:
        raise UsageError(
            f"--rate {words} is not valid. Give a rate from 10kbit to 1000gbit like 1gbit or 100mbit, or none."
        )
    return rate


def parse_delay(words: str) -> float:
    """ "10ms", "500us", "1s" or "0" as seconds. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", words.lower()) if words != "0" else None
    seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    if (words != "0" and not match) or seconds > 10:
        raise UsageError(f"--delay {words} is not valid. Give a time from 0 to 10s like 10ms or 500us.")
    return seconds


def rate_words(rate: float | None) -> str:
    """A rate as text for `parse_rate`: "1gbit"."""
    if rate is None:
        return "none"
    prefix = next((prefix for prefix in "gmk" if rate >= BITS[prefix]), "")
    return f"{rate / BITS[prefix]:g}{prefix}bit"


def delay_words(seconds: float) -> str:
    """A delay as text for `parse_delay`: "10ms"."""
    if seconds == 0:
        return "0"
    unit = next((unit for unit in ("s", "ms") if seconds >= SECONDS[unit]), "us")
    return f"{seconds / SECONDS[unit]:g}{unit}"


def quantity(value: Any) -> float | None:
    """A number, or text such as "1gbit" (bits per second) or "10ms" (seconds), as a number; otherwise None."""
    if isinstance(value, int | float):
        return float(value)
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", value.strip().lower()) if isinstance(value, str) else None
    scales = SECONDS | {f"{prefix}bit": scale for prefix, scale in BITS.items()} | {"": 1.0}
    try:
        return float(found[1]) * scales[found[2]] if found else None
    except (KeyError, ValueError):
        return None
