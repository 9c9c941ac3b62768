"""onnxruntime_fp32, onnxruntime_int8: ONNX Runtime's CPU provider."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from rankopt.bench.peers.peer import Peer, PeerJob, Setting, product_of
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable

QUANTISED = "quantised.onnx"


class OnnxRuntimeFp32(Peer):
    """All graph optimisations; threads and IO binding are searched.

    Example:
        ```yaml
        - onnxruntime_fp32: {one_thread: [false, true], io_binding: [true, false]}
        ```
    """

    kind: ClassVar[str] = "onnxruntime_fp32"
    title: ClassVar[str] = "ONNX Runtime fp32"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnx", "onnxscript")
    distributions: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnxscript", "onnxruntime")
    has_files: ClassVar[bool] = True

    one_thread: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """Use one thread of the budget, which small batches may prefer."""
    io_binding: tuple[bool, ...] = Field(default=(True, False), min_length=1)
    """Bind buffers in place of passing arrays."""

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        return product_of({"one_thread": self.one_thread, "io_binding": self.io_binding})

    def file_settings(self, setting: Setting) -> Setting:
        """Leave out what only the session knows."""
        return {k: v for k, v in setting.items() if k not in ("one_thread", "io_binding")}

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Export, and leave a note of where the file is."""
        from rankopt.bench.peers.onnx_export import exported_onnx

        (folder / "model.txt").write_text(str(exported_onnx(job)), encoding="utf-8")

    def model_file(self, folder: Path) -> Path:
        """Return the file to open."""
        return Path((folder / "model.txt").read_text(encoding="utf-8"))

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Open a session."""
        import onnxruntime as ort

        assert folder is not None
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = 1 if setting["one_thread"] else job.num_threads
        options.inter_op_num_threads = 1
        session = ort.InferenceSession(
            str(self.model_file(folder)), options, providers=["CPUExecutionProvider"]
        )
        return _bound(session) if setting["io_binding"] else _plain(session)


class OnnxRuntimeInt8(OnnxRuntimeFp32):
    """`quantize_dynamic` with weights per channel; embedding tables in 8 bits where asked.

    Example:
        ```yaml
        - onnxruntime_int8: {tables: [true, false]}
        ```
    """

    kind: ClassVar[str] = "onnxruntime_int8"
    title: ClassVar[str] = "ONNX Runtime int8 (dynamic, per channel)"

    reduce_range: bool | None = None
    """7-bit weights; None: where the CPU lacks VNNI, as the documentation advises."""
    tables: tuple[bool, ...] = Field(default=(False, True), min_length=1)

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        reduced = not has_vnni() if self.reduce_range is None else self.reduce_range
        return product_of(
            {
                "reduce_range": (reduced,),
                "tables": self.tables,
                "one_thread": self.one_thread,
                "io_binding": self.io_binding,
            }
        )

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Export, fold shapes, quantise."""
        from onnxruntime import quantization

        from rankopt.bench.peers.onnx_export import exported_onnx

        kinds = ["MatMul", "Gemm", "Attention", "LSTM", *(["Gather"] if setting["tables"] else [])]
        quantization.quantize_dynamic(
            exported_onnx(job),
            folder / QUANTISED,
            op_types_to_quantize=kinds,
            per_channel=True,
            reduce_range=setting["reduce_range"],
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=True,
        )

    def model_file(self, folder: Path) -> Path:
        """Return the quantised file."""
        return folder / QUANTISED


def has_vnni() -> bool:
    """Tell whether the CPU adds 8-bit products into 32 bits without saturating."""
    return bool({"avx512_vnni", "avx_vnni", "amx_int8"} & set(collect_environment().isa))


def _plain(session: Any) -> ArmCallable:
    import torch

    names = [item.name for item in session.get_inputs()]
    outputs = [item.name for item in session.get_outputs()]

    def run(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        arrays = session.run(outputs, {name: features[name].numpy() for name in names})
        return {name: torch.from_numpy(a) for name, a in zip(outputs, arrays, strict=True)}

    return run


def _bound(session: Any) -> ArmCallable:
    import numpy as np
    import torch

    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
    inputs = [(item.name, kinds[item.type]) for item in session.get_inputs()]
    outputs = [item.name for item in session.get_outputs()]
    binding = session.io_binding()

    def run(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, dtype in inputs:
            tensor = features[name]
            binding.bind_input(name, "cpu", 0, dtype, tuple(tensor.shape), tensor.data_ptr())
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        arrays = binding.copy_outputs_to_cpu()
        return {name: torch.from_numpy(a) for name, a in zip(outputs, arrays, strict=True)}

    return run
