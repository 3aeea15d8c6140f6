"""The encoding of whole inputs as CUDA graphs, one a number of inputs.

Owns capture and replay over static features and places of outputs. The host takes longer to launch a window
of a small encoder than the GPU to compute it. Knows no model and no request.

    graphs = EncoderGraphs(keep, shape=(80, 3000), positions=1500, most=4, device=device)
    if graphs.fits(features.shape): graphs.run(features, slots)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingot.runtime.recording import Recorder


class EncoderGraphs:
    """Captured encodings of 1, 2, 4 … up to ``most`` inputs; each is captured when it is first needed.

    Args:
        keep: encodes features [N, *shape], float32, into the places [N * positions] of their outputs.
    """

    def __init__(
        self,
        keep: Callable[[torch.Tensor, torch.Tensor], None],
        shape: tuple[int, ...],
        positions: int,
        most: int,
        device: torch.device,
    ) -> None:
        self._keep = keep
        self._shape = shape
        self._features = torch.zeros(most, *shape, device=device)
        self._slots = torch.zeros(most * positions, dtype=torch.int64, device=device)
        self._recorder = Recorder(device)
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def fits(self, shape: torch.Size) -> bool:
        """Whether a graph takes features of this shape."""
        return tuple(shape[1:]) == self._shape and shape[0] <= len(self._features)

    def run(self, features: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode features [N, *shape] into ``slots`` on the host; nothing waits for the device."""
        count = len(features)
        given, places = self._features[:count], self._slots[: len(slots)]
        given.copy_(features, non_blocking=True)
        places.copy_(slots, non_blocking=True)
        graph = self._captured.get(count)
        if graph is not None:
            graph.replay()
            return
        self._keep(given, places)  # these inputs; it compiles kernels outside of the capture
        self._captured[count], _ = self._recorder.record(lambda: self._keep(given, places))
