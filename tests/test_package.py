"""The package: what it requires, what its import checks, and the doctor."""

from __future__ import annotations

import importlib.metadata
import re
import sysconfig
from pathlib import Path

import pytest
import tvm_ffi

from mlx_tvm_ffi import _versions

ROOT = Path(__file__).parents[1]
MLX = importlib.metadata.version("mlx")
REQUIRES = importlib.metadata.requires("mlx-tvm-ffi") or []


@pytest.fixture
def fake(tmp_path, run_python):
    """Run code where ``mlx.core`` or ``tvm_ffi`` is a stand-in of another version, or fails."""

    def run(arguments: list[str] | str, *, expected: int = 1, **modules: str):
        path = tmp_path / "path"
        for name, text in modules.items():
            module = path / (name.replace("_core", "/core") + ".py")
            module.parent.mkdir(parents=True, exist_ok=True)
            module.write_text(text)
        return run_python(arguments, env={"PYTHONPATH": str(path)}, expected=expected)

    return run


def test_requires_exactly_the_mlx_it_was_built_with():
    assert f"mlx=={MLX}" in REQUIRES


def test_requires_the_tvm_ffi_that_import_accepts():
    (requirement,) = [line for line in REQUIRES if line.startswith("apache-tvm-ffi")]
    clauses = requirement.removeprefix("apache-tvm-ffi").split(",")
    assert sorted(clauses) == sorted(_versions.TVM_FFI_RANGE.split(","))


def test_free_threaded_python_is_not_promised():
    # No build of MLX is for it, so nothing here has run on it.
    classifiers = importlib.metadata.metadata("mlx-tvm-ffi").get_all("Classifier") or []
    assert [line for line in classifiers if "Typed" in line]
    assert not [line for line in classifiers if "Free Threading" in line]


def test_checkout_builds_with_what_pip_builds_with():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["build-system"]["requires"]) <= set(project["dependency-groups"]["build"])


def test_another_mlx_is_an_import_error_that_names_both_and_the_way_out(fake):
    result = fake("import mlx_tvm_ffi", mlx_core="__version__ = '0.31.2'")
    error = result.stderr.splitlines()[-1]
    assert error.startswith(
        f"ImportError: [mlx_tvm_ffi] mlx: expected version {MLX}, "
        "which this package was built with, got 0.31.2. Run: "
    )
    assert re.search(rf"-m pip install 'mlx(\[\w+\])?=={MLX}'$", error)


def test_mlx_without_a_backend_is_an_import_error_that_names_the_way_out(fake):
    result = fake("import mlx_tvm_ffi", mlx_core="raise ImportError('no libmlx.so')")
    assert "got an import that fails: no libmlx.so. Run: " in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("found", ["0.1.10", "0.1.13", "0.1.16", "0.1.16.post1", "1.0", "?"])
def test_tvm_ffi_outside_the_range_is_an_import_error(fake, found):
    result = fake("import mlx_tvm_ffi", tvm_ffi=f"__version__ = {found!r}")
    error = result.stderr.splitlines()[-1]
    assert error.startswith(
        "ImportError: [mlx_tvm_ffi] tvm_ffi: expected version >=0.1.11,!=0.1.13,<0.1.16, "
        f"got {found}. Run: "
    )
    assert error.endswith(" -m pip install 'apache-tvm-ffi>=0.1.11,!=0.1.13,<0.1.16'")


@pytest.mark.parametrize("found", ["0.1.11", "0.1.13.post2", "0.1.15.post2"])
def test_tvm_ffi_inside_the_range_is_taken(monkeypatch, found):
    monkeypatch.setattr(tvm_ffi, "__version__", found)
    assert _versions.check_tvm_ffi() == found


def test_source_folder_is_an_import_error(tmp_path, run_python):
    package = tmp_path / "mlx_tvm_ffi"
    package.mkdir()
    for source in (ROOT / "mlx_tvm_ffi").glob("*.py"):
        (package / source.name).write_text(source.read_text())
    for arguments in (
        ["-c", "import mlx_tvm_ffi"],
        ["-m", "mlx_tvm_ffi"],
        ["-m", "mlx_tvm_ffi", "--cmake-dir"],
    ):
        result = run_python(["-S", *arguments], expected=1)
        assert (
            "expected an installed package, got its source folder" in result.stdout + result.stderr
        )
        assert "-c" in arguments or "Traceback" not in result.stderr


def test_one_libmlx_and_one_libtvm_ffi_in_the_process(run_python):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("reads /proc/self/maps, which is Linux's")
    code = "import mlx_tvm_ffi; print(open('/proc/self/maps').read())"
    paths = set(re.findall(r"/\S*/(?:libmlx|libtvm_ffi)\.so", run_python(code).stdout))
    assert sorted(Path(path).name for path in paths) == ["libmlx.so", "libtvm_ffi.so"]


def test_doctor_names_versions_and_backends(run_python):
    lines = run_python(["-m", "mlx_tvm_ffi"]).stdout.splitlines()
    found = dict(line.split(maxsplit=1) for line in lines)
    assert found["mlx"] == MLX
    assert found["tvm-ffi"] == tvm_ffi.__version__
    assert found["cpu"] == "works"
    assert found["metal"] == "works" or found["metal"].startswith("missing: ")
    assert found["cuda"] == "works" or found["cuda"].startswith("missing: ")


def test_doctor_runs_where_the_import_fails(fake):
    result = fake(["-m", "mlx_tvm_ffi"], mlx_core="__version__ = '0.31.2'")
    assert f"expected version {MLX}, which this package was built with" in result.stdout
    assert result.stderr == ""


def test_doctor_warns_of_the_slow_exchange(run_python):
    name = "TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API"
    assert name not in run_python(["-m", "mlx_tvm_ffi"], env={name: "0"}).stdout
    assert f"slow. Unset {name}" in run_python(["-m", "mlx_tvm_ffi"], env={name: "1"}).stdout


def test_include_dir_holds_the_headers(run_python):
    folder = Path(run_python(["-m", "mlx_tvm_ffi", "--include-dir"]).stdout.strip())
    assert (folder / "mlx_tvm_ffi" / "stream.h").is_file()


def test_installed_parts_lie_in_site_packages(run_python):
    code = "import mlx_tvm_ffi._core; print(mlx_tvm_ffi._core.__file__)"
    core = Path(run_python(code).stdout.strip())
    assert core.parent == Path(sysconfig.get_path("platlib")) / "mlx_tvm_ffi"
