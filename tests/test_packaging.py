"""What a user gets who installs the wheel, and what the lock files promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rankopt
from rankopt.content import KINDS

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ]+) \\$", re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that no build folder is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "results")
    for name in ("src", *KINDS):
        if (checkout / name).is_dir():
            shutil.copytree(checkout / name, source / name, ignore=ignore)
        # One file of our own in each, whatever the folders hold.
        (source / name).mkdir(exist_ok=True)
        if name != "src":
            (source / name / "planted").mkdir()
            (source / name / "planted" / "sample.yaml").write_text(f"kind: {name}\n")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(checkout / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_source_file_and_the_content(wheel: Path, checkout: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = checkout / "src" / "rankopt"
    wanted = {
        f"rankopt/{path.relative_to(package).as_posix()}"
        for pattern in ("**/*.py", "**/*.cpp", "**/*.h", "review/templates/*", "py.typed")
        for path in package.glob(pattern)
    }
    assert wanted - names == set()
    for kind in KINDS:
        assert f"rankopt/_content/{kind}/planted/sample.yaml" in names
        for path in (checkout / kind).rglob("*.yaml"):
            assert f"rankopt/_content/{path.relative_to(checkout).as_posix()}" in names
    assert not any("__pycache__" in name for name in names)


def test_the_installed_wheel_lists_its_content_outside_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True)
    code = (
        "import rankopt, rankopt.content as content\n"
        "print(rankopt.__file__, content.checkout_root())\n"
        "for kind in content.KINDS:\n"
        "    print(*map(content.content_name, content.list_content(kind)))\n"
        "print(content.find('recipes', 'planted/sample').read_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"{site}/rankopt/__init__.py None"
    for line in lines[1 : 1 + len(KINDS)]:
        assert "planted/sample" in line.split()
    assert lines[1 + len(KINDS)] == "kind: recipes"


def test_content_folders_are_not_packages(checkout: Path) -> None:
    for kind in KINDS:
        assert not list((checkout / kind).rglob("__init__.py"))


def test_the_public_names_are_sorted_and_importable() -> None:
    assert list(rankopt.__all__) == sorted(rankopt.__all__)
    for name in rankopt.__all__:
        assert getattr(rankopt, name) is not None
    assert set(rankopt.__all__) <= set(dir(rankopt))
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = rankopt.optimise  # type: ignore[attr-defined]


def test_every_function_of_the_api_can_be_called() -> None:
    """`rankopt.review` is a package too, so it must stay callable once its modules are loaded."""
    import rankopt.review.schema

    for name in ("compare", "load_artifact", "load_card", "load_recipe", "optimize", "review"):
        assert callable(getattr(rankopt, name)), name


def test_importing_rankopt_loads_nothing_heavy() -> None:
    code = (
        "import rankopt, sys; sys.exit(str({'torch', 'pandas', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("flavour", ["cpu", "cuda", "dev", "peers"])
def test_a_lock_pins_and_hashes_what_its_input_names(checkout: Path, flavour: str) -> None:
    text = (checkout / "locks" / f"{flavour}.txt").read_text()
    wanted: dict[str, str] = {}
    files = [checkout / "locks" / f"{flavour}.in"]
    if flavour in {"cpu", "cuda"}:
        files.append(checkout / "locks" / "base.in")
    for file in files:
        for line in file.read_text().splitlines():
            if "==" in line:
                name, version = line.split("==")
                wanted[name] = version
    assert dict(PIN.findall(text)) == wanted
    entries = text.split("==")[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


def test_each_lock_has_one_build_of_fbgemm_and_no_torch(checkout: Path) -> None:
    locks = {name: (checkout / "locks" / f"{name}.txt").read_text() for name in ("cpu", "cuda")}
    pins = {name: dict(PIN.findall(text)) for name, text in locks.items()}
    assert [name for name in pins["cpu"] if name.startswith("fbgemm")] == ["fbgemm-gpu-cpu"]
    assert [name for name in pins["cuda"] if name.startswith("fbgemm")] == ["fbgemm-gpu"]
    assert "torch" not in pins["cpu"]
    assert "torch" not in pins["cuda"]
    assert (checkout / "locks" / "torch.txt").read_text() == "torch==2.13.0\n"


def test_every_direct_dependency_is_locked(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = {"torch"}
    for name in ("cpu", "dev"):
        locked |= set(dict(PIN.findall((checkout / "locks" / f"{name}.txt").read_text())))
    direct = [*project["dependencies"], *extras["cpu"], *extras["dev"]]
    names = {re.split(r"[<>=!~ \[]", requirement)[0].lower() for requirement in direct}
    assert names - locked == set()


def test_a_second_make_installs_nothing(checkout: Path, tmp_path: Path) -> None:
    """The stamp holds: with it newer than the locks, `make setup` has nothing to do."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("locks", "scripts"):
        shutil.copytree(checkout / name, copy / name)
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(checkout / name, copy / name)
    (copy / ".venv").mkdir()
    (copy / ".venv" / ".rankopt-installed").touch()
    done = make_setup(copy)
    assert "Nothing to be done" in done.stdout
    # A changed pin does install: the dry run shows the script.
    os.utime(copy / "locks" / "cpu.txt", (2**32, 2**32))
    assert "scripts/setup.sh" in make_setup(copy, "--dry-run").stdout


def make_setup(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    # Without the flags and variables of the `make test` this may run under.
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "VENV", "PYTHON"}}
    return subprocess.run(
        ["make", *flags, "setup"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "no-such-python"}, "needs Python 3.11 or newer"),
        ({"CXX": "no-such-compiler"}, "needs a C++17 compiler"),
    ],
)
def test_make_says_in_one_line_what_is_missing(
    checkout: Path, variables: dict[str, str], message: str
) -> None:
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / "prerequisites.sh")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "apt-get install" in done.stderr
    assert done.stderr.count("\n") == 1
