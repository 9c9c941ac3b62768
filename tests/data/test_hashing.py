from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from rankopt.data.hashing import as_fraction, mix, stable_hash

MASK = (1 << 64) - 1


def reference(text: str) -> int:
    """FNV-1a and splitmix64's finaliser, by their definitions, a byte at a time."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_agrees_with_its_definition() -> None:
    texts = ["", "a", "user 12", "naïve", "x" * 70, "b"]
    assert stable_hash(pa.array(texts)).tolist() == [reference(text) for text in texts]
    assert stable_hash(pa.array(texts)[2:4]).tolist() == [reference(text) for text in texts[2:4]]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([7, -12, 0], pa.int32()),
        pa.array([7.0, -12.0, 0.0]),
        pa.array([7.0, -12.0, -0.0], pa.float32()),
        pa.array(["7", "-12", "0"]),
        pa.array(["7", "-12", "0"]).dictionary_encode(),
    ],
    ids=lambda keys: str(keys.type),
)
def test_a_key_hashes_alike_whatever_its_type(keys: pa.Array) -> None:
    assert stable_hash(keys).tolist() == [reference(text) for text in ("7", "-12", "0")]


def test_floats_hash_by_value_and_not_by_their_neighbours() -> None:
    keys = pa.array([10.0**15, 1.5, 10.0**20, None, float("nan")])
    texts = [str(10**15), "1.5", "1e+20", "", "nan"]
    assert stable_hash(keys).tolist() == [reference(text) for text in texts]


def test_no_rows_and_null_rows() -> None:
    assert stable_hash(pa.array([], pa.string())).tolist() == []
    assert stable_hash(pa.array([None], pa.string())).tolist() == [reference("")]


def test_fractions_are_spread_evenly() -> None:
    fractions = as_fraction(mix(np.arange(100_000, dtype=np.uint64)))
    assert fractions.min() >= 0
    assert fractions.max() < 1
    counts, _ = np.histogram(fractions, bins=10, range=(0, 1))
    assert np.all(np.abs(counts - 10_000) < 500)
