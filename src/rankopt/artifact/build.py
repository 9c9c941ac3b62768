"""Compile a bundle with AOTInductor and lay it out as an artifact folder.

model.pt2            the compiled graph, without weights
weights/             every constant it reads, mapped into memory when it is loaded
parts/               submodules that stay eager, where an export was split
checks.safetensors   made-up inputs and the bundle's own outputs for them
requests.pt2         the graph that takes request-level inputs once, where a pass made one; it reads
                     weights/ too, and request-checks.safetensors are its checks
manifest.json        contract, target, versions, hashes
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rankopt.artifact.constants import stored_bytes, write_constants
from rankopt.artifact.contract import contract_of, random_features
from rankopt.artifact.gpu import capability, tf32
from rankopt.artifact.manifest import (
    CHECKS,
    CONSTANTS,
    MANIFEST,
    PROGRAM,
    REQUEST_CHECKS,
    REQUEST_CONSTANTS,
    REQUEST_PROGRAM,
    Manifest,
    OutputEntry,
    Target,
)
from rankopt.artifact.parts import write_parts
from rankopt.artifact.requests import named_for_requests, request_form, write_request_checks
from rankopt.bench.plan import raised
from rankopt.bundle import ModelBundle
from rankopt.capture.export import MAX_BATCH
from rankopt.capture.parts import parts_in
from rankopt.environment import Environment, collect_environment
from rankopt.errors import ExportError
from rankopt.hashes import sha256_file
from rankopt.kernels.build import load_kernels
from rankopt.kernels.ops import aoti_c_shims, current_isa, schema_here
from rankopt.passes.device import moved_for
from rankopt.passes.quantize_dense import fbgemm_layers

CHECK_BATCHES = (1, 2, 7, 64)
"""Batch sizes that an artifact is checked at: one, two, odd, and more than a vector."""
CHECK_SEED = 20_240_229

QUANTISED_TOLERANCE = 0.05
FLOAT_TOLERANCE = 1e-3
"""Share of the outputs' spread by which the compiled graph may differ from the bundle's. fp32 sums
run in another order; behind a quantised layer such a difference may move one level of 127."""


@dataclass(frozen=True)
class Compiled:
    """What compiling gave besides the package."""

    options: dict[str, Any]
    constants: dict[str, Tensor]


def write_artifact(
    bundle: ModelBundle,
    folder: Path,
    *,
    control_size_bytes: int,
    recipe: str | None = None,
) -> Manifest:
    """Compile a bundle into an artifact folder.

    The folder is complete but not yet proven: `rankopt.artifact.verify` runs it in a fresh process.

    Raises:
        ExportError: AOTInductor refused the graph.
    """
    folder.mkdir(parents=True, exist_ok=True)
    load_kernels()
    compiled = _compile(bundle, folder / PROGRAM)
    unlifted = bundle.program.module(check_guards=False)
    parts = parts_in(unlifted, bundle.parts)
    constants = without_handles(compiled.constants, parts)
    more: tuple[str, ...] = ()
    if bundle.requests is not None:
        other = replace(
            bundle.requests,
            inductor_options=bundle.inductor_options,
            device=bundle.device,
            gpu=bundle.gpu,
        )
        constants |= named_for_requests(_compile(other, folder / REQUEST_PROGRAM).constants)
        write_request_checks(bundle, folder)
        more = (REQUEST_PROGRAM, REQUEST_CHECKS)
    entries = write_constants(constants, folder / CONSTANTS)
    stored = write_parts(parts, folder)
    save_file(make_checks(bundle), folder / CHECKS)
    environment = collect_environment()
    manifest = Manifest(
        model=bundle.card.name,
        recipe=recipe,
        made_at=now(),
        target=_target(bundle, environment),
        inputs=contract_of(bundle.card),
        outputs=tuple(
            OutputEntry(name=output.name, activation=output.activation)
            for output in bundle.card.outputs
        ),
        max_batch=MAX_BATCH,
        min_batch=bundle.card.min_batch,
        constants=tuple(e for e in entries if not e.name.startswith(REQUEST_CONSTANTS)),
        packed_for_fbgemm=fbgemm_layers(unlifted),
        requests=None if bundle.requests is None else request_form(bundle, entries),
        parts=stored.entries,
        part_code=dict(stored.code),
        part_packages=dict(stored.packages),
        arithmetic={
            **(bundle.requests.arithmetic if bundle.requests is not None else {}),
            **bundle.arithmetic,
        },
        capture=bundle.capture,
        operators=_operators(bundle),
        operator_schemas=_operator_schemas(bundle),
        judged_isa=current_isa(),
        libraries=environment.libraries,
        compiler_options={key: str(value) for key, value in bundle.inductor_options.items()},
        tolerance=tolerance_of(bundle),
        files={
            name: sha256_file(folder / name)
            for name in (PROGRAM, CONSTANTS, CHECKS, *more, *stored.files)
        },
        size_bytes=stored_bytes(entries) + sum(entry.size_bytes for entry in stored.entries),
        code_bytes=sum(
            (folder / name).stat().st_size for name in (PROGRAM, *more) if name.endswith(".pt2")
        ),
        control_size_bytes=control_size_bytes,
        card=bundle.card.model_dump(mode="json", exclude_none=True),
        card_folder=str(bundle.card.folder),
        checkpoint=bundle.checkpoint,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def without_handles(constants: Mapping[str, Tensor], handles: Collection[str]) -> dict[str, Tensor]:
    """Blank the handles of parts: they name modules of this process alone."""
    blank = torch.zeros(1, dtype=torch.int64)
    return {name: blank if name in handles else value for name, value in constants.items()}


def compiler_options(bundle: ModelBundle) -> dict[str, Any]:
    """Collect the options of one compile; nothing process-wide is set."""
    return {
        # Weights stay out of the library: mapped, shared, replaceable (design.md).
        "aot_inductor.package_constants_in_so": False,
        # Inductor writes tensors of up to eight elements into the code as literals, such as the
        # last layer's bias: new weights would then be scored with the old bias.
        "always_keep_tensor_constants": True,
        # A GPU's graph calls none of them.
        "aot_inductor.custom_ops_to_c_shims": aoti_c_shims() if bundle.device == "cpu" else {},
        **bundle.inductor_options,
    }


def _target(bundle: ModelBundle, environment: Environment) -> Target:
    gpu = bundle.gpu
    return Target(
        device=bundle.device,
        architecture=environment.architecture,
        isa=environment.isa,
        gpus=environment.gpus,
        capability=capability() if gpu is not None else None,
        tf32=gpu.tf32 if gpu is not None else None,
        graph_batch=gpu.graph_batch if gpu is not None else 0,
    )


def _compile(bundle: ModelBundle, package: Path) -> Compiled:
    options = compiler_options(bundle)
    bundle, program = moved_for(bundle)
    try:
        with tf32(bundle.gpu.tf32 if bundle.gpu is not None else None):
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(package), inductor_configs=options
            )
    except Exception as error:  # Inductor raises many unrelated types
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ExportError(
            f"{bundle.card.where}: AOTInductor refused the graph: " + "\n  ".join(lines[:6])
        ) from error
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    available = bundle.constants
    wanted = loader.get_constant_fqns()
    missing = sorted(set(wanted) - set(available))
    if missing:
        raise ExportError(
            f"{bundle.card.where}: the compiled graph reads constants that the bundle does not "
            f"hold: {missing}. This is a bug of rankopt; please report the model."
        )
    return Compiled(options, {name: available[name] for name in wanted})


def now() -> str:
    """Return the time for a manifest's `made_at`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def tolerance_of(bundle: ModelBundle) -> float:
    """Return how far outputs may lie from the bundle's, as a share of their spread."""
    quantised = bundle.provided & {"quantized_embeddings", "low_precision_dense"}
    return QUANTISED_TOLERANCE if quantised else FLOAT_TOLERANCE


