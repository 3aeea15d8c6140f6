"""Questions about Ingot's own documentation, answered with LangChain, with their sources.

Passages are found by words (BM25) and by an engine's embeddings, joined by reciprocal rank fusion. An engine
in this process answers from them, or with --url a server (`ingot serve`), by words alone. Needs
`pip install '.[langchain]' rank-bm25`, and for a server `langchain-openai`.

python examples/langchain_docs.py [ENGINE]
python examples/langchain_docs.py --url http://127.0.0.1:8000 --model pocket-chat
"""

import argparse
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from rank_bm25 import BM25Okapi

from ingot import LLM
from ingot.langchain import ChatIngot, IngotEmbeddings

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
QUESTIONS = HERE / "docs_questions.jsonl"
LONGEST = 1200  # characters of a passage
EMBEDDED = 400  # characters are embedded, headings included
PROMPT = ChatPromptTemplate([("human", "Text: {text}\n\nQuestion: {question}")])
WEIGHTS = {"words": 0.9, "vectors": 0.1}  # for the pocket model, by what each finds alone; measure your own


def passages(folder: Path = DOCS) -> list[Document]:
    """The pages of a folder, cut at headings and, where a section is long, at line ends."""
    found: list[Document] = []
    for page in sorted(folder.glob("*.md")):
        path, lines, fenced = [], [], False
        for line in [*page.read_text(encoding="utf-8").splitlines(), "# "]:
            heading = None if fenced else re.match(r"(#+) (.*)", line)
            if lines and (heading or sum(map(len, lines)) + len(line) > LONGEST):
                source = {"file": page.name, "heading": path[-1] if path else ""}
                found.append(Document(" > ".join(path) + "\n" + "\n".join(lines), metadata=source))
                lines = []
            fenced ^= line.startswith("```")
            if heading:
                path = [*path[: len(heading[1]) - 1], heading[2]]
            elif line.strip():
                lines.append(line)
    return found


def words(text: str) -> list[str]:
    """Words and numbers in lower case, a plural's s left out."""
    return [re.sub(r"(?<=\w{3})s$", "", word) for word in re.findall(r"[a-z0-9]+", text.lower())]


class DocsRetriever(BaseRetriever):
    """The ``k`` passages with the best sum of weighted ranks."""

    passages: list[Document]
    embeddings: Any
    bm25: Any
    vectors: Any
    weights: dict[str, float] = WEIGHTS
    k: int = 4

    @classmethod
    def over(cls, passages: list[Document], embeddings: IngotEmbeddings | None) -> "DocsRetriever":
        texts = [passage.page_content for passage in passages]
        if embeddings is None:
            bm25 = BM25Okapi([words(text) for text in texts])
            return cls(passages=passages, embeddings=None, bm25=bm25, vectors=None, weights={"words": 1.0})
        vectors = torch.tensor(embeddings.embed_documents([text[:EMBEDDED] for text in texts]))
        bm25 = BM25Okapi([words(text) for text in texts])
        return cls(passages=passages, embeddings=embeddings, bm25=bm25, vectors=vectors)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        fused = sum(weight / (60 + self._ranks(query, way)) for way, weight in self.weights.items())
        return [self.passages[i] for i in torch.as_tensor(fused).topk(self.k).indices.tolist()]

    def _ranks(self, query: str, way: str) -> torch.Tensor:
        if way == "words":
            scores = torch.from_numpy(self.bm25.get_scores(words(query)))
        else:
            scores = self.vectors @ torch.tensor(self.embeddings.embed_query(query))
        return scores.argsort(descending=True, stable=True).argsort().double()


def recall(retriever: DocsRetriever, questions: list[dict[str, str]], **weights: float) -> float:
    """The share of questions whose source is among the passages found."""
    one = retriever.model_copy(update={"weights": weights})
    sources = [{"file": q["file"], "heading": q["heading"]} for q in questions]
    hits = [
        s in [d.metadata for d in one.invoke(q["question"])] for s, q in zip(sources, questions, strict=True)
    ]
    return sum(hits) / len(hits)


def answer(
    chat: Any,
    retriever: DocsRetriever,
    question: str,
    limit: int = 700,
    count: Callable[[list[Any]], int] | None = None,
) -> str:
    """An answer from the passages, which are cut to ``limit`` tokens of prompt, and their sources. ``count``
    counts a prompt's tokens; by default the chat model does.
    """
    count = count or chat.get_num_tokens_from_messages
    found = retriever.invoke(question)
    text = "\n\n".join(passage.page_content for passage in found)
    asked = PROMPT.invoke({"text": text, "question": question})
    while count(asked.to_messages()) > limit:
        text = text[: len(text) * 3 // 4]
        asked = PROMPT.invoke({"text": text, "question": question})
    sources = dict.fromkeys("docs/{file}: {heading}".format(**passage.metadata) for passage in found)
    return chat.invoke(asked).text + "".join(f"\n    [{source}]" for source in sources)


def tokens_at(url: str, model: str, messages: list[Any]) -> int:
    """Tokens of a prompt, as a server counts them."""
    body = {"model": model, "messages": [{"role": "user", "content": m.text} for m in messages]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/tokenize", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return int(json.load(reply)["count"])


def by_server(url: str, model: str) -> None:
    """The first questions, answered by a server."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=48, temperature=0)
    retriever = DocsRetriever.over(passages(), None)
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines()[:3]:
        question = json.loads(line)["question"]
        text = answer(chat, retriever, question, count=lambda found: tokens_at(url, model, found))
        print(f"\n> {question}\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", nargs="?", default="engines/pocket-chat")
    parser.add_argument("--url", help="of a server, in place of an engine")
    parser.add_argument("--model", default="pocket-chat", help="the server's model")
    args = parser.parse_args()
    if args.url:
        by_server(args.url, args.model)
        return
    llm = LLM(args.engine)
    retriever = DocsRetriever.over(passages(), IngotEmbeddings(llm))
    questions = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    for weights in ({"words": 1}, {"vectors": 1}, {"words": 1, "vectors": 1}, WEIGHTS):
        print(f"recall@4 with {weights}: {recall(retriever, questions, **weights):.2f}")
    chat = ChatIngot(model=llm, max_tokens=48, temperature=0)
    for one in questions[:3]:
        print(f"\n> {one['question']}\n{answer(chat, retriever, one['question'])}")


if __name__ == "__main__":
    main()
