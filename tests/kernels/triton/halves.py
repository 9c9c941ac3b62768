"""Run the kernels that take fp16 on a few cases under Triton's interpreter.

bf16 is left to a GPU: the interpreter holds it as integers, and `tl.dot` multiplies those.
"""

from __future__ import annotations

import json
import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402

from gpu.test_kernels import HALVES, _cast  # noqa: E402
from rankopt.kernels.registry import KERNELS  # noqa: E402

NAMES = ("dot_interaction", "fm_interaction", "hstu_attention", "hstu_candidate_attention")


def main() -> None:
    torch.set_num_threads(1)
    worst: dict[str, float] = {}
    for name in NAMES:
        kernel = KERNELS[name]
        small = [c for c in kernel.cases if c.values == "normal" and str(c)[0] in "1234567"]
        allowed = HALVES[torch.float16]
        for case in small[-40::10]:
            given = _cast(list(kernel.arguments(case)), torch.float16)
            expected = kernel.reference(*_cast(given, torch.float32)).double()
            result = kernel.on_gpu()(*given).double()
            error = float((result - expected).abs().max() / expected.abs().max() / allowed)
            worst[name] = max(worst.get(name, 0.0), error)
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