def make_checks(bundle: ModelBundle) -> dict[str, Tensor]:
    """Run the bundle on made-up rows; real rows would carry users' data into the artifact."""
    contract = contract_of(bundle.card)
    tensors: dict[str, Tensor] = {}
    for batch in raised(CHECK_BATCHES, bundle.card.min_batch):
        generator = torch.Generator().manual_seed(CHECK_SEED + batch)
        features = random_features(contract, batch, generator)
        scores = bundle.run(features)
        tensors |= {f"{batch}/input/{name}": value for name, value in features.items()}
        tensors |= {f"{batch}/output/{name}": value for name, value in scores.items()}
    return {name: value.contiguous().clone() for name, value in tensors.items()}


def _operators(bundle: ModelBundle) -> tuple[str, ...]:
    spaces = {name.split("::")[0] for name in _operator_names(bundle)}
    return tuple(sorted(spaces & {"fbgemm", "rankopt"}))


def _operator_schemas(bundle: ModelBundle) -> dict[str, str]:
    names = sorted(name for name in _operator_names(bundle) if name.startswith("rankopt::"))
    return {name: schema_here(name) or "" for name in names}


def _operator_names(bundle: ModelBundle) -> set[str]:
    programs = [each.program for each in (bundle, bundle.requests) if each is not None]
    return {
        node.target._schema.name
        for program in programs
        for node in program.graph_module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    }
