"""The one place where stored units (nanoseconds, bytes) become readable ones."""

from __future__ import annotations

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
NS_PER_HOUR = 3_600 * NS_PER_S
BYTES_PER_KIB = 1 << 10
BYTES_PER_MIB = 1 << 20
BYTES_PER_GIB = 1 << 30
BYTES_PER_GB = 1_000_000_000


def format_duration(duration_ns: float) -> str:
    """Write a duration in the unit that leaves one to three digits before the point."""
    scale = ((NS_PER_S, "s"), (NS_PER_MS, "ms"), (NS_PER_US, "us"), (1, "ns"))
    return _in_unit(duration_ns, scale, step=1000)


def format_bytes(size_bytes: float) -> str:
    """Write a size in binary units: 1,536 bytes reads `1.5 KiB`."""
    scale = ((BYTES_PER_GIB, "GiB"), (BYTES_PER_MIB, "MiB"), (BYTES_PER_KIB, "KiB"), (1, "B"))
    return _in_unit(size_bytes, scale, step=1024)


def _in_unit(value: float, scale: tuple[tuple[int, str], ...], step: int) -> str:
    for size, unit in scale:
        # Half a digit below the next unit already rounds up to it: 999.7 us is 1 ms.
        if abs(value) >= size * (1 - 0.5 / step) or size == 1:
            shown = value / size
            return f"{shown:.0f} {unit}" if abs(shown) >= 999.5 else f"{shown:.3g} {unit}"
    raise ValueError("the scale has no smallest unit")


def parse_fraction(value: str | float) -> float:
    """Read a share: `0.1%` and `0.001` are the same number.

    Raises:
        ValueError: the text is neither.
    """
    if isinstance(value, (int, float)):
        return float(value)
    text = value.strip()
    if text.endswith("%"):
        return float(text[:-1]) / 100
    return float(text)


def usd_per_million(price_per_hour: float, predictions_per_s: float) -> float:
    """Dollars that one million predictions cost on a machine of that hourly price."""
    return price_per_hour / 3600 / predictions_per_s * 1e6
