from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rankopt.bench.schedule import turn_order


@given(
    num_arms=st.integers(1, 6),
    batch_size=st.integers(1, 4096),
    pair=st.integers(0, 500),
    seed=st.integers(0, 2**31),
)
def test_pairs_of_blocks_mirror_each_other_and_every_arm_has_one_turn(
    num_arms, batch_size, pair, seed
):
    first = turn_order(num_arms, batch_size, 2 * pair, seed)
    second = turn_order(num_arms, batch_size, 2 * pair + 1, seed)
    assert sorted(first) == list(range(num_arms))
    assert second == first[::-1]
    assert first == turn_order(num_arms, batch_size, 2 * pair, seed)


def test_each_arm_leads_about_as_often():
    # 400 pairs, fair coin: 3 standard deviations are 30.
    leads = Counter(turn_order(2, 64, 2 * pair, seed=0)[0] for pair in range(400))
    assert abs(leads[0] - 200) < 30


def test_seed_and_batch_size_change_the_order():
    def orders(batch_size, seed):
        return [turn_order(3, batch_size, block, seed) for block in range(0, 40, 2)]

    assert orders(1, 0) != orders(1, 1)
    assert orders(1, 0) != orders(64, 0)
