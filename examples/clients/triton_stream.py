"""An answer from Triton Inference Server, printed as it comes.

pip install 'tritonclient[grpc]'
python examples/clients/triton_stream.py pocket-chat "A fire broke out in a"
"""

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, value: str | bool) -> triton.InferInput:
    is_text = isinstance(value, str)
    found = triton.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    found.set_data_from_numpy(
        np.array([value.encode() if is_text else value], dtype=object if is_text else bool)
    )
    return found


parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("prompt")
parser.add_argument("--url", default="127.0.0.1:8001")
parser.add_argument("--max-tokens", type=int, default=64)
args = parser.parse_args()

values = {"max_tokens": args.max_tokens, "temperature": 0}
inputs = [
    tensor("text_input", args.prompt),
    tensor("stream", True),
    tensor("sampling_parameters", json.dumps(values)),
]
come: queue.Queue = queue.Queue()
with triton.InferenceServerClient(args.url) as client:
    client.start_stream(lambda result, error: come.put((result, error)))
    client.async_stream_infer(args.model, inputs, enable_empty_final_response=True)
    while True:
        result, error = come.get()
        if error is not None:
            raise SystemExit(f"error: {error.message()}")
        text = result.as_numpy("text_output")
        if text is not None:
            print(text[0].decode(), end="", flush=True)
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()  # to cancel: stop_stream(cancel_requests=True)
print()
