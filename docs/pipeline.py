"""The demo's job in Python, its rows given as a pandas DataFrame and then as a Ray Dataset."""

import sys

import pyarrow as pa
import ray

from rankopt import compare, load_card, optimize
from rankopt.data.splits import open_splits
from rankopt.train.loop import train


def main(card="din-movielens", recipe="launch-int8", out="runs/pipeline", plan="ab-default"):
    splits = open_splits(load_card(card))
    trained = train(load_card(card), splits, f"{out}/training", overwrite=True).card
    frame = pa.Table.from_batches(splits.test.batches()).to_pandas()
    ray.init(ignore_reinit_error=True, include_dashboard=False)
    verdicts = {}
    for kind, rows in {"pandas": frame, "ray": ray.data.from_pandas(frame)}.items():
        artifact, plain = f"{out}/{kind}/artifact", f"{out}/{kind}/plain"  # plain: exported as it is
        where = {"out": artifact, "baseline_out": plain, "overwrite": True}
        optimize(recipe, trained, data=rows, **where)
        where = {"out": f"{out}/{kind}/review", "overwrite": True}
        report = compare(trained, artifact, rows, baselines={"aoti-fp32": plain}, plan=plan, **where)
        print(f"{where['out']}/report.html: {report.verdict}", *report.reasons, sep="\n- ")
        verdicts[kind] = report.verdict
    return verdicts


if __name__ == "__main__":
    main(*sys.argv[1:])
