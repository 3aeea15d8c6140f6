"""LangChain's interfaces over an engine in this process.

Covers the translation between LangChain's messages, values and results and those of ``LLM``.

    chat = ChatIngot(model="engines/qwen", temperature=0.7, max_tokens=128)
    print(chat.invoke("Why is the sky blue?").text)
"""

from importlib.util import find_spec

from ingot.errors import to_install

if find_spec("langchain_core") is None:
    raise ImportError(f"ingot.langchain needs langchain-core; to fix: {to_install('langchain')}")

from ingot.adapters.langchain.chat_model import ChatIngot
from ingot.adapters.langchain.embeddings_model import IngotEmbeddings

__all__ = ["ChatIngot", "IngotEmbeddings"]
