"""What Triton's Python backend gives a model, as far as Ingot uses it.

It stands in for ``triton_python_backend_utils`` and records violations of a response sender's rules.
    sys.modules["triton_python_backend_utils"] = module()
    request = Request({"text_input": "A fire"}); backend.execute([request]); request.sender.parts()
"""

from __future__ import annotations

import queue
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1
PATIENCE = 60.0  # seconds; only a failing test waits this long


class ModelError(Exception):
    """``TritonModelException``."""


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = name
        self._values = values

    def as_numpy(self) -> np.ndarray:
        return self._values


class Sender:
    """``InferenceResponseSender``; ``cancelled`` is the client's part."""

    def __init__(self) -> None:
        self.cancelled = False
        self.broken: list[str] = []
        self._responses: queue.Queue[tuple[Any, int]] = queue.Queue()
        self._closed = False
        self._alone = threading.Lock()

    def send(self, response: Any, flags: int = 0) -> None:
        with self._alone:
            if self._closed:
                self.broken.append("a response after the last")
            self._closed = flags == FINAL
            self._responses.put((response, flags))

    def is_cancelled(self) -> bool:
        with self._alone:
            if self._closed:
                self.broken.append("asked after the last response")  # Triton has freed the request
        return self.cancelled

    def next(self) -> tuple[dict[str, Any], Any, bool]:
        """A response: outputs by name, its error, and whether it is the last."""
        response, flags = self._responses.get(timeout=PATIENCE)
        outputs = {one.name: one.as_numpy()[0] for one in response.output_tensors}
        found = {name: one.decode() if isinstance(one, bytes) else int(one) for name, one in outputs.items()}
        return found, response.error, flags == FINAL

    def parts(self) -> list[dict[str, Any]]:
        """The outputs of all responses; fails where one is an error."""
        found, is_last = [], False
        while not is_last:
            outputs, error, is_last = self.next()
            assert error is None, error.message
            found.append(outputs)
        return found

    def text(self) -> str:
        return "".join(part["text_output"] for part in self.parts())

    def error(self) -> Any:
        """The error with which it ends."""
        is_last = False
        while not is_last:
            _, error, is_last = self.next()
        assert error is not None
        return error


class Request:
    """``InferenceRequest``."""

    def __init__(self, inputs: dict[str, Any], parameters: str = "") -> None:
        self.inputs = {name: _tensor(name, value) for name, value in inputs.items()}
        self.sender = Sender()
        self._parameters = parameters

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> Sender:
        return self.sender


def _tensor(name: str, value: Any) -> Tensor:
    values = value if isinstance(value, list) else [value]
    values = [one.encode() if isinstance(one, str) else one for one in values]
    return Tensor(name, np.array(values, dtype=bool if isinstance(values[0], bool) else object))


def module() -> ModuleType:
    """The module."""
    found: Any = ModuleType("triton_python_backend_utils")
    found.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    found.Tensor = Tensor
    found.TritonModelException = ModelError
    found.TritonError = _error
    for code in ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"):
        setattr(_error, code, code)
    found.InferenceResponse = _response
    found.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    found.using_decoupled_model_transaction_policy = lambda config: config["decoupled"]
    return found


def _error(message: str, code: str) -> SimpleNamespace:
    return SimpleNamespace(message=message, code=code)


def _response(output_tensors: Any = (), error: Any = None) -> SimpleNamespace:
    return SimpleNamespace(output_tensors=output_tensors, error=error)
