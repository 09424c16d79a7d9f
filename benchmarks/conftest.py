"""Side-by-side timing: krylov and its peers take turns, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_enable_compilation_cache", False)

_rows = []


@pytest.fixture
def versus(benchmark, request) -> Callable:
    """``versus(ours, peers, rounds)``: time ``ours()`` against each of the ``peers``, a dict of functions, in turns.

    ``per`` divides all times, by the number of iterations say. ``setup`` runs before each call and is not timed. With
    ``figures`` each function returns a dict of further figures, of which medians are kept. A first round to warm up is
    not counted. ``target`` holds the ratio to aim at, by peer.
    """

    def compare(ours, peers, rounds, *, per=1, setup=lambda: None, figures=False, warm=True, target=None):
        times = {name: [] for name in ("krylov", *peers)}
        further = {name: [] for name in times}

        def run(name, function):
            setup()
            start = time.perf_counter()
            result = jax.block_until_ready(function())
            times[name].append((time.perf_counter() - start) / per)
            if figures:
                further[name].append(result)

        def run_peers():
            for name, function in peers.items():
                run(name, function)

        if warm:
            run_peers()
            run("krylov", ours)
            for found in (*times.values(), *further.values()):
                found.clear()
        benchmark.pedantic(run, ("krylov", ours), setup=run_peers, rounds=rounds)

        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        # Round by round: what slows the machine down for a while slows both.
        ratios = {name: statistics.median(a / b for a, b in zip(times["krylov"], times[name])) for name in peers}
        more = {name: _medians(found) for name, found in further.items()}
        benchmark.extra_info.update(seconds=medians, ratios=ratios, figures=more, target=target)
        _rows.append((request.node.nodeid.split("/")[-1], medians, ratios, more, target or {}))

    return compare


def _medians(found):
    return {key: statistics.median(f[key] for f in found) for key in found[0]} if found else {}


def pytest_terminal_summary(terminalreporter) -> None:
    if not _rows:
        return
    terminalreporter.section("krylov / peer, medians")
    for label, medians, ratios, figures, target in _rows:
        terminalreporter.write_line(label)
        for name, seconds in medians.items():
            ratio = f"  ratio {ratios[name]:5.2f}" if name in ratios else " " * 13
            goal = f"  target {target[name]}" if name in target else ""
            details = "".join(f"  {key} {value:.3g}" for key, value in figures[name].items())
            terminalreporter.write_line(f"    {name:24} {_readable(seconds)}{ratio}{goal}{details}")
    platform = jax.devices()[0]
    terminalreporter.write_line(f"jax {jax.__version__} on {platform.device_kind}")


def _readable(seconds: float) -> str:
    for unit, size in (("s ", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:8.3f} {unit}"
    raise AssertionError
