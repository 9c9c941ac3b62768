"""torch_compile: `torch.compile` with the inductor backend, compiled in the process that serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rankopt.bench.peers.peer import Peer, PeerJob, Setting, has_bags, product_of
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable

RECOMPILE_LIMIT = 64
"""Shapes that one process may compile for: each batch size may be one, and torch gives up at 8."""

Mode = Literal["default", "max-autotune-no-cudagraphs"]


class TorchCompile(Peer):
    """Inductor with frozen weights, as PyTorch's guide to inference on CPUs has it.

    Example:
        ```yaml
        - torch_compile: {mode: [default, max-autotune-no-cudagraphs], dynamic: [false, true]}
        ```
    """

    kind: ClassVar[str] = "torch_compile"
    title: ClassVar[str] = "torch.compile (inductor, frozen)"

    mode: tuple[Mode, ...] = Field(default=("default",), min_length=1)
    dynamic: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """False compiles anew for every batch size; a card with lists of ids is always dynamic."""
    cpp_wrapper: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """Call the kernels from C++ in place of Python."""

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        dynamic = (True,) if has_bags(card) else self.dynamic
        return product_of({"mode": self.mode, "dynamic": dynamic, "cpp_wrapper": self.cpp_wrapper})

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Compile at the first call of each shape, which is in the warm-up."""
        import torch

        # For the process, which is this arm's alone: as an option of the compile it comes after
        # the weights have become inputs, and nothing is packed (dcnv2-criteo was as slow as eager).
        torch._inductor.config.freezing = True
        options: dict[str, Any] = {
            **torch._inductor.list_mode_options(setting["mode"]),
            "cpp_wrapper": setting["cpp_wrapper"],
        }
        return compiled_model(job, "inductor", dynamic=setting["dynamic"], options=options)


def compiled_model(
    job: PeerJob, backend: str, *, dynamic: bool, options: dict[str, Any] | None
) -> ArmCallable:
    """Wrap the card's module in `torch.compile` as a callable of named tensors."""
    import torch
    import torch._dynamo
    import torch._inductor.config as inductor

    from rankopt.models.serving import ServingModule

    # Compile in this thread: a pool of compiler processes would still be there when others run.
    inductor.compile_threads = 1
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = 4 * RECOMPILE_LIMIT
    card = job.load_card()
    serving = ServingModule(card, job.build_module()).eval()
    for parameter in serving.parameters():
        parameter.requires_grad_(False)
    compiled = torch.compile(serving, backend=backend, dynamic=dynamic, options=options)
    names = card.tensor_names
    outputs = tuple(output.name for output in card.outputs)

    def run(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Inductor freezes weights only where gradients are off by no_grad.
        with torch.no_grad():
            scores = compiled(*[features[name] for name in names])
        return dict(zip(outputs, scores, strict=True))

    return run
