"""The bundle: what passes rewrite.

An exported graph with its weights, the card it came from and a few real rows to check it on. It
is a frozen value: a pass returns a new one, so dropping a pass means keeping the old bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from rankopt.capture.canonical import canonicalise
from rankopt.capture.export import export_module
from rankopt.capture.model import capture_model
from rankopt.capture.parts import EagerPart
from rankopt.capture.requests import REQUEST_INDEX, export_requests
from rankopt.hashes import FileRecord
from rankopt.models.card import ModelCard
from rankopt.tables import TableBatch


@dataclass(frozen=True)
class OperationCount:
    """Multiply-adds of one request, counted before any pass has put other operators into a graph.

    Attributes:
        candidates: of the request.
        left: in the form that takes request-level inputs once.
        before: in the plain form.
    """

    candidates: int
    left: int
    before: int


@dataclass(frozen=True)
class GpuSettings:
    """How an artifact runs on a GPU.

    Attributes:
        tf32: multiply fp32 matrices in TF32.
        graph_batch: batches up to this are replayed as CUDA graphs.
    """

    tf32: bool = False
    graph_batch: int = 256


@dataclass(frozen=True)
class ModelBundle:
    """A model on its way to an artifact.

    Attributes:
        card: where it came from.
        program: the exported graph, inference only, weights inside.
        sample: flat features of real rows, to measure drift on.
        batches: table batches in the graph, by the name of the constant that holds their rows.
        inductor_options: compiler options, patched around the compile and nowhere else.
        provided: what passes have established (`fused_embeddings`, `int8_dense`, ...).
        parts: submodules that stay eager and that the graph calls, by id.
        capture: what tracing assumed, left out or rewrote, one sentence each.
        form: `rows` takes a row of every input for each candidate, `requests` takes request-level
            inputs once for each request and `request_index`.
        requests: the same model in the form `requests`, where a pass has made one.
        operations: of the form `requests`: what it saves on paper.
        arithmetic: of layers that had theirs chosen by timing: int8, fp16, fp32 or fbgemm.
        device: what it is compiled for; until then it runs on the CPU.
        gpu: settings of an artifact for a GPU.
        checkpoint: where the weights came from; None for random ones.
    """

    card: ModelCard
    program: ExportedProgram
    sample: Mapping[str, Tensor]
    batches: Mapping[str, TableBatch] = field(default_factory=dict)
    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    provided: frozenset[str] = frozenset()
    parts: Mapping[str, EagerPart] = field(default_factory=dict)
    capture: tuple[str, ...] = ()
    form: Literal["rows", "requests"] = "rows"
    requests: ModelBundle | None = None
    operations: OperationCount | None = None
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    gpu: GpuSettings | None = None
    checkpoint: FileRecord | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the flat tensors that the graph takes, in order."""
        names = self.card.tensor_names
        return names if self.form == "rows" else (*names, REQUEST_INDEX)

    def run(self, features: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run the graph as it stands (not compiled) and name its outputs."""
        given = self.sample if features is None else features
        inputs = [given[name] for name in self.input_names]
        with torch.no_grad():
            scores = self.program.module(check_guards=False)(*inputs)
        names = [output.name for output in self.card.outputs]
        return {name: score.clone() for name, score in zip(names, scores, strict=True)}

    @property
    def constants(self) -> dict[str, Tensor]:
        """Every parameter, buffer and lifted constant that the graph reads."""
        found: dict[str, Tensor] = dict(self.program.state_dict)
        lifted = self.program.constants.items()
        found |= {name: value for name, value in lifted if isinstance(value, Tensor)}
        return {name: tensor.detach() for name, tensor in found.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of parameters and tables as they will be stored; tied ones count once."""
        seen = {(value.data_ptr(), value.nbytes): value.nbytes for value in self.constants.values()}
        own = sum(seen.values()) + sum(part.size_bytes for part in self.parts.values())
        return own + (self._second_copies() if self.requests is not None else 0)

    def _second_copies(self) -> int:
        """Count the bytes of what the other form alone reads."""
        other = {} if self.requests is None else self.requests.constants
        mine = self.constants
        return sum(
            value.nbytes
            for name, value in other.items()
            if name not in mine or not _equal(mine[name], value)
        )

    def edit(self, rewrite: Callable[[GraphModule], None], **changes: Any) -> ModelBundle:
        """Rewrite the graph in place on a copy and trace the result again.

        Tracing again, rather than patching the signature by hand, checks the new graph with fake
        tensors, drops constants that nothing reads any more, and keeps the dynamic dims honest.
        """
        graph_module = self.program.module(check_guards=False)
        rewrite(graph_module)
        graph_module.graph.eliminate_dead_code()
        _drop_unread(graph_module)
        graph_module.graph.lint()
        graph_module.recompile()
        trace = export_module if self.form == "rows" else export_requests
        program = trace(graph_module, self.card)
        return replace(self, program=program, **changes)


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # NaN equals itself here: what counts is that the bytes are stored once.
    same = left.data_ptr() == right.data_ptr()
    return same or torch.equal(left.nan_to_num(), right.nan_to_num())


def build_bundle(
    card: ModelCard,
    model: nn.Module,
    sample: Mapping[str, Tensor],
    checkpoint: Path | None = None,
) -> ModelBundle:
    """Export a model for serving, its layers and lookups in the forms that the passes know.

    Args:
        card: describes the model's inputs and outputs.
        model: the module with its weights, in eval mode.
        sample: flat features of real rows.
        checkpoint: where the module's weights were read from.

    Raises:
        ExportError: the module cannot be traced; names its line and what usually helps.
    """
    captured = capture_model(card, model)
    bundle = ModelBundle(
        card=card,
        program=captured.program,
        sample=sample,
        parts=captured.parts,
        checkpoint=None if checkpoint is None else FileRecord.of(checkpoint),
    )
    notes = list(captured.notes)
    rewritten = bundle.edit(lambda module: notes.extend(canonicalise(module)))
    return replace(rewritten, capture=tuple(notes))


def _drop_unread(graph_module: GraphModule) -> None:
    """Remove weights that no node reads: torch.export would carry them along."""
    read = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
    called = tuple(f"{node.target}." for node in graph_module.graph.find_nodes(op="call_module"))
    held = [name for name, _ in graph_module.named_parameters(remove_duplicate=False)]
    held += [name for name, _ in graph_module.named_buffers(remove_duplicate=False)]
    for name in held:
        if name not in read and not name.startswith(called or ("\0",)):
            parent, _, leaf = name.rpartition(".")
            delattr(graph_module.get_submodule(parent), leaf)
