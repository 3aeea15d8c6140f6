"""Speech to text with OpenAI's client: ingot serve engines/pocket-whisper

python examples/clients/transcribe.py FILE [URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from openai import APIConnectionError, OpenAI, OpenAIError
except ModuleNotFoundError:
    sys.exit("error: OpenAI's client is not installed; to fix: pip install openai")


def main(file: Path, url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    found = client.audio.transcriptions.create(model=model, file=file, response_format="verbose_json")
    print(f"{found.language}, {found.duration:.1f} s")
    for segment in found.segments or ():
        print(f"{segment.start:7.2f} {segment.end:7.2f} {segment.text.strip()}")

    for event in client.audio.transcriptions.create(model=model, file=file, stream=True):
        if event.type == "transcript.text.delta":  # as soon as it is known
            print(event.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    recording, address = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    if not recording.is_file():
        sys.exit(f"error: no such file; seen: {recording}")
    try:
        main(recording, address)
    except APIConnectionError:
        sys.exit(f"error: no server answers at {address}; to fix: ingot serve engines/pocket-whisper")
    except OpenAIError as error:
        sys.exit(f"error: the server refused the request; seen: {error}")
