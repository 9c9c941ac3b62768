"""Bring a bundle's graph to a GPU: its `rankopt::` operators become those that CUDA compiles.

The result is a bundle like any other and still runs nowhere: its tensors move last, once the graph
is traced, so that all of this is tested where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from rankopt.bundle import ModelBundle
from rankopt.errors import ExportError
from rankopt.kernels.lookup import decode_plan, encode_plan
from rankopt.passes.graph import arguments, constant

SAME = frozenset(
    {
        "dot_interaction",
        "fm_interaction",
        "ragged_rows",
        "ragged_sum",
        "hstu_attention",
        "hstu_candidate_attention",
        "target_attention",
    }
)
"""Operators that take the same arguments on a GPU."""


def for_gpu(bundle: ModelBundle) -> ModelBundle:
    """Replace the operators of a bundle's graph by their versions for a GPU, constants unmoved.

    Raises:
        ExportError: an operator has none; names the pass that put it there.
    """
    from rankopt.kernels.triton import library  # registers torch.ops.rankopt_gpu

    del library

    def rewrite(module: GraphModule) -> None:
        refused = sorted(
            {
                str(node.target)
                for node in list(module.graph.nodes)
                if node.op == "call_function" and not _replace(module, node)
            }
        )
        if refused:
            raise ExportError(
                f"{bundle.card.where}: {', '.join(refused)} run on a CPU alone. Leave the pass out "
                "that put them into the graph: quantize_dense for linear layers (take precision in "
                "its place), hoist_requests for request_matmul."
            )

    return bundle.edit(rewrite, requests=None)


def _replace(module: GraphModule, node: Node) -> bool:
    """Replace a node where that is needed; False where it cannot be."""
    space, _, rest = str(node.target).partition(".")
    if space == "fbgemm":
        return False
    if space != "rankopt":
        return True
    name = rest.partition(".")[0]
    ops = torch.ops.rankopt_gpu
    if name in SAME:
        node.target = getattr(ops, name).default
        return True
    if name not in ("lookup_rows", "lookup_sequences"):
        return False
    store, plan_node, inputs, *sizes = arguments(node)
    plan = constant(module, plan_node)
    if plan is None:
        return False
    if name == "lookup_sequences":
        numbers = plan.flatten().tolist()
        node.target = ops.sequences_planned.default
        node.args = (store, numbers, inputs, *sizes)
        return True
    from rankopt.kernels.triton.lookup import planned

    ordered = encode_plan(planned(decode_plan(plan)))
    held = f"{str(plan_node.target).replace('.', '_')}_gpu"
    module.register_buffer(held, ordered)
    with module.graph.inserting_before(node):
        there = module.graph.get_attr(held)
    node.target = ops.lookup_planned.default
    node.args = (store, there, ordered.flatten().tolist(), inputs, *sizes)
    return True


def move(program: ExportedProgram, device: str) -> ExportedProgram:
    """Move a program's constants and everything it makes to a device; changes the one given."""
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, device)


def moved_for(bundle: ModelBundle) -> tuple[ModelBundle, ExportedProgram]:
    """Return what is stored (a bundle on the CPU) and what is compiled, for a bundle's device."""
    if bundle.device == "cpu":
        return bundle, bundle.program
    stored = for_gpu(bundle)
    # Its own copy: moving replaces the program's tensors in place.
    return stored, move(replace(stored).edit(lambda _: None).program, bundle.device)
