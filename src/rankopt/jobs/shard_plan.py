"""Plan how a model's tables are spread over a topology, and write the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from rankopt.errors import Problem, UsageError
from rankopt.jobs.inputs import Progress, quiet
from rankopt.models.card import ModelCard
from rankopt.problems import problems_of_validation
from rankopt.sharding.alternatives import LOAD_FACTORS, Request, choose
from rankopt.sharding.card_tables import read_model_tables
from rankopt.sharding.described import described
from rankopt.sharding.remedies import remedies
from rankopt.sharding.schema import Remedy, ShardPlan
from rankopt.sharding.setting import (
    CACHING_KERNELS,
    UVM_KERNELS,
    Communication,
    Kernel,
    ShardingType,
    supported_kernels,
    supported_types,
)
from rankopt.sharding.tables import Optimizer, Precision
from rankopt.sharding.topology import Topology, load_topology

DEFAULT_BATCH_SIZE = 2048
DEFAULT_OPTIMIZER: Optimizer = "adagrad"
"""The same mathematics as torch.optim.Adagrad, one fp32 state a value."""


def plan_shards(
    source: ModelCard | str | Path,
    topology: Topology | str | Path,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    optimizer: Optimizer | None = None,
    precision: Precision | None = None,
    serving: bool = False,
    sharding_types: tuple[ShardingType, ...] = (),
    kernels: tuple[Kernel, ...] = (),
    load_factors: tuple[float, ...] = LOAD_FACTORS,
    communication: Communication = "fp32",
    ids_per_row: dict[str, float] | None = None,
    reproduce: str | None = None,
    progress: Progress = quiet,
) -> ShardPlan:
    """Plan without loading or allocating a weight.

    Args:
        source: a model card, its path or name; or a file that lists tables.
        topology: a topology, its path, or its name in benchmarks/topologies.
        batch_size: rows of one rank.
        optimizer: of the tables; None: what the card trains them with, else Adagrad.
        precision: of the rows; None: the model's own, and fp16 where nothing else fits.
        serving: plan inference of quantised tables in place of training.
        sharding_types: what may be chosen from; all when empty.
        kernels: what may be chosen from; all that the device has when empty.
        load_factors: shares of a cached table's rows in device memory, to try.
        communication: what pooled vectors are sent as.
        ids_per_row: lookups of a row by table name, in place of what the card says.
        reproduce: the command to write into the plan.
        progress: told one line per step.

    Returns:
        The plan; where `fits` is False, the nearest miss with its memory and the remedies.

    Raises:
        CardError: the card or its tables are wrong.
        UsageError: the topology is wrong, or the settings contradict it; every problem is listed.
    """
    request = request_for(
        source,
        topology,
        batch_size=batch_size,
        optimizer=optimizer,
        precision=precision,
        serving=serving,
        sharding_types=sharding_types,
        kernels=kernels,
        load_factors=load_factors,
        communication=communication,
        ids_per_row=ids_per_row,
        progress=progress,
    )
    choice = choose(request, progress)
    ways_out: tuple[Remedy, ...] = ()
    if not choice.best.fits:
        progress("looking for remedies")
        ways_out = remedies(request, choice)
    model, over = request.model, request.topology
    plan = described(
        request, choice, reproduce or f"rankopt shard plan {model.source} --topology {over.name}"
    )
    return plan.model_copy(update={"remedies": ways_out})


def request_for(
    source: ModelCard | str | Path,
    topology: Topology | str | Path,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    optimizer: Optimizer | None = None,
    precision: Precision | None = None,
    serving: bool = False,
    sharding_types: tuple[ShardingType, ...] = (),
    kernels: tuple[Kernel, ...] = (),
    load_factors: tuple[float, ...] = LOAD_FACTORS,
    communication: Communication = "fp32",
    ids_per_row: dict[str, float] | None = None,
    progress: Progress = quiet,
) -> Request:
    """Read and check what `plan_shards` is asked, as it is told there.

    Raises:
        CardError: the card or its tables are wrong.
        UsageError: the topology is wrong, or the settings contradict it; every problem is listed.
    """
    over = topology if isinstance(topology, Topology) else load_topology(topology)
    progress("reading the tables")
    model = read_model_tables(source).with_ids_per_row(ids_per_row or {})
    trained_with = None if serving else optimizer or model.optimizer or DEFAULT_OPTIMIZER
    if trained_with == "adam" and optimizer is None and over.device == "cpu":
        trained_with = DEFAULT_OPTIMIZER
        note = "the card trains with Adam, which fbgemm does not run on CPUs: planned with Adagrad"
        model = replace(model, notes=(*model.notes, note))
    _check(over, trained_with, precision, sharding_types, kernels, load_factors, batch_size)
    return Request(
        model=model,
        topology=over,
        batch_size=batch_size,
        optimizer=trained_with,
        precision=precision,
        sharding_types=sharding_types or supported_types(serving=serving),
        kernels=kernels or None,
        load_factors=tuple(sorted(set(load_factors))),
        communication=communication,
    )


def _check(
    topology: Topology,
    optimizer: Optimizer | None,
    precision: Precision | None,
    sharding_types: tuple[ShardingType, ...],
    kernels: tuple[Kernel, ...],
    load_factors: tuple[float, ...],
    batch_size: int,
) -> None:
    serving = optimizer is None
    purpose = "serving" if serving else "training"
    problems = []
    if batch_size < 1:
        problems.append(Problem("--batch-size", "must be at least 1", batch_size))
    if precision == "int8" and not serving:
        hint = "Add --serving to plan quantised tables."
        problems.append(Problem("--precision", "must be fp32 or fp16 in training", precision, hint))
    wrong = [factor for factor in load_factors if not 0 < factor < 1]
    if wrong:
        problems.append(Problem("--load-factors", "must lie between 0 and 1", wrong))
    types = supported_types(serving=serving)
    if sharding_types and not set(sharding_types) & set(types):
        what = f"torchrec offers {', '.join(types)} for {purpose}"
        problems.append(Problem("--sharding-types", what, list(sharding_types)))
    allowed = supported_kernels(topology.device, optimizer)
    bad = [kernel for kernel in kernels if kernel not in allowed]
    if bad:
        with_what = f" with {optimizer}" if optimizer else ""
        what = f"must be among {', '.join(allowed)} for {purpose}{with_what} on {topology.device}"
        problems.append(Problem("--kernels", what, bad))
    elif kernels and all(kernel in UVM_KERNELS | CACHING_KERNELS for kernel in kernels):
        hint = "Add dense, fused or quant, which small tables may take."
        problems.append(
            Problem("--kernels", "must hold one for device memory", list(kernels), hint)
        )
    if problems:
        raise UsageError(problems=problems)


def read_plan(file: Path) -> ShardPlan:
    """Read a plan that `rankopt shard plan --out` wrote.

    Raises:
        UsageError: the file is missing or is no plan; every problem is listed.
    """
    try:
        return ShardPlan.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        hint = "Write one: rankopt shard plan CARD --topology T --out FILE."
        problem = Problem(str(file), "must be a readable sharding plan", str(error), hint)
        raise UsageError(problems=[problem]) from error
    except ValidationError as error:
        raise UsageError(problems=problems_of_validation(str(file), error, ShardPlan)) from error
