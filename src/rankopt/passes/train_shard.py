"""The training pass `train_shard`: tables cut over the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rankopt.errors import Problem, UsageError
from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.environment import Environment
    from rankopt.models.card import ModelCard
    from rankopt.sharding.schema import ShardPlan
    from rankopt.train.setup import TrainingSetup


class TrainShard(TrainingPass):
    """Cut torchrec's collections over the ranks of a run, and train the rest data-parallel.

    The plan is a file of `rankopt shard plan --out`, or is made for a topology of as many ranks as
    the run has. Tables are updated in the backward by fbgemm's fused kernels; `adagrad` is
    torch.optim.Adagrad's mathematics, so the weights are those of one process to rounding.
    `communication` sends pooled vectors and their gradients in 16 bits, each rounded once: judge
    the quality. In one process nothing is cut, and the tables are fused as
    `train_fuse_embeddings` does, with the same optimizer.

    Example:
        ```yaml
        - train_shard: {topology: 2-cpu-hosts, communication: fp32}
        ```
    """

    kind: ClassVar[str] = "train_shard"
    provides: ClassVar[frozenset[str]] = frozenset({"sharded_tables"})
    forbids: ClassVar[frozenset[str]] = frozenset(
        {"fused_tables", "distinct_ids", "batch_parts", "compiled"}
    )

    topology: str | None = None
    """A topology file, or its name in benchmarks/topologies, of as many ranks as the run has."""
    plan: str | None = None
    """What `rankopt shard plan --out` wrote, in place of a topology."""
    communication: Literal["fp32", "fp16", "bf16"] = "fp32"
    """What pooled vectors and their gradients are sent as."""
    optimizer: Literal["adagrad", "rowwise_adagrad", "sgd"] = "adagrad"
    """Of the tables."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The card's `table_learning_rate`, else its `learning_rate`, when None."""
    eps: float = Field(default=1e-10, gt=0)
    """Added to the root of Adagrad's sum."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """Want one of topology and plan, and that it is there."""
        if (self.topology is None) == (self.plan is None):
            return [Problem("", "must name either a topology or a plan")]
        if self.plan is not None:
            there = Path(self.plan).is_file()
            hint = "Write one: rankopt shard plan CARD --topology T --out FILE."
            return [] if there else [Problem("plan", "is no file", self.plan, hint)]
        from rankopt.sharding.topology import load_topology

        try:
            load_topology(str(self.topology))
        except UsageError as error:
            return list(error.problems) or [Problem("topology", str(error))]
        return []

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Shard the module."""
        if setup.ranks.is_alone:
            return self._fused(setup)
        from rankopt.train.distributed.sharded import ShardedTables

        given = setup.settings
        if given.table_optimizer != self.optimizer:
            setup.note(
                f"the tables are trained with {self.optimizer}, not with the card's "
                f"{given.table_optimizer}"
            )
        plan = self._plan(setup)
        sharded = ShardedTables(
            setup.module,
            plan,
            setup.ranks,
            optimizer=self.optimizer,
            learning_rate=self._rate(setup),
            eps=self.eps,
            communication=self.communication,
        )
        setup.serving.model = sharded.module
        ways = sorted({table.sharding_type for table in plan.tables})
        setup.note(f"{len(plan.tables)} tables cut over {plan.world_size} ranks: {', '.join(ways)}")
        return replace(setup, sharded=sharded)

    def _fused(self, setup: TrainingSetup) -> TrainingSetup:
        from rankopt.passes.train_fuse_embeddings import TrainFuseEmbeddings

        setup.note("one process: nothing is cut, the tables are fused with the same optimizer")
        fuse = TrainFuseEmbeddings(
            optimizer=self.optimizer, learning_rate=self._rate(setup), eps=self.eps
        )
        return fuse.set_up(setup)

    def _rate(self, setup: TrainingSetup) -> float:
        given = setup.settings
        return self.learning_rate or given.table_learning_rate or given.learning_rate

    def _plan(self, setup: TrainingSetup) -> ShardPlan:
        """Read or make the plan; the first rank's holds for all."""
        from rankopt.sharding.schema import ShardPlan

        num_ranks, wanted = setup.ranks.world_size, self._num_ranks()
        if wanted != num_ranks:
            what = f"must be of as many ranks as the run has ({num_ranks})"
            field = "topology" if self.plan is None else "plan"
            raise UsageError(problems=[Problem(f"train_shard.{field}", what, wanted)])
        text = self._made(setup).model_dump_json() if setup.ranks.is_first else ""
        return ShardPlan.model_validate_json(setup.ranks.broadcast(text))

    def _made(self, setup: TrainingSetup) -> ShardPlan:
        from rankopt.jobs.shard_plan import plan_shards, read_plan
        from rankopt.train.distributed.sharded import FUSED

        if self.plan is not None:
            return read_plan(Path(self.plan))
        return plan_shards(
            setup.card,
            str(self.topology),
            batch_size=-(-setup.settings.batch_size // setup.ranks.world_size),
            optimizer=FUSED[self.optimizer],
            communication=self.communication,
        )

    def _num_ranks(self) -> int:
        """Read how many ranks the topology or plan is of."""
        if self.plan is not None:
            from rankopt.jobs.shard_plan import read_plan

            return read_plan(Path(self.plan)).world_size
        from rankopt.sharding.topology import load_topology

        return load_topology(str(self.topology)).world_size
