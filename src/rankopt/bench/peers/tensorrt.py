"""torch_tensorrt: the exported module compiled by TensorRT, on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rankopt.bench.peers.eager import no_gpu
from rankopt.bench.peers.peer import Peer, PeerJob, Setting, product_of
from rankopt.models.card import KjtInput, ModelCard, RaggedIdsInput

if TYPE_CHECKING:
    from torch import Tensor

    from rankopt.bench.arms import ArmCallable


class TorchTensorrt(Peer):
    """`torch_tensorrt.compile` of the exported program, a profile of shapes for its batch sizes.

    What TensorRT does not take runs in PyTorch, as Torch-TensorRT splits it.

    Example:
        ```yaml
        - torch_tensorrt: {precision: [fp32, fp16]}
        ```
    """

    kind: ClassVar[str] = "torch_tensorrt"
    title: ClassVar[str] = "Torch-TensorRT"
    packages: ClassVar[tuple[str, ...]] = ("torch_tensorrt",)
    distributions: ClassVar[tuple[str, ...]] = ("torch", "torch-tensorrt")

    precision: tuple[Literal["fp32", "fp16"], ...] = Field(default=("fp32", "fp16"), min_length=1)
    """Types that kernels may be chosen from."""

    def why_not(self, card: ModelCard) -> str | None:
        """Say that there is no GPU, or that sizes of inputs depend on data."""
        if any(isinstance(item, KjtInput | RaggedIdsInput) for item in card.inputs):
            return "its profiles of shapes hold no ragged inputs"
        return no_gpu()

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        return product_of({"precision": self.precision})

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Export on the GPU and compile."""
        import torch
        import torch_tensorrt

        from rankopt.capture.export import dynamic_shapes, trace_example
        from rankopt.models.serving import ServingModule

        card = job.load_card()
        module = ServingModule(card, job.build_module()).eval().cuda()
        example = trace_example(card)
        names = card.tensor_names
        given = tuple(example[name].cuda() for name in names)
        types = {torch.float32} | ({torch.float16} if setting["precision"] == "fp16" else set())
        largest = max(job.batch_sizes)
        with torch.no_grad():
            program = torch.export.export(
                module, given, dynamic_shapes=dynamic_shapes(card, module), strict=False
            )
            compiled = torch_tensorrt.dynamo.compile(
                program,
                arg_inputs=[
                    torch_tensorrt.Input(
                        min_shape=(1, *each.shape[1:]),
                        opt_shape=(min(64, largest), *each.shape[1:]),
                        max_shape=(largest, *each.shape[1:]),
                        dtype=each.dtype,
                    )
                    for each in given
                ],
                enabled_precisions=types,
                truncate_double=True,
            )
        outputs = [output.name for output in card.outputs]

        def run(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with torch.inference_mode():
                scores: Any = compiled(*[features[name].cuda() for name in names])
            parts = scores if isinstance(scores, tuple | list) else [scores]
            return dict(zip(outputs, [part.cpu() for part in parts], strict=True))

        return run
