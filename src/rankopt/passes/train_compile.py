"""The training pass `train_compile`: the dense part through torch.compile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from torch import Tensor

    from rankopt.train.setup import TrainingSetup


class TrainCompile(TrainingPass):
    """Compile forward and backward of the dense part with torch.compile.

    Lookups stay out of the graph: their backward has effects of its own or makes sparse gradients.
    A batch of another size than the settings' (the last one) runs uncompiled, so that it does not
    cause a second compilation. Compiling takes the first step about a minute; `rankopt ab` counts
    steps after it.

    Example:
        ```yaml
        - train_compile: {backend: inductor}
        ```
    """

    kind: ClassVar[str] = "train_compile"
    provides: ClassVar[frozenset[str]] = frozenset({"compiled"})
    forbids: ClassVar[frozenset[str]] = frozenset({"sharded_tables"})

    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`aot_eager` traces without generating code, to find out what breaks a graph."""

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Wrap the forward that steps call."""
        import torch
        from torch import nn

        from rankopt.models.layers import EmbeddingBags

        disable: Any = torch.compiler.disable
        tables = nn.Embedding | nn.EmbeddingBag | EmbeddingBags
        lookups: list[Any] = [part for part in setup.module.modules() if isinstance(part, tables)]
        for lookup in lookups:
            lookup.forward = disable(lookup.forward)
        plain = setup.forward
        compiled = torch.compile(plain, backend=self.backend, dynamic=False)
        parts = setup.ranks.world_size * setup.num_micro_batches
        batch_size = setup.settings.batch_size // parts

        def forward(*tensors: Tensor) -> Any:
            chosen = compiled if len(tensors[0]) == batch_size else plain
            return chosen(*tensors)

        return replace(setup, forward=forward)
