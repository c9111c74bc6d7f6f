"""What it costs that several hosts agree before every step: python tests/benchmarks/hosts.py [HOSTS...]

Each host is a process of this machine, so the network between VMs is not in it.
"""

import os
import socket
import statistics
import subprocess
import sys

HOST = """
import statistics, time
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.processes.hosts import rendezvous

hosts = rendezvous(HwConfig(num_hosts=int(__import__("os").environ["WORLD_SIZE"])))
taken = []
for _ in range(2000):
    started = time.perf_counter()
    hosts.any(False)
    taken.append(time.perf_counter() - started)
print(statistics.median(taken), statistics.quantiles(taken, n=100)[98])
"""


def measured(num_hosts: int) -> tuple[float, float]:
    """Median and 99th percentile of one agreement in seconds, as the first host sees it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(num_hosts)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOST],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_hosts)
    ]
    printed = [each.communicate()[0].splitlines()[-1] for each in started]
    median, high = map(float, printed[0].split())
    return median, high


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ("2", "4", "16")):
        tries = [measured(count) for _ in range(3)]
        median, high = (statistics.median(column) for column in zip(*tries, strict=True))
        print(f"{count:3d} hosts: {median * 1e3:.2f} ms, 99 of 100 below {high * 1e3:.2f} ms")
