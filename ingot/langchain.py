"""The public name of LangChain's interfaces: ``from ingot.langchain import ChatIngot``."""

from ingot.adapters.langchain import ChatIngot, IngotEmbeddings

__all__ = ["ChatIngot", "IngotEmbeddings"]
