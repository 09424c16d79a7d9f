"""Settings that must precede JAX: eight virtual CPU devices, and x64 unless KRYLOV_TEST_X64=0."""

import gc
import os
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Importing NetKet sets the precision, and a mesh of all devices, for the whole process.
os.environ["NETKET_ENABLE_X64"] = os.environ.get("KRYLOV_TEST_X64", "1")
os.environ.setdefault("NETKET_SHARDING", "0")

import jax
import jax.monitoring
import numpy as np
import pytest

X64 = os.environ.get("KRYLOV_TEST_X64", "1") != "0"
jax.config.update("jax_enable_x64", X64)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-case", action="store_true", help="of each quick test, only the first case")
    parser.addoption(
        "--second-pass", action="store_true", help="like --first-case, and all cases that are slow or need x64"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first_only, second_pass = config.getoption("--first-case"), config.getoption("--second-pass")
    kept, left_out, seen = [], [], set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        slow, x64_only = item.get_closest_marker("slow"), item.get_closest_marker("x64_only")
        if x64_only and not X64:
            wanted = False
        elif second_pass and (slow or x64_only):
            wanted = True
        elif first_only or second_pass:
            wanted = not slow and function not in seen
            seen.update([function] if wanted else [])
        else:
            wanted = True
        (kept if wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_report_header() -> str:
    return f"x64: {'on' if X64 else 'off'}"


_MOST_MAPS, _tests_run = 30_000, 0


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs before they exhaust the memory maps of the process, 65,530 on Linux: XLA would crash."""
    global _tests_run
    _tests_run += 1
    maps = Path("/proc/self/maps")
    if _tests_run % 20 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
    # Traced programs are millions of objects: looked through again and again they slow a long run down.
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def count_compilations():
    counts = [0]

    def listener(name, *_, **__):
        counts[0] += name == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield lambda: counts[0]
    jax.monitoring.unregister_event_duration_listener(listener)
