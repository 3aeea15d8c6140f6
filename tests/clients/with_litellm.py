"""Run by LiteLLM's environment: what it makes of the server's answers, as JSON.

python with_litellm.py http://127.0.0.1:8000
"""

import asyncio
import json
import sys

import litellm

litellm.suppress_debug_info = True
BASE = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
CHAT = {**BASE, "model": "hosted_vllm/pocket", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}


def kind_of_error(**values: object) -> str | None:
    try:
        litellm.completion(**{**CHAT, **values})
    except Exception as error:
        return type(error).__name__
    return None


async def left_early() -> None:
    stream = await litellm.acompletion(**CHAT, stream=True, max_tokens=1500, ignore_eos=True)
    async for _ in stream:
        break
    await stream.aclose()


whole = litellm.completion(**CHAT)
chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
with_usage = [chunk for chunk in chunks if getattr(chunk, "usage", None)]
several = litellm.completion(**CHAT, n=2, temperature=1, seed=3, logprobs=True, top_logprobs=2)
text = litellm.text_completion(
    **BASE, model="text-completion-openai/pocket", prompt="A fire broke out in a", max_tokens=8
)
asyncio.run(left_early())
found = {
    "whole": whole.choices[0].message.content,
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "stream_usage": [[c.usage.prompt_tokens, c.usage.completion_tokens] for c in with_usage],
    "n": len(several.choices),
    "logprobs": [len(t["top_logprobs"]) for t in several.choices[0].logprobs.model_dump()["content"]][:1],
    "stop": litellm.completion(**CHAT, stop=["="]).choices[0].message.content,
    "text": text.choices[0].text,
    "no_model": kind_of_error(model="hosted_vllm/none"),
    "too_long": kind_of_error(messages=[{"role": "user", "content": "a b " * 2000}]),
}  # fmt: skip
print(json.dumps(found))
