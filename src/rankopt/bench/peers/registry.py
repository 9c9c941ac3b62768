"""The peers that a suite can name."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from rankopt.bench.peers.peer import Peer
from rankopt.errors import UsageError, nearest

ENTRY_POINT_GROUP = "rankopt.peers"

_HERE = "rankopt.bench.peers"

PEERS: dict[str, str] = {
    "eager": f"{_HERE}.eager:Eager",
    "pytorch_gpu": f"{_HERE}.eager:EagerGpu",
    "torch_tensorrt": f"{_HERE}.tensorrt:TorchTensorrt",
    "torch_compile": f"{_HERE}.torch_compile:TorchCompile",
    "aoti": f"{_HERE}.aoti:Aoti",
    "torch_int8": f"{_HERE}.torch_int8:TorchInt8",
    "torchrec_int8": f"{_HERE}.torchrec_int8:TorchrecInt8",
    "onnxruntime_fp32": f"{_HERE}.onnxruntime:OnnxRuntimeFp32",
    "onnxruntime_int8": f"{_HERE}.onnxruntime:OnnxRuntimeInt8",
    "openvino_fp32": f"{_HERE}.openvino:OpenVinoFp32",
    "openvino_int8": f"{_HERE}.openvino:OpenVinoInt8",
    "zentorch": f"{_HERE}.zentorch:Zentorch",
    "rankopt": f"{_HERE}.artifact:RankoptArtifact",
}
"""Kind -> `module:class`, imported only when a suite names it."""


def peer_kinds() -> tuple[str, ...]:
    """Name every peer, sorted."""
    return tuple(sorted({*PEERS, *entry_points(group=ENTRY_POINT_GROUP).names}))


def find_peer(kind: str) -> type[Peer]:
    """Return the class of a peer.

    Raises:
        UsageError: no such peer.
    """
    if kind in PEERS:
        reference = PEERS[kind]
    else:
        points = entry_points(group=ENTRY_POINT_GROUP, name=kind)
        if not points:
            raise UsageError(f"peer {kind!r} is not known. {nearest(kind, peer_kinds())}")
        reference = next(iter(points)).value
    module, _, name = reference.partition(":")
    found: type[Peer] = getattr(importlib.import_module(module), name)
    return found
