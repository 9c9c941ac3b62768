"""Bring whole models to the operators of a GPU and score with them under Triton's interpreter.

Prints, for each model, which operators its graph calls and how far the scores moved.
"""

from __future__ import annotations

import json
import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402

from artifact.workshop import bundle_of  # noqa: E402
from passes.zoo import apply_passes, features_of, largest_error  # noqa: E402
from rankopt.passes.device import for_gpu, move  # noqa: E402
from rankopt.passes.fuse_attention import FuseAttention  # noqa: E402
from rankopt.passes.fuse_embeddings import FuseEmbeddings  # noqa: E402
from rankopt.passes.fuse_interaction import FuseInteraction  # noqa: E402
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings  # noqa: E402

STEPS = (
    FuseAttention(),
    FuseEmbeddings(),
    QuantizeEmbeddings(dtype="int8"),
    FuseInteraction(),
)


def main() -> None:
    torch.set_num_threads(1)
    report = {}
    for name in ("dlrm", "din", "hstu", "zoo"):
        card, _, bundle = bundle_of(name)
        applied = apply_passes(bundle, *STEPS).bundle
        there = for_gpu(applied)
        move(there.program, "cpu")
        operators = {
            str(node.target).removesuffix(".default")
            for node in there.program.graph.nodes
            if str(node.target).startswith("rankopt")
        }
        features = features_of(card, 7)
        report[name] = {
            "operators": sorted(operators),
            "error": largest_error(there.run(features), applied.run(features)),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
