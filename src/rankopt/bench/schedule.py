"""The order in which arms take turns.

Each batch size is timed in blocks; in a block every arm has one turn. Orders come in mirrored
pairs (ABBA): whatever grows steadily over the two blocks, such as heat, falls on both arms alike.
The first order of each pair is drawn at random, so that no periodic disturbance can favour one.
"""

from __future__ import annotations

import numpy as np


def turn_order(num_arms: int, batch_size: int, block: int, seed: int) -> tuple[int, ...]:
    """Return arm positions in the order of their turns.

    The order depends on nothing but the arguments, so a resumed run continues the same schedule.
    """
    generator = np.random.default_rng((seed, batch_size, block // 2))
    order = tuple(int(position) for position in generator.permutation(num_arms))
    return order[::-1] if block % 2 else order
