"""An engine as LangChain's embeddings."""

from __future__ import annotations

from pathlib import Path

from langchain_core.embeddings import Embeddings
from torch.nn.functional import normalize

from ingot.llm import LLM


class IngotEmbeddings(Embeddings):
    """Texts as vectors of unit length, from an engine's last hidden states; texts share steps, with the
    answers of a ``ChatIngot`` over the same ``LLM`` too.

    A chat model was not trained for retrieval: measure before you rely on it.

    Args:
        model: an ``LLM``, or the folder or Hugging Face id to open one from.
        pooling: ``mean`` over a text's tokens, or ``last``: the last token's.

    Raises:
        EngineError, CheckpointError, DeviceError: the folder cannot be opened.
    """

    def __init__(self, model: LLM | str | Path, *, pooling: str = "mean") -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model)
        self.pooling = pooling

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector of ``hidden_size`` values per text. Raises RequestError where a text is empty or longer
        than the engine takes, or the pooling is unknown.
        """
        vectors: list[list[float]] = normalize(self.llm.embed(texts, self.pooling)).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text, the same as of a document."""
        return self.embed_documents([text])[0]
