"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import Answer
from ingot.llm.prompt_inputs import PromptLike
from ingot.serve.api.logprob_text import LogprobLists
from ingot.serve.api.sampling_fields import sampling_params
from ingot.serve.api_call import ApiCall
from ingot.serve.api_errors import bad_request, unsupported
from ingot.serve.engine_calls.answering import MOST_LOGPROBS, Answering, Job, too_large
from ingot.serve.json_parts import LazyList
from ingot.serve.request_schemas import CompletionRequest, prompts_of
from ingot.serve.response_formats import read_format
from ingot.serve.served_model import ServedModel

_MAX_TOKENS = 16  # the API's default


class CompletionCall(ApiCall):
    """Prompts to continue, each ``n`` times; raises ApiError where a value cannot be served."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    names_no_usage = False  # the published schema has no null there

    def __init__(self, model: ServedModel, body: CompletionRequest) -> None:
        self._prompts = prompts_of(body.prompt, "prompt")
        self._n = body.n or 1
        super().__init__(model, body, len(self._prompts) * self._n)
        if body.best_of is not None and body.best_of != self._n:
            raise unsupported("best_of", "a best_of other than n")
        self._asked = body.max_tokens
        if self._asked == 0 and not body.echo:
            raise bad_request("max_tokens: Expected `int` >= 1, unless echo is true", "max_tokens")
        limit = _MAX_TOKENS if self._asked is None else self._asked
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        params = sampling_params(
            body,
            model.defaults.params,
            model.engine.limits.vocab_size,
            max_tokens=max(limit, 1),
            logprobs=body.logprobs,
        )
        self._params = params if limit else None
        self.form = read_format(body)

    def asked(self) -> tuple[Sequence[PromptLike], SamplingParams | None]:
        return self._prompts, self._params

    def jobs(self) -> list[Job]:
        score = self._logprobs if self._echo else None
        jobs = []
        for prompt in self._prompts:
            ids = self.model.prompt_ids(prompt)
            self.model.check_ids(ids, 1 if self._asked is None else self._asked, "prompt")
            params = None if self._params is None else self.model.held(self._params, self.form, ids)
            jobs.append(Job(ids, params, ids, score))
        count = sum(len(job.ids) for job in jobs) * self._n
        if score is not None and not self.body.stream and count * (1 + score) > MOST_LOGPROBS:
            raise too_large("the echoed prompt", "n or logprobs")
        return jobs

    def choices(self, found: Answering) -> Iterator[dict[str, Any]]:
        """``n`` in a row for each prompt."""
        for position in range(len(self._prompts)):
            answers: Sequence[Answer | None] = found.answers(position)
            for index, answer in enumerate(answers or [None] * self._n, start=position * self._n):
                text, lists = self._begin(found, position)
                tokens = [] if answer is None else answer.logprobs or []
                if answer is not None:
                    text += answer.text or ""
                reason = "length" if answer is None else answer.finish_reason
                yield _choice(index, text, None if lists is None else lists.of(tokens), reason)

    async def parts(self, found: Answering) -> AsyncGenerator[dict[str, Any], None]:
        """Pieces of text; the first of each choice begins with the prompt, if it is echoed."""
        await found.scored()
        if self._params is None:
            for choice in self.choices(found):
                yield choice
            return
        begun: dict[int, LogprobLists | None] = {}
        async for index, piece in found.pieces():
            is_first = index not in begun
            if not (is_first or piece.text or piece.finish_reason or piece.logprobs):
                continue  # text that is held back comes with a later piece
            text = piece.text
            if is_first:
                before, begun[index] = self._begin(found, index // self._n)
                text = before + text
            lists = begun[index]
            yield _choice(
                index, text, None if lists is None else lists.of(piece.logprobs), piece.finish_reason
            )

    def _begin(self, found: Answering, position: int) -> tuple[str, LogprobLists | None]:
        """What stands before an answer: the echoed prompt, or nothing; with the lists that begin there."""
        wanted = self._logprobs is not None
        if not self._echo:
            return "", LogprobLists(self.model.tokenizer) if wanted else None
        ids, prompt = found.jobs[position].ids, self._prompts[position]
        text = prompt if isinstance(prompt, str) else self.model.tokenizer.decode(ids)
        scores = found.scores[position] if wanted else []
        return text, LogprobLists(self.model.tokenizer, ids[0], scores) if wanted else None


def _choice(
    index: int, text: str, logprobs: dict[str, LazyList] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
