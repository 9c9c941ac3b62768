"""The processes that train one model together, and the few things they say to each other.

Started by torchrun or by Ray Train, every process runs the same code on the same card. One that
fails says so before it leaves; the others then end without a word of their own, so that the reader
sees the message once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rankopt.errors import EnvironmentProblem, Problem, RankoptError

if TYPE_CHECKING:
    from torch import Tensor

Launcher = Literal["none", "torchrun", "ray"]
Value = TypeVar("Value")

TIMEOUT_S = 6 * 3600
"""For how long ranks wait for each other: one may read limits or write a checkpoint meanwhile. A
rank that ends is noticed at once, since its connections close."""

_ALIGNMENT = 8
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CLAIM, _SEEN = "rankopt/failed", "rankopt/seen"
_SEEN_S, _LOOK_S = 5.0, 0.05


class OtherRankFailed(RankoptError):  # noqa: N818 - it says nothing itself
    """Another rank failed and has said why; this one has nothing to add."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. Every method is called by all of them alike.

    Attributes:
        rank: which one this is, in [0, world_size).
        world_size: how many there are.
        local_rank: which one on its host.
        backend: what they talk through; None for one process.
        launcher: what started them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    backend: str | None = None
    launcher: Launcher = "none"

    @classmethod
    def alone(cls) -> Ranks:
        """Return the one process of a run without others."""
        return cls()

    @classmethod
    def of_group(cls, launcher: Launcher) -> Ranks:
        """Describe the process group that has been set up."""
        from torch import distributed

        return cls(
            distributed.get_rank(),
            distributed.get_world_size(),
            int(os.environ.get("LOCAL_RANK", "0")),
            distributed.get_backend(),
            launcher,
        )

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.world_size == 1

    def barrier(self) -> None:
        """Wait until all have come here."""
        if not self.is_alone:
            from torch import distributed

            distributed.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers over all ranks, in float64; the same result on each."""
        if self.is_alone:
            return list(values)
        import torch
        from torch import distributed

        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(value) for value in total]

    def any(self, flag: bool, group: Any = None) -> bool:
        """Tell whether it holds on any rank; asks a group of `new_group` where one is given."""
        if self.is_alone:
            return flag
        import torch
        from torch import distributed

        number = torch.tensor([float(flag)])
        distributed.all_reduce(number, group=group)
        return bool(number)

    def new_group(self) -> Any:
        """Make a group for collectives that do not mix with the step's; None for one process."""
        if self.is_alone:
            return None
        from torch import distributed

        return distributed.new_group(backend="gloo")

    def broadcast(self, value: Value) -> Value:
        """Return the first rank's value, a small plain object, on every rank."""
        if self.is_alone:
            return value
        from torch import distributed

        held: list[Any] = [value]
        distributed.broadcast_object_list(held, src=0)
        result: Value = held[0]
        return result

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Put the first rank's values into every rank's tensors."""
        if not self.is_alone:
            from torch import distributed

            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def reseed(self, seed: int) -> None:
        """Give every rank random numbers of its own, such as dropout's; one process keeps its."""
        if not self.is_alone:
            import torch

            torch.manual_seed(seed + (self.rank << 32))

    def first_then_others(self, make: Callable[[], Value]) -> Value:
        """Call on the first rank, then on the others: what it caches, they find."""
        if not self.is_first:
            self.barrier()
        result = make()
        if self.is_first:
            self.barrier()
        return result

    def gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Give every rank the tensors of all, in the order of ranks.

        Numbers, types and shapes may differ from rank to rank: everything travels as bytes, in two
        collectives.
        """
        if self.is_alone:
            return [list(tensors)]
        import torch
        from torch import distributed

        own = _pack(tensors)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        distributed.all_gather(sizes, torch.tensor([len(own)]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        distributed.all_gather(parts, padded)
        return [_unpack(part) for part in parts]

    def describe(self) -> dict[str, Any]:
        """Describe the run's processes for metrics.json."""
        return {
            "world_size": self.world_size,
            "backend": self.backend,
            "launcher": self.launcher,
        }


