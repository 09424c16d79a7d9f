"""Sizes of memory: how much is free on the device that JAX computes on, and how people write and read them."""

import re
from pathlib import Path

import jax
import numpy as np

# Where nothing says how much there is.
_DEFAULT = 4 << 30


def free_memory() -> int:
    """Bytes free on the first device of this process: what its allocator has left, or what the system has."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    # Virtual devices of a CPU share its memory.
    return min(_of_system(), _of_control_group()) // (len(jax.local_devices()) if device.platform == "cpu" else 1)


def _of_system() -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _DEFAULT


def _of_control_group() -> int:
    """What the container that this process runs in may still take."""
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS[_letter + "b"], _UNITS[_letter + "ib"] = 1000**_power, 1024**_power


def parse_bytes(where: str, memory: int | str) -> int:
    """A number of bytes, from a number or a string like ``"2GiB"``.

    Raises:
        ValueError: anything else, or not positive.
    """
    size = None
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", memory.lower())
        if match is not None and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    elif isinstance(memory, (int, float, np.integer, np.floating)) and not isinstance(memory, bool):
        size = float(memory)
    if size is None or not 0 < size < float("inf"):
        raise ValueError(
            f"{where}: memory must be a positive number of bytes, or a string like '2GiB'.\n  got       {memory!r}"
        )
    return int(size)


def describe_bytes(count: float) -> str:
    """A size for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
