"""A compiler launcher: runs the compiler and notes what it took.

    PAGETILE_COMPILES=FILE python3 tools/measure_compile.py [ccache] nvcc ...

One line of JSON a compile is appended to FILE: the object, seconds of the processor and of the
wall clock, and the peak memory of its largest process (nvcc runs them one after another). A compile
that ccache answers takes next to nothing; with CCACHE_RECACHE=1 it is done again.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time


def main(command: list[str]) -> int:
    started = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    wall = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = os.environ.get("PAGETILE_COMPILES")
    if log and status == 0 and "-c" in command and "-o" in command:
        entry = {
            "object": command[command.index("-o") + 1],
            "cpu_s": round(used.ru_utime + used.ru_stime, 2),
            "wall_s": round(wall, 2),
            "peak_mb": used.ru_maxrss // 1024,
        }
        with open(log, "a") as file:  # one short write: compiles side by side do not mix
            file.write(json.dumps(entry) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
