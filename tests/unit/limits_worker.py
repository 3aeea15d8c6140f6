"""A worker of ``LimitedProcess`` that answers with its own limits."""

from __future__ import annotations

import resource
import signal


def answer(question: object) -> dict[str, float]:
    """What is left of this answer's seconds of CPU time, and the most bytes of memory and of a core file."""
    return {
        "seconds": signal.getitimer(signal.ITIMER_PROF)[0],
        "memory": resource.getrlimit(resource.RLIMIT_AS)[1],
        "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
    }
