"""A CUDA graph as the beginning of others: what they share is captured once.

PyTorch replays no graph in a capture, so this calls the driver.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import torch

from ingot.errors import DeviceError

_CAPTURES = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_REPLACE = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


def add_child(graph: torch.cuda.CUDAGraph) -> None:
    """Make a graph of ``Recorder.record_start`` the first node of the one that the current stream captures;
    what is captured next follows it. The driver copies it.

    Raises:
        DeviceError: the driver refuses.
    """
    driver = load_driver()
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    status, number, parent, node = c_int(), c_uint64(), c_void_p(), c_void_p()
    info = driver.cuStreamGetCaptureInfo_v2(
        stream, byref(status), byref(number), byref(parent), c_void_p(), c_void_p()
    )
    _check("cuStreamGetCaptureInfo", info)
    assert status.value == _CAPTURES, "a child is added while its parent is captured"
    child = c_void_p(graph.raw_cuda_graph())
    added = driver.cuGraphAddChildGraphNode(byref(node), parent, c_void_p(), c_size_t(0), child)
    _check("cuGraphAddChildGraphNode", added)
    moved = driver.cuStreamUpdateCaptureDependencies(stream, byref(node), c_size_t(1), c_uint(_REPLACE))
    _check("cuStreamUpdateCaptureDependencies", moved)


@functools.cache
def load_driver() -> ctypes.CDLL:
    """The driver's library, which PyTorch has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def _check(call: str, code: int) -> None:
    if code:
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{call}: out of memory")
        raise DeviceError("the driver refuses a graph within a graph", seen=f"{call}: error {code}")
