"""DLRM and DLRM-DCNv2 whose id columns come as two inputs, the request's and the candidate's.

Shapes: B batch (candidates), T tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankopt.models.dcnv2 import DCNv2
from rankopt.models.dlrm import DLRM


class TwoSided(nn.Module):
    """Put the request's columns in front of the candidate's.

    Shapes:
        dense: float32 [B, num_dense]
        user: int64 [B, T_user]
        ad: int64 [B, T_ad]
        output: logit, float32 [B]
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, user: Tensor, ad: Tensor) -> Tensor:
        score: Tensor = self.model(dense, torch.cat([user, ad], dim=1))
        return score


def make_dlrm(**config: Any) -> TwoSided:
    """Build DLRM; the arguments are its own."""
    return TwoSided(DLRM(**config))


def make_dcnv2(**config: Any) -> TwoSided:
    """Build DLRM-DCNv2; the arguments are its own."""
    return TwoSided(DCNv2(**config))
