"""A GPU's context, which the driver makes in a thread while this process imports PyTorch."""

from __future__ import annotations

import ctypes
import os
import re
import threading


def begin_context(device: str | None) -> threading.Thread | None:
    """Begin to make the context that PyTorch will use on this device (None: ``auto``); nothing for a CPU, for
    a name that is not a device's, and where there is no driver: PyTorch reports what is wrong with them.
    """
    found = re.fullmatch(r"auto|cuda(?::(\d{1,4}))?", device or "auto")
    if found is None:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before it begins
    thread = threading.Thread(target=_make_context, args=(int(found[1] or 0),), daemon=True)
    thread.start()
    return thread


def _make_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, *given in (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), index),
        (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
    ):
        if call(*given):
            return
