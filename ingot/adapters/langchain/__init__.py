"""LangChain's chat model and embeddings over an engine in this process."""

from importlib.util import find_spec

from ingot.errors import to_install

if find_spec("langchain_core") is None:
    raise ImportError(f"ingot.langchain needs langchain-core; to fix: {to_install('langchain')}")

from ingot.adapters.langchain.chat_model import ChatIngot
from ingot.adapters.langchain.embeddings_model import IngotEmbeddings

__all__ = ["ChatIngot", "IngotEmbeddings"]
