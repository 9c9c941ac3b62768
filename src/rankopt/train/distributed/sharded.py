"""Training with tables cut over the ranks: torchrec's DistributedModelParallel in a step of ours.

torchrec's TrainPipelineSparseDist is not used: it hides the exchange of ids behind the step on CUDA
streams, which CPUs have none of, and it finds the ids by tracing from the batch to the collections,
while here a KeyedJaggedTensor is made of flat tensors inside the forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from rankopt.errors import Problem, UsageError
from rankopt.sharding.distributed import FusedOptimizer, shard_module
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.setting import Communication
from rankopt.train.distributed.exchange import refuse_batch_statistics
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.distributed.weights import cut_into
from rankopt.train.settings import TrainSettings

if TYPE_CHECKING:
    from torchrec.distributed import DistributedModelParallel

TableOptimizer = Literal["adagrad", "rowwise_adagrad", "sgd"]
FUSED: dict[TableOptimizer, FusedOptimizer] = {
    "adagrad": "adagrad",
    "rowwise_adagrad": "row_wise_adagrad",
    "sgd": "sgd",
}


class ShardedTables:
    """A module whose tables are cut over the ranks, and what its steps exchange.

    Each rank's loss is weighed by its rows; torchrec and DDP take means over ranks, so it is
    multiplied by their number first.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardPlan,
        ranks: Ranks,
        *,
        optimizer: TableOptimizer,
        learning_rate: float,
        eps: float,
        communication: Communication,
    ) -> None:
        """Shard the module; its weights stay those of the first rank.

        Raises:
            UsageError: the plan is of another number of ranks, does not fit the module, or leaves a
                table to a kernel that has no such optimizer.
        """
        refuse_batch_statistics(module)
        self.loss_scale = float(ranks.world_size)
        self._ranks, self._plan = ranks, plan
        self._optimizer, self._rate, self._eps = optimizer, learning_rate, eps
        _check_kernels(plan, optimizer)
        whole = {name: value.detach().clone() for name, value in module.state_dict().items()}
        ranks.broadcast_(list(whole.values()))
        self.module: DistributedModelParallel = shard_module(
            module,
            plan,
            optimizer=FUSED[optimizer],
            learning_rate=learning_rate,
            eps=eps,
            communication=communication,
        )
        cut_into(self.module, whole)

    def __call__(self, loss: float) -> float:
        """Return the loss of all ranks together; gradients were exchanged in the backward."""
        return self._ranks.sum([loss])[0]

    def make_optimizers(
        self, settings: TrainSettings, dense_options: Mapping[str, Any]
    ) -> list[Optimizer]:
        """Make the optimizers of all weights; fused kernels update tables in the backward."""
        tables = {
            f"{one.path}.{kind}.{one.key}.weight" for one in self._plan.tables for kind in KINDS
        }
        left = dict(in_backward_optimizer_filter(self.module.named_parameters()))
        trained = {name: p for name, p in left.items() if p.requires_grad}
        own = [parameter for name, parameter in trained.items() if name in tables]
        dense = [parameter for name, parameter in trained.items() if name not in tables]
        rate, decay = settings.learning_rate, settings.weight_decay
        optimizers: list[Optimizer] = []
        if dense:
            optimizers.append(AdamW(dense, lr=rate, weight_decay=decay, **dense_options))
        if own and self._optimizer == "sgd":
            optimizers.append(SGD(own, lr=self._rate))
        elif own:
            optimizers.append(Adagrad(own, lr=self._rate, eps=self._eps))
        fused: Any = self.module.fused_optimizer
        return [*optimizers, fused]


KINDS = ("embedding_bags", "embeddings")
"""What torchrec's collections call their tables."""


def _check_kernels(plan: ShardPlan, optimizer: TableOptimizer) -> None:
    """Refuse row-wise Adagrad for tables that PyTorch's optimizers update."""
    dense = [table.name for table in plan.tables if table.compute_kernel == "dense"]
    if optimizer == "rowwise_adagrad" and dense:
        what = (
            "has a dense kernel in the plan, whose optimizer is PyTorch's: it has no row-wise one"
        )
        hint = "Plan with --kernels fused and without data_parallel, or take adagrad."
        raise UsageError(problems=[Problem(name, what, hint=hint) for name in dense])
