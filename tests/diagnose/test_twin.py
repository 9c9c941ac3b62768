"""Clocks are written around every operator of generated code, and around nothing else."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from diagnose import planted
from rankopt.artifact.manifest import PROGRAM
from rankopt.diagnose import twin
from rankopt.diagnose.kernel_work import mlp_bits, mlp_layers
from rankopt.diagnose.profile import Clock, CompiledProfile, same_scores
from rankopt.errors import ArtifactError
from rankopt.kernels.lookup import lookup_rows
from rankopt.kernels.mlp import mlp_int8
from rankopt.kernels.packing import packed_size_bytes
from rankopt.runtime import load_artifact

BODY = """
void AOTInductorModel::run_impl(
    AtenTensorHandle* input_handles
) {
    __check_inputs_outputs(input_handles, output_handles);
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);
    auto arg0_1 = std::move(inputs[0]);
    [[maybe_unused]] auto& top_packed = constants_->at(0);
    [[maybe_unused]] auto& top_bias = constants_->at(1);
    AtenTensorHandle buf0_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, int_array_0, int_array_1, &buf0_handle));
    RAIIAtenTensorHandle buf0(buf0_handle);
    cpp_fused_cat_0((const float*)(arg0_1.data_ptr()), (const at::Half*)(top_bias.data_ptr()), (float*)(buf0.data_ptr()), s13);
    // Topologically Sorted Source Nodes: [linear], Original ATen: [aten.view, rankopt.linear_int8]
    AtenTensorHandle buf1_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_linear_int8(wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf0, 2, int_array_3, int_array_4, 0L)), top_packed, &temporary_reference(top_bias.get()), nullptr, 1L, 8L, &buf1_handle));
    RAIIAtenTensorHandle buf1(buf1_handle);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_proxy_executor_call_function(proxy_executor, 1, 2, std::array<int64_t, 2>{12, -1}.data(), 3, std::array<AtenTensorHandle, 3>{top_packed, buf1, buf2}.data()));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mlp_int8(wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf1, 2, int_array_3, int_array_4, 0L)), std::array<AtenTensorHandle, 2>{top_packed.get(), buf2.get()}.cbegin(), 2, std::array<const AtenTensorHandle*, 2>{&temporary_reference(top_bias.get()), nullptr}.data(), 2, std::vector<const AtenTensorHandle*>{nullptr, nullptr}.data(), 2, nullptr, 0, &temporary_reference(std::array<int64_t, 2>{16L, 1L}.cbegin()), 2, "a,b", 8L, &buf4_handle));
    output_handles[0] = buf1.release();
} // AOTInductorModel::run_impl
"""  # noqa: E501 - as the compiler writes it
CODE = f"#include <x>\nnamespace torch::aot_inductor {{\n{BODY}}}\n"


def source(code: str = CODE) -> twin.Source:
    return twin.Source(code, "", ("fbgemm::first", "fbgemm::second"), "x.wrapper.so")


def test_every_operator_gets_a_clock_and_nothing_else() -> None:
    code, sites = twin.instrument(source())
    assert [site.name for site in sites] == [
        "run_impl",
        "cpp_fused_cat_0",
        "linear_int8",
        "fbgemm::second",
        "mlp_int8",
    ]
    assert [site.generated for site in sites] == [False, True, False, False, False]
    assert sites[1].constants == ("top_bias",)
    assert sites[2].constants == ("top_packed", "top_bias")
    assert sites[2].origin == ("aten.view", "rankopt.linear_int8")
    assert "rankopt_profile::Call rankopt_call(5);" in code
    assert code.count("rankopt_profile::Site rankopt_site(") == 4
    # Every line of the original stands in it, in order.
    lines = iter(code.split("\n"))
    assert all(line in lines for line in CODE.split("\n"))


def test_arguments_are_noted_by_what_they_are() -> None:
    code, _ = twin.instrument(source())
    noted = [line for line in code.split("\n") if "noting) {" in line]
    assert "note(1, 1, arg0_1); rankopt_profile::note(1, 0, top_bias);" in noted[0]
    assert "note(1, 2, buf0);" in noted[1]
    view = "wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf0, 2, int_array_3, "
    assert f"note(2, 1, {view}" in noted[2]
    assert "note(2, 0, top_packed); rankopt_profile::note(2, 0, top_bias.get());" in noted[2]
    assert "note(2, 1, 8L);" in noted[2]
    assert "note(2, 2, buf1_handle);" in noted[3]
    # A call through torch writes into the last of its tensors.
    assert "note(3, 0, top_packed); rankopt_profile::note(3, 1, buf1); }" in noted[4]
    assert "note(3, 1, 12);" in noted[4]
    assert "note(3, 2, buf2);" in noted[5]


def test_lists_are_taken_apart_in_the_order_of_the_arguments() -> None:
    code, sites = twin.instrument(source())
    before, after = [line for line in code.split("\n") if "noting) {" in line][-2:]
    noted = [text.split(");")[0] for text in before.split("rankopt_profile::note(4, ")[2:]]
    assert noted == [
        "0, top_packed.get()",
        "1, buf2.get()",
        "1, 2",
        "0, top_bias.get()",
        *["1, 2"] * 2,
        "1, 0",
        "1, 16L",
        "1, 1L",
        "1, 2",
        '1, "a,b"',
        "1, 8L",
    ]
    assert "nullptr" not in before
    assert "note(4, 2, buf4_handle);" in after
    assert sites[4].optionals == ((True, False), (False, False))
    assert sites[4].constants == ("top_packed", "top_bias")
    assert all(site.optionals == () for site in sites[:4])


def test_flags_are_those_of_the_last_compile_without_its_paths() -> None:
    text = (
        "// Compile cmd\n// g++ old.cpp -O0 -c -o old.o\n// Link cmd\n// g++ old.o\n"
        "// Compile cmd\n// g++ /a/x.cpp -D NAME -O1 -march=native -include /p/y.h -I/a/include "
        "-I/b -std=c++20 -c -o /a/x.o\n// Link cmd\n// g++ x.o -shared -o x.so\n"
    )
    assert twin.compile_flags(text) == ["-D", "NAME", "-O1", "-march=native", "-std=c++20"]
    assert twin.compile_flags("int main() {}") == []


def test_code_of_another_form_is_refused() -> None:
    with pytest.raises(ArtifactError, match="not of the form"):
        twin.instrument(source("int main() {}"))


def test_a_package_without_its_code_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "artifact"
    shutil.copytree(planted.artifact(), broken)
    with (
        zipfile.ZipFile(planted.artifact() / PROGRAM) as old,
        zipfile.ZipFile(broken / PROGRAM, "w") as new,
    ):
        for entry in old.infolist():
            if not entry.filename.endswith(".cpp"):
                new.writestr(entry.filename, old.read(entry))
    with pytest.raises(ArtifactError, match=r"holds 0 files \*.wrapper.cpp"):
        twin.build_twin(broken, tmp_path / "twin")


def test_the_twin_gives_the_artifacts_scores_and_its_times_add_up(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = load_artifact(planted.artifact())
    timed, sites = twin.build_twin(planted.artifact(), tmp_path / "twin")
    profile = CompiledProfile(timed, sites)
    for batch in (1, 3, 64):
        features = planted.features(batch)
        assert same_scores(plain(features), timed(features))
    clock = Clock()
    windows = [planted.features(64)] * 50
    ticks = profile.time(windows)
    rate = clock.ns_per_tick()
    sites_ns = np.stack(ticks.sites) * rate
    assert sites_ns.shape == (50, len(sites) - 1)
    assert (sites_ns > 0).all()
    # A call holds its compiled code, which holds its operators.
    assert ticks.inside is not None
    inside_ns, whole_ns = np.asarray(ticks.inside) * rate, np.asarray(ticks.whole_ns)
    assert (sites_ns.sum(axis=1) <= inside_ns).all()
    assert np.median(inside_ns / whole_ns) < 1.02
    assert np.median(sites_ns.sum(axis=1) / whole_ns) > 0.5
    # The artifact itself is as it was.
    assert load_artifact(planted.artifact()).manifest == plain.manifest


def test_notes_hold_what_each_operator_was_called_with(tmp_path: Path) -> None:
    timed, sites = twin.build_twin(planted.artifact(), tmp_path / "twin")
    profile = CompiledProfile(timed, sites)
    features = planted.features(5)
    found, notes = profile.note(features)
    assert found == sites[1:]
    by_name = {site.name: note for site, note in zip(found, notes, strict=True)}
    assert by_name.keys() == {"lookup_rows", "mlp_int8"}
    lookup, chain = by_name["lookup_rows"], by_name["mlp_int8"]
    assert [tuple(t.shape) for t in lookup.outputs] == [(5, planted.NUM_INPUTS)]
    # The bytes of the tables and the plan, which are constants, then the inputs of its list.
    assert len(lookup.arguments) == 4
    assert torch.equal(lookup.arguments[2], features["ids"])
    assert tuple(lookup.arguments[3].shape) == (5, 4)
    assert lookup.values == [2, 5, planted.NUM_INPUTS]
    site = next(site for site in found if site.name == "mlp_int8")
    layers = mlp_layers(site, chain)
    assert layers is not None
    assert [layer.num_outputs for layer in layers] == [planted.WIDTH, planted.WIDTH, 1]
    assert [layer.negative_slope is not None for layer in layers] == [True, True, False]
    sizes = [packed_size_bytes(planted.WIDTH, k) for k in (planted.NUM_INPUTS, planted.WIDTH)]
    assert [layer.packed.numel() for layer in layers[:2]] == sizes
    for layer in layers:
        assert layer.scale is not None
        assert layer.bias is not None
        assert layer.scale.shape == layer.bias.shape == (layer.num_outputs,)
        assert layer.peak is None
    # What was noted computes the artifact's score again.
    given = [features["ids"], features["dense"]]
    x = lookup_rows(*lookup.arguments[:2], given, *lookup.values[1:])
    again = mlp_int8(x, layers, activation_bits=mlp_bits(chain)).squeeze(1)
    assert torch.equal(again, timed(features)["click"])
    # Nothing is kept when nobody asks.
    timed(features)
    assert torch.ops.rankopt.profile_notes()[0] == []
