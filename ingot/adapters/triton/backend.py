"""What a generated model.py calls; only the process of Triton's Python backend can import it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ingot.adapters.triton import triton_tensors as tensors
from ingot.adapters.triton.triton_replies import Part
from ingot.adapters.triton.triton_request import Generate, read
from ingot.adapters.triton.triton_service import CANCELLED, Service
from ingot.adapters.triton.triton_settings import Settings
from ingot.errors import IngotError
from ingot.serve.api_errors import ApiError, bad_request

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_CODES = {
    400: pb_utils.TritonError.INVALID_ARG,
    429: pb_utils.TritonError.UNAVAILABLE,
    CANCELLED: pb_utils.TritonError.CANCELLED,
    503: pb_utils.TritonError.UNAVAILABLE,
}


class Backend:
    """One instance of a model: the engine that config.pbtxt names, in a process of its own. Raises
    TritonModelException where it cannot be loaded.
    """

    def __init__(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        texts = {name: value["string_value"] for name, value in config["parameters"].items()}
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        version = Path(args["model_repository"]) / args["model_version"]
        self._streams = pb_utils.using_decoupled_model_transaction_policy(config)
        try:
            self._service = Service.start(args["model_name"], Settings.read(texts), device, version)
        except IngotError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin to answer; the responses come from other threads."""
        for request in requests:
            channel = _Channel(request)
            try:
                channel.asked = asked = read(_tensors(request), request.parameters())
                if asked.stream and not self._streams:
                    raise bad_request("this model does not stream: its config.pbtxt has decoupled: false")
                self._service.submit(asked, channel)
            except ApiError as error:
                self._service.refuse(channel, error)

    @property
    def is_ready(self) -> bool:
        return self._service.lost is None

    def close(self) -> None:
        self._service.close()


class _Channel:
    asked: Generate | None = None

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, part: Part) -> None:
        extras = self.asked.extras if self.asked else ()
        outputs = [_text("text_output", part.text)]
        if tensors.FINISH_REASON in extras:
            reason = str(part.finish_reason)  # "None" before the last, as vLLM's
            outputs.append(_text(tensors.FINISH_REASON, reason))
        if tensors.NUM_INPUT_TOKENS in extras:
            outputs.append(_count(tensors.NUM_INPUT_TOKENS, part.num_input_tokens))
        if tensors.NUM_OUTPUT_TOKENS in extras:
            outputs.append(_count(tensors.NUM_OUTPUT_TOKENS, part.num_tokens))
        flags = _FINAL if part.finish_reason is not None else 0
        self._sender.send(pb_utils.InferenceResponse(outputs), flags=flags)

    def fail(self, error: ApiError) -> None:
        code = _CODES.get(error.status, pb_utils.TritonError.INTERNAL)
        triton_error = pb_utils.TritonError(error.message, code)
        self._sender.send(pb_utils.InferenceResponse(error=triton_error), flags=_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _tensors(request: Any) -> dict[str, Any]:
    """What was sent, by name. Raises ApiError where a tensor has the wrong number of values, or is not
    UTF-8.
    """
    found: dict[str, Any] = {}
    for one in tensors.INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, one.name)
        if tensor is None:
            continue
        values = tensor.as_numpy().reshape(-1)
        if one.size == 1 and len(values) != 1:
            raise bad_request(f"{one.name} holds {len(values)} values; it takes one", one.name)
        try:
            read = [value.decode() if one.kind == "STRING" else bool(value) for value in values]
            found[one.name] = read[0] if one.size == 1 else read
        except UnicodeDecodeError:
            raise bad_request(f"{one.name} is not UTF-8", one.name) from None
    return found


def _text(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def _count(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.uint32))
