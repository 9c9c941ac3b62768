from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from rankopt.models.dlrm import DLRM
from rankopt.models.dlrm_torchrec import DLRMTorchrec

KEYS = ["a", "b", "c"]
NUM_IDS = [6, 7, 8]
SMALL = {"num_dense": 3, "embedding_dim": 4, "bottom_mlp": (5,), "top_mlp": (6,)}


def test_equals_the_plain_dlrm_with_the_same_weights():
    torch.manual_seed(0)
    plain, torchrec = DLRM(NUM_IDS, **SMALL), DLRMTorchrec(KEYS, NUM_IDS, **SMALL)
    names = {
        f"tables.embedding_bags.t_{key}.weight": f"tables.bags.{index}.weight"
        for index, key in enumerate(KEYS)
    }
    weights = plain.state_dict()
    state = {name: weights[names.get(name, name)] for name in torchrec.state_dict()}
    torchrec.load_state_dict(state)
    dense, sparse = torch.randn(5, 3), torch.randint(0, 6, (5, 3))
    jagged = KeyedJaggedTensor(
        keys=KEYS, values=sparse.T.reshape(-1), lengths=torch.ones(15, dtype=torch.int64)
    )
    torch.testing.assert_close(torchrec(dense, jagged), plain(dense, sparse))


def test_an_empty_bag_pools_to_zero():
    torch.manual_seed(0)
    model = DLRMTorchrec(KEYS, NUM_IDS, **SMALL)
    empty = KeyedJaggedTensor(
        keys=KEYS,
        values=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(6, dtype=torch.int64),
    )
    dense = torch.randn(2, 3)
    bottom = model.bottom(dense)
    expected = model.top(torch.cat([bottom, torch.zeros(2, 6)], dim=1))[:, 0]
    torch.testing.assert_close(model(dense, empty), expected)


def test_keys_and_tables_must_be_as_many():
    with pytest.raises(ValueError, match=r"one number per key \(3\); got 2"):
        DLRMTorchrec(KEYS, [6, 7])
