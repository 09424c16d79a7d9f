"""How much memory is free on the device that JAX computes on."""

from pathlib import Path

import jax

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
