"""Stands in for an interpreter that another program starts as `python [options] -m MODULE …`.

The module runs in a process that is forked, which has all imports already, in the folder and the
environment of this one; what it printed comes when it has ended. Torch's launchers take another
interpreter from the variable PYTHON_EXEC.
"""

import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

from tests.pipeline.fork_server import fork_server

LIMIT_SECONDS = 600.0


def write_interpreter(path: Path) -> str:
    """Write a command that stands in for `sys.executable`.

    All are forked from what this process has asked for: what the command itself would start belongs
    to the program's process group, which may be killed.
    """
    # Nothing, when all is imported: programs wait for what they start no longer than a minute.
    fork_server().launch_all(__name__, [], ranks=[], folder=path.parent)
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__])} "$@"\n')
    path.chmod(0o700)
    return str(path)


def main(job: dict[str, Any]) -> None:
    """Run the module, in the process that was forked."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["here"])
    sys.argv, sys.path[0] = job["argv"], job["here"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _ask() -> int:
    here = Path.cwd()
    folder = here / f"rank{os.environ.get('RANK', '0')}"
    folder.mkdir()
    job = {
        "argv": sys.argv[sys.argv.index("-m") + 1 :],
        "environment": dict(os.environ),
        "here": str(here),
    }
    ended = fork_server().launch(
        "tests.pipeline.forked_python", job, ranks=1, folder=folder, limit=LIMIT_SECONDS
    )
    sys.stdout.write(ended.logs[0])
    return 1 if ended.codes[0] is None else ended.codes[0]


if __name__ == "__main__":
    sys.exit(_ask())
