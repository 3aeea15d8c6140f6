"""The loop of a process that forks what is asked for: those of tests/forked.py and tests/worker_helper.py.

A fork has its requester for a parent, as what ``exec`` starts has: the requester adopts orphans, and the loop
forks twice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def serve_forks(
    requests: socket.socket,
    most_files: int,
    become: Callable[[list[int]], object],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Fork for each message with up to so many files, until the requester has ended. ``become``: what a fork
    does with the files; ``before``: what this process does before it forks. Ids are sent back.
    """
    while True:
        message, files, _, _ = socket.recv_fds(requests, 32, most_files)
        if not message:
            return
        before()
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between, child = os.getpid(), os.fork()
            if child == 0:
                while os.getppid() == between:
                    os.sched_yield()
                requests.close()
                os.close(read)
                os.close(write)
                become(files)
            os.write(write, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from here on the requester is the parent
        requests.send(os.read(read, 32))
        for file in (read, write, *files):
            os.close(file)
