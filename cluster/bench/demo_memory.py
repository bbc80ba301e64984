"""The memory of the demo: the resident sizes of all its processes, added up, at their peak."""

import subprocess
import sys
import time

import psutil

from paceline.cluster.cli.demo import resident_bytes
from paceline.worker.errors import InternalError

_SAMPLE_S = 0.25
_DEMO_LIMIT_S = 600.0


def measure_demo_peak_gib() -> float:
    """Runs `paceline demo` and watches its process tree.

    Pages that processes share count once for each of them, so this is never too low.
    Raises: InternalError: the demo failed or took longer than its limit.
    """
    command = [sys.executable, "-m", "paceline.cluster.cli.main", "demo"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as demo:
        root = psutil.Process(demo.pid)
        deadline_s = time.monotonic() + _DEMO_LIMIT_S
        peak_bytes = 0
        while demo.poll() is None:
            if time.monotonic() > deadline_s:
                demo.terminate()
                raise InternalError(f"the demo did not end within {_DEMO_LIMIT_S:g} s")
            peak_bytes = max(peak_bytes, resident_bytes(root))
            time.sleep(_SAMPLE_S)
        if demo.returncode != 0:
            assert demo.stderr is not None
            tail = demo.stderr.read().decode(errors="replace")[-2000:]
            raise InternalError(f"the demo exited with {demo.returncode}: {tail}")
    return peak_bytes / 2**30
