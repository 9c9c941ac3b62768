"""What runs on an NVIDIA GPU; without one every test here is skipped with the reason."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU that torch sees; torch is {torch.__version__}")
    pytest.importorskip("triton")
