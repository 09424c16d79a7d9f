"""NetKet spreads samples over all devices, a setting of the whole process: so in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import json

import netket as nk

from krylov.interop import netket as ours


def energies(make):
    hilbert = nk.hilbert.Spin(0.5, 6)
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=8)
    machine = nk.models.RBM(alpha=1, param_dtype=complex)
    state = nk.vqs.MCState(sampler, machine, n_samples=64, seed=1, sampler_seed=2)
    assert len(state.samples.sharding.device_set) == 2
    ising = nk.operator.Ising(hilbert, nk.graph.Chain(6), h=1.0)
    log = nk.logging.RuntimeLog()
    make(ising, nk.optimizer.Sgd(0.05), variational_state=state).run(3, out=log, show_progress=False)
    return [float(x) for x in log.data["Energy"]["Mean"].real]


def sr(**options):
    chosen = nk.optimizer.SR(diag_shift=0.01, **options)
    return lambda *args, **kwargs: nk.driver.VMC(*args, preconditioner=chosen, **kwargs)


print(json.dumps({
    "theirs": energies(sr(holomorphic=True, solver=nk.optimizer.solver.cholesky)),
    "our geometric tensor": energies(sr(qgt=ours.QGT(holomorphic=True), solver=ours.cg(rtol=1e-10))),
    "our driver": energies(lambda *args, **kw: ours.VMC_MatrixFree(*args, diag_shift=0.01, rtol=1e-10, **kw)),
}))
"""


@pytest.mark.slow
@pytest.mark.x64_only
def test_energies_on_two_devices_are_those_of_netket():
    environment = os.environ | {
        "NETKET_SHARDING": "1",
        "NETKET_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    run = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    expected = found.pop("theirs")
    for name, energies in found.items():
        assert energies == pytest.approx(expected, rel=1e-6), name
