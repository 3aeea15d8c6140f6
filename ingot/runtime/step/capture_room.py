"""Captures in the middle of traffic, for which there may be no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ingot.memory.memory_error import ran_out

_log = logging.getLogger(__name__)


def room_for(capture: Callable[[], object], steps: str, *, is_news: bool = True) -> bool:
    """Capture a graph, if there is memory for it. Else such ``steps`` go on without more of them, which the
    first time, as ``is_news``, is logged.
    """
    try:
        capture()
    except Exception as error:
        if not ran_out(error):
            raise
        if is_news:
            _log.warning("no memory for more CUDA graphs of %s: some will be slower", steps)
        return False
    return True
