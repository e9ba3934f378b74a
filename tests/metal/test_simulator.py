"""The simulated Metal reports what Metal forbids: without that, no other test here means much."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest
import tvm_ffi

pytestmark = pytest.mark.metal


@pytest.fixture
def order() -> tuple[str, str, int]:
    """Run in one order: these tests say themselves what they break."""
    return "encoded", "encoded", 50


@pytest.fixture
def misuse(kernels_path: Path) -> tvm_ffi.Module:
    """Load cpp/tests/metal/misuse.cc."""
    return tvm_ffi.load_module(kernels_path.with_name("libmetal_misuse.so"))


def test_right_use_is_not_reported(sim: tvm_ffi.Module, misuse: tvm_ffi.Module) -> None:
    misuse.nothing()
    misuse.two_encoders(True)
    assert list(sim.take_errors()) == []


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("no_barrier", "race (in one encoder, read/write)"),
        ("released_buffer", "buffer 0 was released before execution"),
        ("released_pipeline", "its pipeline was released before execution"),
        ("use_after_end", "dispatch after endEncoding"),
        ("open_at_commit", "commit while an encoder is open"),
        ("handler_after_commit", "addCompletedHandler after commit"),
        ("wait_before_commit", "deadlock: waitUntilCompleted before commit"),
        ("empty_grid", "dispatch: empty grid of 0x1x1"),
        ("unbound_slot", "nothing bound at index 1"),
        ("no_pool", "NSString autoreleased with no pool in place"),
    ],
)
def test_reported(call: str, report: str, sim: tvm_ffi.Module, misuse: tvm_ffi.Module) -> None:
    misuse[call]()
    errors = list(sim.take_errors())
    assert any(report in error for error in errors), errors


def test_encoders_that_no_fence_orders_are_reported(
    sim: tvm_ffi.Module, misuse: tvm_ffi.Module
) -> None:
    misuse.two_encoders(False)
    assert "race (across encoders, read/write)" in "".join(sim.take_errors())


def test_nothing_is_left(sim: tvm_ffi.Module, misuse: tvm_ffi.Module) -> None:
    misuse.nothing()
    mx.synchronize()
    before = dict(sim.live_objects())
    misuse.nothing()
    assert dict(sim.live_objects()) == before


def test_failed_command_buffer_raises_once(sim: tvm_ffi.Module) -> None:
    x = mx.array([1.0, 2.0])
    mx.eval(x + 1)
    sim.configure("encoded", "encoded", True, 0, 1)
    y = x + 1
    with pytest.raises(RuntimeError, match="Command buffer execution failed: simulated GPU fault"):
        mx.eval(y)
    z = x + 1
    mx.eval(z)
    assert z.tolist() == [2.0, 3.0]


def test_mlx_evaluates_on_the_simulated_gpu(sim: tvm_ffi.Module) -> None:
    x = mx.array([[1.0, 2.0], [3.0, 4.0]])
    mx.eval(x)
    sim.reset_counts()
    y = mx.contiguous((x * x - x).T) + x[:1]
    assert y.tolist() == [[1.0, 8.0], [3.0, 14.0]]
    assert sim.counts()["dispatches"] == 4


def test_simulator_is_what_ran() -> None:
    assert "libmlx_metal.so" in os.environ["LD_PRELOAD"]
    assert "libmetal_sim.so" in Path("/proc/self/maps").read_text()
