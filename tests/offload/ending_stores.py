"""A job of test_disk_files.py: make stores in processes that end in different ways.

It works in a folder of its own, writes what it found there to told.json, and ends with a store that
is open. With `named`, files of stores have names.
"""

import gc
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from sppo_hf.errors import OffloadError
from sppo_hf.offload import disk_files
from tests.offload.disk_store import DiskStore

DIRECTORY = Path("stores")
MEMORY = torch.arange(9000, dtype=torch.int16).view(torch.uint8)


def names():
    return sorted(path.name for path in DIRECTORY.iterdir())


def make():
    store = DiskStore(DIRECTORY, slab_bytes=1 << 16)
    write = store.write(MEMORY)
    write.ticket.wait()
    return store, write


def run(child):
    number = os.fork()
    if number == 0:
        try:
            child()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def killed():
    _store, _ = make()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def terminated():
    _store, _ = make()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def left_at_once():
    _store, _ = make()
    os._exit(0)


def forked():
    global store
    try:
        store.start_read(write.extent, torch.zeros_like(MEMORY))
    except OffloadError as error:
        refused = "forked" in str(error)
    try:
        write.ticket.done()
    except OffloadError as error:
        refused = refused and "forked" in str(error)
    store.close()
    del store
    gc.collect()
    os._exit(3 if refused else 4)


def main(job):
    global store, write
    warnings.simplefilter("ignore")  # newer Pythons warn of fork beside threads, which is the point
    DIRECTORY.mkdir()
    if job["named"]:
        disk_files._why_names_are_needed = lambda directory: "a test says so"
    told: dict[str, Any] = {"codes": [], "left": []}
    for child in (killed, terminated, left_at_once):
        told["codes"].append(run(child))
        told["left"].append(names())
    store, write = make()
    told["after_new_store"] = names()
    told["forked_code"] = run(forked)
    target = torch.zeros_like(MEMORY)
    store.start_read(write.extent, target).wait()
    told["intact_after_fork"] = bool(torch.equal(target, MEMORY)) and names()
    # The child has none of our files open: it would keep their disk space, or the lock, past our
    # end.
    reader, writer = os.pipe()
    if os.fork() == 0:
        files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        opened = [os.readlink(file) for file in files if os.path.lexists(file)]
        os.write(writer, json.dumps([name for name in opened if "sppo-" in name]).encode())
        os._exit(0)
    told["open_in_child"] = json.loads(os.read(reader, 4096))
    Path("told.json").write_text(json.dumps(told))
