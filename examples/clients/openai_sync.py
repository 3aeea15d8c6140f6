"""OpenAI's client: ingot serve engines/pocket-chat

python examples/clients/openai_sync.py [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI

client = OpenAI(
    base_url=f"{sys.argv[1] if len(sys.argv) > 1 else 'http://127.0.0.1:8000'}/v1", api_key="none"
)
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "How much is 27 + 58?"}], max_tokens=32
)
print(answer.choices[0].message.content)
print(answer.usage)
