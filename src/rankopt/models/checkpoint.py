"""Read trained weights, from whatever file they lie in, without ever running code from it.

Three forms: a `.pt`/`.pth` state dict (read with `weights_only=True`), `.safetensors`, and a
torch.distributed.checkpoint folder, read without a process group into plain tensors whatever the
number of shards. How keys are matched to a module: `rankopt.models.match`.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankopt.errors import CheckpointError, Problem, nearest
from rankopt.models.dcp import read_distributed
from rankopt.models.match import MatchedState, match_state_dict

__all__ = [
    "Checkpoint",
    "MatchedState",
    "load_state_dict",
    "match_state_dict",
    "read_checkpoint",
    "save_checkpoint",
]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAVE_HINT = "Save the weights alone: torch.save(model.state_dict(), 'checkpoint.pt')."
_ALLOWED = "a .pt or .pth state dict, a .safetensors file, or a torch.distributed.checkpoint folder"


@dataclass(frozen=True)
class Checkpoint:
    """Plain CPU tensors by name, and what had to be done to get at them.

    Attributes:
        state: the tensors, none with NaN or infinities.
        notes: one line for each thing the reader should know, such as the wrapper that was opened.
    """

    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def load_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; `read_checkpoint` tells also what was unwrapped.

    Raises:
        CheckpointError: see `read_checkpoint`.
    """
    return read_checkpoint(path).state


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint of any of the three forms.

    Raises:
        CheckpointError: the file is missing, empty, truncated, of another format, holds code or
            things that are not tensors, or holds NaN or infinite weights.
    """
    file = Path(path)
    if not file.exists():
        raise _refuse(file, "does not exist", hint=_neighbours(file))
    try:
        if file.is_dir():
            state, group = read_distributed(file)
        elif file.stat().st_size == 0:
            raise _refuse(file, "is empty (0 bytes)", hint="Write the checkpoint again.")
        elif file.suffix == ".safetensors":
            state, group = _read_safetensors(file), None
        elif file.suffix in TORCH_SUFFIXES:
            state, group = _unwrap(file, _read_torch(file))
        else:
            raise _refuse(file, f"must be {_ALLOWED}", file.suffix or "no suffix")
    except OSError as error:
        raise _refuse(file, f"cannot be read: {error.strerror or error}") from error
    if not state:
        raise _refuse(file, "holds no tensor", hint=SAVE_HINT)
    _check_finite(file, state)
    notes = (f"{file.name}: read the weights under its key {group!r}",) if group else ()
    return Checkpoint(state, notes)


def save_checkpoint(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a state dict as `.safetensors` or `.pt`, beside and then renamed.

    Raises:
        CheckpointError: the suffix is another, or the disk is full.
    """
    file = Path(path)
    plain = _plain(state)
    partial = file.with_name(f".{file.name}.partial")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(plain, str(partial))
        elif file.suffix in {".pt", ".pth"}:
            torch.save(plain, partial)
        else:
            raise _refuse(file, "must end in .safetensors, .pt or .pth", file.suffix)
        os.replace(partial, file)
    except (OSError, RuntimeError) as error:
        raise _refuse(file, f"cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detach and lay out; tensors that share memory (tied weights) become copies of their own."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        pointer = own.untyped_storage().data_ptr()
        if pointer in seen or own.untyped_storage().nbytes() != own.nbytes:
            own = own.clone()
        seen.add(pointer)
        plain[name] = own
    return plain


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(file))
    except SafetensorError as error:
        raise _refuse(
            file,
            f"is truncated or is not a safetensors file ({error})",
            hint="Copy or write it again; its size and hash should match the original's.",
        ) from error


