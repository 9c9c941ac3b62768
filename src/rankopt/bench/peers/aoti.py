"""aoti: the exported module through AOTInductor, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rankopt.bench.peers.peer import Peer, PeerJob, Setting, product_of
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable

PACKAGE = "model.pt2"


class Aoti(Peer):
    """`torch.export` with a dynamic batch, then AOTInductor; none of rankopt's passes.

    Example:
        ```yaml
        - aoti: {freezing: [true, false]}
        ```
    """

    kind: ClassVar[str] = "aoti"
    title: ClassVar[str] = "AOTInductor"
    has_files: ClassVar[bool] = True

    freezing: tuple[bool, ...] = Field(default=(True, False), min_length=1)
    """Fold constants and pack the weights of dense layers for the machine."""

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        return product_of({"freezing": self.freezing})

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Export and compile."""
        import torch

        from rankopt.capture.export import trace
        from rankopt.models.serving import ServingModule

        card = job.load_card()
        program = trace(ServingModule(card, job.build_module()).eval(), card)
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(folder / PACKAGE),
                inductor_configs={"freezing": setting["freezing"]},
            )

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Load the package."""
        import torch

        assert folder is not None
        runner = torch._inductor.aoti_load_package(str(folder / PACKAGE))
        card = job.load_card()
        names = card.tensor_names
        outputs = tuple(output.name for output in card.outputs)

        def run(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            scores = runner(*[features[name] for name in names])
            return dict(zip(outputs, scores, strict=True))

        return run
