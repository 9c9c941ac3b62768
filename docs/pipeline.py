"""The demo's job in Python, its rows given as a pandas DataFrame and then as a Ray Dataset."""

import sys

import pyarrow as pa
import ray

from rankopt import compare, load_card, optimize
from rankopt.data.splits import open_splits
from rankopt.train.loop import train


def main(card="din-movielens", recipe="launch-int8", out="runs/pipeline", plan="ab-default"):
    """Train, optimize, compare and review; return the verdict of each kind of rows."""
    splits = open_splits(load_card(card))
    trained = train(load_card(card), splits, f"{out}/training", overwrite=True).card
    frame = pa.Table.from_batches(splits.test.batches()).to_pandas()
    ray.init(ignore_reinit_error=True, include_dashboard=False)
    verdicts = {}
    for kind, rows in {"pandas": frame, "ray": ray.data.from_pandas(frame)}.items():
        to, plain = f"{out}/{kind}", {"aoti-fp32": f"{out}/{kind}/plain"}  # exported as it is
        again = {"data": rows, "overwrite": True}
        optimize(recipe, trained, out=f"{to}/artifact", baseline_out=plain["aoti-fp32"], **again)
        options = {"plan": plan, "baselines": plain, "out": f"{to}/review"}
        report = compare(trained, f"{to}/artifact", **options, **again)
        print(f"{to}/review/report.html: {report.verdict}", *report.reasons, sep="\n- ")
        verdicts[kind] = report.verdict
    return verdicts


if __name__ == "__main__":
    main(*sys.argv[1:])
