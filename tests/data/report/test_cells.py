"""Cells of numbers and shares, and the stability index over them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankopt.data.report.cells import (
    real_cells,
    real_value,
    stability_index,
)

# the parts


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_cells_rise_with_their_numbers_and_tell_them_to_a_percent(values):
    array = np.sort(np.array(values, dtype=np.float32))
    cells = real_cells(array)
    assert (np.diff(cells) >= 0).all()
    for value, cell in zip(array.tolist(), cells.tolist(), strict=True):
        assert real_value(cell) == pytest.approx(value, rel=0.008, abs=1.2e-38)


def test_the_stability_index_is_what_it_says():
    reference, values = np.array([500, 300, 200]), np.array([400, 300, 300])
    index, noise = stability_index(reference * 1_000, values * 1_000)
    p, q = np.array([0.4, 0.3, 0.3]), np.array([0.5, 0.3, 0.2])
    assert index == pytest.approx(((p - q) * np.log(p / q)).sum(), rel=1e-5)
    assert noise == pytest.approx(2 * (1e-6 + 1e-6))
    assert stability_index(reference, reference)[0] == 0
    assert stability_index(reference, values * 0) is None


def test_the_noise_is_the_mean_of_the_index_of_draws_of_one_kind():
    rng = np.random.default_rng(0)
    shares = [0.1] * 10
    draws = [
        stability_index(rng.multinomial(4_000, shares), rng.multinomial(2_000, shares))
        for _ in range(400)
    ]
    assert np.mean([index for index, _ in draws]) == pytest.approx(draws[0][1], rel=0.1)