def _read_torch(file: Path) -> Any:
    with file.open("rb") as stream:
        looks_zipped = stream.read(2) == b"PK"
    is_zip = zipfile.is_zipfile(file)
    if looks_zipped and not is_zip:
        raise _refuse(
            file,
            "is truncated: the archive's directory, which stands at its end, is missing",
            f"{file.stat().st_size:,} bytes",
            "Copy or write it again.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they advise on the reader, which is not the user's
            # Mapped, so that tables are read once, straight into the module's own memory.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refuse_pickle(file, str(error), is_zip) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # bytes that are no pickle fail anywhere in the unpickler
        if "TorchScript" in str(error):
            raise _refuse(
                file,
                "is a TorchScript archive, which holds code",
                hint="Save its weights: torch.save(torch.jit.load(path).state_dict(), ...).",
            ) from error
        what = "is damaged" if is_zip else "is truncated or is not a PyTorch file"
        raise _refuse(file, what, hint=f"Copy or write it again as {_ALLOWED}.") from error


def _refuse_pickle(file: Path, message: str, is_zip: bool) -> CheckpointError:
    """Tell a pickle that holds code from bytes that are no pickle at all."""
    named = re.search(r"(?:GLOBAL|class|type)\s+`?([\w.]+)`?", message)
    if "Unsupported" in message or named:
        what = "holds Python objects, not only weights; reading them would run code from the file"
        return _refuse(file, what, named.group(1) if named else None, SAVE_HINT)
    if is_zip:
        return _refuse(file, "is damaged: its index of tensors cannot be read", hint=SAVE_HINT)
    return _refuse(file, "is not a PyTorch file", hint=f"It must be {_ALLOWED}.")


def _unwrap(file: Path, content: Any) -> tuple[dict[str, Tensor], str | None]:
    """Find the state dict: the content itself, or the one nested mapping of tensors."""
    if not isinstance(content, Mapping):
        raise _refuse(file, "must hold a state dict", type(content).__name__, SAVE_HINT)
    if any(isinstance(value, Tensor) for value in content.values()):
        return _only_tensors(file, content), None
    groups = [name for name, value in content.items() if _is_state_dict(value)]
    if len(groups) != 1:
        raise _refuse(
            file,
            "must hold one mapping of tensors",
            groups or f"keys {', '.join(map(repr, list(content)[:8]))}",
            SAVE_HINT,
        )
    return _only_tensors(file, content[groups[0]]), str(groups[0])


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(item, Tensor) for item in value.values())
    )


def _only_tensors(file: Path, content: Mapping[Any, Any]) -> dict[str, Tensor]:
    problems = []
    state: dict[str, Tensor] = {}
    for name, value in content.items():
        if isinstance(value, Tensor) and type(value) in {Tensor, torch.nn.Parameter}:
            state[str(name)] = value.detach()
        elif not str(name).endswith("_extra_state"):
            problems.append(
                Problem(
                    f"{file}: {name}", "must be a plain tensor", type(value).__name__, SAVE_HINT
                )
            )
    if problems:
        raise CheckpointError(problems=problems[:10])
    return state


def _check_finite(file: Path, state: Mapping[str, Tensor]) -> None:
    problems = []
    for name, tensor in state.items():
        if tensor.is_quantized or tensor.layout != torch.strided:
            what = "must be a dense float or integer tensor"
            got = "quantized" if tensor.is_quantized else str(tensor.layout)
            problems.append(Problem(f"{file}: {name}", what, got))
        elif tensor.is_floating_point() and tensor.numel() and not _all_finite(tensor):
            wide = tensor.float()
            num_nan, num_inf = int(wide.isnan().sum()), int(wide.isinf().sum())
            problems.append(
                Problem(
                    f"{file}: {name}",
                    "must hold finite numbers only",
                    f"{num_nan:,} NaN and {num_inf:,} infinite of {tensor.numel():,} values",
                    "Training diverged; take an earlier checkpoint.",
                )
            )
    if problems:
        raise CheckpointError(problems=problems)


def _all_finite(tensor: Tensor) -> bool:
    """Look at the extremes only: no copy of a table of several GiB is made."""
    low, high = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax()
    return bool(low.isfinite() & high.isfinite())


def _neighbours(file: Path) -> str:
    if not file.parent.is_dir():
        return f"There is no folder {file.parent}."
    suffixes = {*TORCH_SUFFIXES, ".safetensors", ""}
    names = [item.name for item in file.parent.iterdir() if item.suffix in suffixes]
    return nearest(file.name, [name for name in names if not name.startswith(".")][:50])


def _refuse(
    file: Path, what: str, got: object | None = None, hint: str | None = None
) -> CheckpointError:
    return CheckpointError(problems=[Problem(str(file), what, got, hint)])