def started_by_torchrun() -> bool:
    """Tell whether the environment names this process's place among others."""
    return all(name in os.environ for name in _VARIABLES)


def backend_here() -> str:
    """Name the backend: gloo, and nccl beside it for tensors on GPUs."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


@contextlib.contextmanager
def join() -> Iterator[Ranks]:
    """Join the process group that torchrun's variables name, for the block; alone without them.

    Raises:
        EnvironmentProblem: the others cannot be reached.
        OtherRankFailed: another rank failed, and says why.
    """
    if not started_by_torchrun():
        yield Ranks.alone()
        return
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, world_size = next(rendezvous("env://"))
        # Torchrun keeps its store over restarts, and with it the addresses of ranks that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        distributed.init_process_group(
            backend_here(),
            store=PrefixStore(f"rankopt/attempt-{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = f"the ranks cannot be joined: {str(error).splitlines()[0]}"
        raise EnvironmentProblem(problems=[Problem(where, what)]) from error
    with once():
        yield Ranks.of_group("torchrun")
    distributed.destroy_process_group()


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Let the first rank that fails in the block say why, and the others end in silence.

    Raises:
        OtherRankFailed: on every rank but the first that failed.
        EnvironmentProblem: another rank was lost, and could not say why.
    """
    try:
        yield
    except Exception as error:
        lost = not isinstance(error, RankoptError) and _is_lost_connection(error)
        if not _claim(lost=lost):
            raise OtherRankFailed("another rank failed") from error
        if not lost:
            raise
        problem = Problem(
            f"rank {os.environ.get('RANK', '?')}",
            "lost another rank, which ended without saying why",
            hint="Look whether a process was killed, for example for its memory.",
        )
        raise EnvironmentProblem(problems=[problem]) from error


def _claim(*, lost: bool) -> bool:
    """Tell whether this is the first rank to fail, as it is where nobody answers any more.

    The first rank leaves the group, which makes the others stop, and waits a little for them to
    have seen who failed: the store they look into may be its own.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    try:
        store = distributed_c10d._get_default_store()
        others = distributed.get_world_size() - 1
        is_first = store.add(_CLAIM, 1) == 1
        if not is_first:
            store.add(_SEEN, 1)
            return False
        distributed.destroy_process_group()
        until = time.monotonic() + _SEEN_S
        while store.add(_SEEN, 0) < others - lost and time.monotonic() < until:
            time.sleep(_LOOK_S)
    except (RuntimeError, ValueError):
        return True
    return True


def _is_lost_connection(error: Exception) -> bool:
    """Tell a collective that lost its peer from other errors; gloo raises a plain RuntimeError."""
    from torch.distributed import DistError

    text = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "gloo", "socket")
    plain = isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    return plain or isinstance(error, DistError)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors out as bytes, each at a multiple of 8, behind a header that describes them."""
    import torch

    header = [len(tensors)]
    for tensor in tensors:
        header += [_dtypes().index(tensor.dtype), tensor.dim(), *tensor.shape]
    parts = [torch.tensor([len(header), *header]).view(torch.uint8)]
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(data)
        parts.append(data.new_zeros(-len(data) % _ALIGNMENT))
    return torch.cat(parts)


def _unpack(packed: Tensor) -> list[Tensor]:
    import torch

    length = int(packed[:_ALIGNMENT].view(torch.int64))
    place = (length + 1) * _ALIGNMENT
    header = packed[_ALIGNMENT:place].view(torch.int64).tolist()
    tensors = []
    position = 1
    for _ in range(header[0]):
        dtype, num_dims = _dtypes()[header[position]], header[position + 1]
        shape = header[position + 2 : position + 2 + num_dims]
        position += 2 + num_dims
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(packed[place : place + num_bytes].view(dtype).view(shape))
        place += num_bytes + -num_bytes % _ALIGNMENT
    return tensors


def _dtypes() -> list[Any]:
    import torch

    return [torch.int64, torch.float32, torch.float64, torch.int32, torch.float16, torch.bfloat16]
