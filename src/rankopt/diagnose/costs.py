"""What an operator's time counts as, and how many operations and bytes it takes at least.

Both go by the operator's name and the tensors it was called with, so a model nobody here wrote is
read the same way. What cannot be counted stays None.

Shapes: M rows, K inputs and N outputs of a product.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankopt.diagnose.kernel_work import KERNELS, Arithmetic, Operations, planned_bytes
from rankopt.diagnose.profile import Notes, Site
from rankopt.diagnose.schema import Part

# First match wins; matched against the operator's name without its library.
_PARTS: tuple[tuple[str, Part], ...] = (
    (r"eager_part", "eager part"),
    (r"embedding|lookup", "lookup"),
    (r"attention|^ragged_", "attention"),
    (r"interaction|cross|(^|_)fm($|_)", "interaction"),
    (r"linear|^mlp|addmm|^mm$|^gru|^lstm|mkldnn_rnn|conv", "dense"),
    (r"quanti[sz]e|choose_qparams", "quantise"),
)
_PRODUCTS_OF_INPUTS = re.compile(r"(^|_)(bmm|baddbmm|matmul|einsum)($|_)")
_INT8 = re.compile(r"int8|fbgemm|qlinear")


@dataclass(frozen=True)
class Cost:
    """The least an operator has to do.

    Attributes:
        num_operations: a multiply and an add are two; None where they are not counted.
        num_bytes: constants, inputs and results, each once; a table's rows as often as read.
        arithmetic: which of the machine's peaks most of them are held against.
        parameter_bytes: constants among them.
        by_arithmetic: the operations, each kind by itself.
    """

    num_operations: int | None
    num_bytes: int
    arithmetic: Arithmetic | None
    parameter_bytes: int
    by_arithmetic: Operations = field(default_factory=dict)


def plain_name(site: Site) -> str:
    """Return an operator's name without library and variant: `aten::bmm_out` reads `bmm`."""
    return site.name.rpartition("::")[2].removesuffix("_out").removesuffix("_default")


def part_of(site: Site, notes: Notes, sequence_lengths: Collection[int]) -> Part:
    """Tell what an operator's time counts as.

    A loop that the compiler fused of several kinds counts as the first of: reading a table;
    anything along a history; a product of two activations; other.

    Args:
        site: the operator.
        notes: what it was called with.
        sequence_lengths: how long histories are: an axis of such a size between the first and the
            last is one.
    """
    if site.generated:
        return _part_of_loop(site, notes, sequence_lengths)
    name = plain_name(site)
    along = _along_a_history(notes, sequence_lengths)
    if _PRODUCTS_OF_INPUTS.search(name):
        weights = notes.arguments[1:]
        if name == "matmul" and weights and weights[-1].dim() <= 2 and not along:
            return "dense"
        if name == "request_matmul" and notes.outputs:  # one query's scores of a history
            along = along or notes.outputs[0].shape[-1] in sequence_lengths
        return "attention" if along else "interaction"
    for pattern, part in _PARTS:
        if re.search(pattern, name):
            return part
    softmax = "softmax" in name
    return "attention" if along or softmax else "other compiled code"


def _part_of_loop(site: Site, notes: Notes, sequence_lengths: Collection[int]) -> Part:
    tables = any(_is_table(constant) for constant in notes.constants)
    ids = any(tensor.dtype in (torch.int64, torch.int32) for tensor in notes.inputs)
    if "embedding" in site.name and tables and ids:
        return "lookup"
    if _along_a_history(notes, sequence_lengths):
        return "attention"
    if _PRODUCTS_OF_INPUTS.search(site.name):
        return "interaction"
    return "other compiled code"


def _is_table(constant: Tensor) -> bool:
    return constant.dim() == 2 and constant.shape[0] > 1


def _along_a_history(notes: Notes, lengths: Collection[int]) -> bool:
    held = [*notes.inputs, *notes.outputs]
    return any(t.dim() >= 3 and any(size in lengths for size in t.shape[1:-1]) for t in held)


def cost_of(site: Site, notes: Notes, part: Part, row_bytes_read: int | None) -> Cost:
    """Count what an operator has to do.

    Args:
        site: the operator.
        notes: what it was called with.
        part: from `part_of`.
        row_bytes_read: of a lookup, bytes of the rows it reads; None where not known.
    """
    name = plain_name(site)
    tables = part == "lookup"
    constants = [c for c in notes.constants if not (tables and c.numel() > _TABLE_ELEMENTS)]
    inputs = notes.inputs
    if tables and not notes.constants and inputs:
        inputs = inputs[1:]  # an eager lookup: its table is its first input
    parameter_bytes = _bytes(constants)
    planned = planned_bytes(name, notes)
    if planned is None:
        planned = _bytes(inputs) + _bytes(notes.outputs) + (row_bytes_read or 0)
    work: Operations = {} if site.generated else _operations(site, notes)
    most = max(work.items(), key=lambda item: item[1])[0] if work else None
    return Cost(
        num_operations=sum(work.values()) if work else None,
        num_bytes=parameter_bytes + planned,
        arithmetic=most,
        parameter_bytes=parameter_bytes,
        by_arithmetic=work,
    )


_TABLE_ELEMENTS = 4096
"""Constants of a lookup above this are tables; below it, where they lie."""


def _bytes(tensors: Iterable[Tensor]) -> int:
    seen: dict[tuple[int, int], int] = {}
    for number, tensor in enumerate(tensors):
        # An activation is kept as its form alone, which lies nowhere.
        place = number if tensor.is_meta else tensor.data_ptr()
        seen[place, tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _operations(site: Site, notes: Notes) -> Operations:
    """Count a kernel's operations; nothing where they are not counted."""
    name = plain_name(site)
    if name in KERNELS:
        return KERNELS[name](site, notes) or {}
    product = _product(name, notes)
    return {} if product is None else {_arithmetic(name, notes): product}


def _product(name: str, notes: Notes) -> int | None:
    """Count a product's operations, 2 M K N."""
    given = [tensor for tensor in notes.arguments if tensor.is_floating_point()]
    results = notes.outputs
    if not results and given:
        results, given = given[:1], given[1:]  # written into its first argument
    if not results:
        return None
    left: Tensor | None = None
    if "linear" in name or name in ("mm", "bmm", "matmul", "request_matmul"):
        left = given[0] if given else None
    elif name in ("addmm", "baddbmm"):
        left = given[1] if len(given) > 1 else None
    if left is None or left.dim() < 1:
        return None
    return 2 * results[0].numel() * left.shape[-1]


def _arithmetic(name: str, notes: Notes) -> Arithmetic:
    if _INT8.search(name):
        return "int8"
    dtypes = {tensor.dtype for tensor in notes.arguments}
    return "bf16" if torch.bfloat16 in dtypes else "fp32"


def describe_shapes(notes: Notes) -> str:
    """Write the shapes of an operator's inputs and results; long lists are cut."""
    given = [_shape(tensor) for tensor in notes.inputs]
    made = [_shape(tensor) for tensor in notes.outputs]
    return f"{_listed(given)} -> {_listed(made)}" if made else _listed(given)


def _shape(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}[{', '.join(map(str, tensor.shape))}]"


def _listed(shapes: list[str], shown: int = 4) -> str:
    more = len(shapes) - shown
    return ", ".join(shapes[:shown]) + (f" and {more} more" if more > 0 else "")
