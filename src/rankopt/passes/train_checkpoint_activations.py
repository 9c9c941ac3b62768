"""The training pass `train_checkpoint_activations`: compute again what memory does not hold."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from torch import nn

    from rankopt.train.setup import TrainingSetup


class TrainCheckpointActivations(TrainingPass):
    """Keep the inputs of the named modules alone, and compute their insides again in the backward.

    Weights are the same; memory falls by the activations inside, time grows by their forward.
    Without names every outermost nn.Sequential without tables is taken, as MLPs mostly are.

    Example:
        ```yaml
        - train_checkpoint_activations: {modules: [top, "cross*"]}
        ```
    """

    kind: ClassVar[str] = "train_checkpoint_activations"
    forbids: ClassVar[frozenset[str]] = frozenset({"sharded_tables"})

    modules: tuple[str, ...] = ()
    """Names of modules; `*` stands for anything."""

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Wrap the modules' forward."""
        import torch
        from torch.utils.checkpoint import checkpoint

        chosen = self._chosen(setup)
        for name, module in chosen.items():
            forward: Any = module.forward

            def again(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return _forward(*args, **kwargs)
                return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

            module.forward = again
            setup.note(f"{name}: computed again in the backward")
        return replace(setup) if chosen else setup

    def _chosen(self, setup: TrainingSetup) -> dict[str, nn.Module]:
        """Pick outermost modules, and none that holds a table: a lookup must happen once."""
        from torch import nn

        chosen: dict[str, nn.Module] = {}
        matched = set()
        for name, module in setup.module.named_modules():
            hits = {pattern for pattern in self.modules if fnmatchcase(name, pattern)}
            matched |= hits
            wanted = hits if self.modules else isinstance(module, nn.Sequential)
            inside = any(name.startswith(f"{outer}.") for outer in chosen)
            if not wanted or inside or not name:
                continue
            if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules()):
                setup.note(f"{name} holds tables, whose lookups must happen once")
                continue
            chosen[name] = module
        for pattern in sorted(set(self.modules) - matched):
            setup.note(f"no module is named {pattern!r}")
        return chosen
