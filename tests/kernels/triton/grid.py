"""Run kernels on their parity grid under Triton's interpreter; print what fails as JSON.

`python grid.py NAME ...`: the interpreter is chosen when a kernel is defined, so it has a process
of its own.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
# numpy warns of the NaN and infinities that the grid puts in.
warnings.simplefilter("ignore")

import torch  # noqa: E402

from rankopt.kernels.registry import KERNELS, Case, Kernel  # noqa: E402

MAX_LIST_ROWS, MAX_ROWS = 2, 65
"""The interpreter takes 5 ms for each list: larger batches are left to a GPU."""
PER_LIST = ("sum", "mean", "weighted", "closed", "empty", "long", "mixed")


def interpreted(kernel: Kernel) -> list[Case]:
    if kernel.name != "lookup_rows":
        return list(kernel.cases)
    return [
        case
        for case in kernel.cases
        if case.num_rows <= (MAX_LIST_ROWS if case.form in PER_LIST else MAX_ROWS)
        or (case.nonfinite or case.id_type != "int64")
    ]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    report = {}
    for name in names:
        kernel, failed = KERNELS[name], {}
        cases = interpreted(kernel)
        for case in cases:
            agreement = kernel.check_on_gpu(case, "cpu")
            if not agreement.excess <= 0:
                failed[str(case)] = str(agreement)
        report[name] = {"num_cases": len(cases), "failed": failed}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
