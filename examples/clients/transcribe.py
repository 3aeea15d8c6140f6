"""Recordings to text with OpenAI's client and a server of Ingot: ingot serve engines/whisper

python examples/clients/transcribe.py FILE [URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI

if len(sys.argv) < 2:
    sys.exit(__doc__)
file = Path(sys.argv[1])
url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
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
