"""Targets for a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from artifact.workshop import bundle_of
from passes.zoo import apply_passes
from rankopt.artifact.gpu import gpu_problems, tf32
from rankopt.artifact.manifest import Target
from rankopt.bench.peers.registry import find_peer
from rankopt.bundle import GpuSettings
from rankopt.environment import collect_environment
from rankopt.errors import ExportError
from rankopt.models.card import load_card
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.recipe import load_recipe

HERE = collect_environment().model_copy(
    update={"gpus": (), "libraries": {"torch": "2.13.0+cpu"}, "compiler": "/usr/bin/g++"}
)
WITH_GPU = HERE.model_copy(
    update={"gpus": ("NVIDIA H200",), "libraries": {"torch": "2.13.0+cu130", "triton": "3.9.0"}}
)


def test_target_says_that_there_is_no_gpu_and_which_torch_there_is() -> None:
    problems = ExportAoti(target="aoti-cuda").check(HERE, None)
    said = " ".join(str(problem) for problem in problems)
    assert "no" in said
    assert "NVIDIA GPU" in said
    assert "2.13.0+cpu" in said
    assert "triton" in said


def test_target_fits_a_machine_with_gpu_and_triton() -> None:
    assert ExportAoti(target="aoti-cuda").check(WITH_GPU, None) == []
    assert load_recipe("serve-cuda").check(WITH_GPU, None) == []


def test_bundle_carries_the_target_s_settings() -> None:
    _, _, bundle = bundle_of("dlrm")
    exported = apply_passes(bundle, ExportAoti(target="aoti-cuda")).bundle
    assert (exported.device, exported.gpu) == ("cuda", GpuSettings(tf32=False, graph_batch=256))
    assert apply_passes(bundle, ExportAoti()).bundle.device == "cpu"
    assert ExportAoti(target="aoti-cuda").device == "cuda"


def test_operators_of_a_cpu_are_refused_with_the_pass_to_leave_out() -> None:
    pytest.importorskip("triton")
    from rankopt.passes.device import for_gpu

    _, _, bundle = bundle_of("dlrm")
    with pytest.raises(ExportError, match=r"rankopt\.(linear|mlp)_int8.*quantize_dense"):
        for_gpu(apply_passes(bundle, QuantizeDense(backend="native")).bundle)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_artifact_for_a_gpu_is_refused_where_torch_sees_none() -> None:
    target = Target(device="cuda", architecture="x86_64", isa=(), capability="9.0", tf32=False)
    (problem,) = gpu_problems(Path("somewhere"), target)
    assert torch.__version__ in problem.what
    assert "aoti-cpu" in problem.hint


def test_tf32_is_set_for_the_call_alone() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with tf32(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_peers_for_a_gpu_say_why_they_do_not_run_here() -> None:
    card = load_card("dlrm-synthetic")
    if collect_environment().gpus:
        pytest.skip("says what a machine without a GPU is told")
    for kind in ("pytorch_gpu", "torch_tensorrt"):
        assert "NVIDIA GPU" in str(find_peer(kind)().why_not(card))
