"""openvino_fp32, openvino_int8: OpenVINO's CPU plugin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rankopt.bench.peers.peer import Peer, PeerError, PeerJob, Setting, product_of
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable

MODEL = "model.xml"
CALIBRATION_ROWS = 2_048
CALIBRATION_BATCH = 16

Precision = Literal["f32", "bf16"]


class OpenVinoFp32(Peer):
    """The plugin's latency hint; the precision it computes in and the threads are searched.

    Example:
        ```yaml
        - openvino_fp32: {precision: [f32, bf16], one_thread: [false, true]}
        ```
    """

    kind: ClassVar[str] = "openvino_fp32"
    title: ClassVar[str] = "OpenVINO"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "onnx", "onnxscript")
    distributions: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnxscript", "openvino", "nncf")
    has_files: ClassVar[bool] = True

    precision: tuple[Precision, ...] = Field(default=("f32", "bf16"), min_length=1)
    """bf16 is the plugin's own default where the CPU has it; it counts while NE holds."""
    one_thread: tuple[bool, ...] = Field(default=(False, True), min_length=1)

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        return product_of({"precision": self.precision, "one_thread": self.one_thread})

    def file_settings(self, setting: Setting) -> Setting:
        """Leave out what only the compiled model knows."""
        return {k: v for k, v in setting.items() if k not in ("precision", "one_thread")}

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Convert the exported ONNX file."""
        say_nothing_home()
        import openvino

        from rankopt.bench.peers.onnx_export import exported_onnx

        model = openvino.convert_model(str(exported_onnx(job)))
        openvino.save_model(model, str(folder / MODEL), compress_to_fp16=False)

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Compile for the CPU."""
        import openvino

        assert folder is not None
        compiled = openvino.Core().compile_model(
            str(folder / MODEL),
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": 1 if setting["one_thread"] else job.num_threads,
                "INFERENCE_PRECISION_HINT": setting["precision"],
            },
        )
        return _caller(compiled)


class OpenVinoInt8(OpenVinoFp32):
    """`nncf.quantize` with validation rows, or weights alone by `nncf.compress_weights`.

    Example:
        ```yaml
        - openvino_int8: {method: [quantize, compress_weights]}
        ```
    """

    kind: ClassVar[str] = "openvino_int8"
    title: ClassVar[str] = "OpenVINO int8 (nncf)"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "nncf", "onnx", "onnxscript")

    method: tuple[Literal["quantize", "compress_weights"], ...] = Field(
        default=("quantize", "compress_weights"), min_length=1
    )
    precision: tuple[Precision, ...] = Field(default=("f32",), min_length=1)
    """Of what stays in floating point."""

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        return product_of(
            {"method": self.method, "precision": self.precision, "one_thread": self.one_thread}
        )

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Convert and quantise."""
        say_nothing_home()
        import nncf
        import openvino

        from rankopt.bench.peers.onnx_export import exported_onnx

        model = openvino.convert_model(str(exported_onnx(job)))
        if setting["method"] == "quantize":
            dataset = nncf.Dataset(_calibration(job))
            model = nncf.quantize(model, dataset, subset_size=CALIBRATION_ROWS // CALIBRATION_BATCH)
        else:
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        openvino.save_model(model, str(folder / MODEL), compress_to_fp16=False)


def say_nothing_home() -> None:
    """Keep the usage statistics of openvino and nncf from being sent: they send none in a CI."""
    os.environ["CI"] = "true"


def _calibration(job: PeerJob) -> list[dict[str, Any]]:
    """Cut validation rows into batches of arrays."""
    from rankopt.data.encode import load_rows
    from rankopt.data.splits import open_splits

    card = job.load_card()
    splits = open_splits(card)
    source = splits.validation or splits.train
    if source is None:
        raise PeerError(f"{card.where}: names no validation rows to calibrate on.")
    rows = load_rows(card, source, limit=CALIBRATION_ROWS, with_labels=False)
    starts = range(0, rows.num_rows, CALIBRATION_BATCH)
    batches = [rows.slice(start, start + CALIBRATION_BATCH) for start in starts]
    return [{name: t.numpy() for name, t in batch.features.items()} for batch in batches]


def _caller(compiled: Any) -> ArmCallable:
    import numpy as np
    import openvino
    import torch

    request = compiled.create_infer_request()
    names = [item.get_any_name() for item in compiled.inputs]
    outputs = [item.get_any_name() for item in compiled.outputs]

    def run(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for index, name in enumerate(names):
            array = features[name].numpy()
            request.set_input_tensor(index, openvino.Tensor(array, shared_memory=True))
        request.infer()
        return {
            # A copy: the request reuses its output at the next call.
            name: torch.from_numpy(np.array(request.get_output_tensor(index).data))
            for index, name in enumerate(outputs)
        }

    return run
