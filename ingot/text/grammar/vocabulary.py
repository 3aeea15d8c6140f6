"""A vocabulary and its matchers as llguidance takes them, with their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Lexer fuel of one step: about 15 ms. Earley items of one step and after one byte: of a schema of 2000
# optional properties, about 7 ms. All answers of a grammar share its lexer states: STATES_BYTES at most.
_STEP_FUEL, _STEP_ITEMS, _ROW_ITEMS, _LEXER_STATES = 200_000, 500_000, 8192, 16_384
STATES_BYTES = 8 << 20
DEAD_END = "nothing can follow, or finding what can takes too much work"


class _Tokens:
    """What ``LLTokenizer`` reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: object) -> NoReturn:
        raise AssertionError("no_forcing grammars never encode text")


def vocabulary(tokens: Sequence[bytes], special: Sequence[int] = ()) -> LLTokenizer:
    """A vocabulary of tokens by id; empty and ``special`` ones are never text.

    Its end token is the id after the last, which no engine has: each request names its own end tokens.
    """
    from llguidance import LLTokenizer

    end = len(tokens)
    wrapper = _Tokens([*tokens, b""], [*special, end])
    return LLTokenizer(wrapper, n_vocab=end + 1, eos_token=end)  # type: ignore[arg-type]


def new_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the start of a text; ``fault_of`` says whether the grammar is valid."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_items_in_row=_ROW_ITEMS,
        max_lexer_states=_LEXER_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def fault_of(matcher: LLMatcher) -> str | None:
    """Why a matcher cannot continue, in llguidance's words; None if it can."""
    if not matcher.is_error():
        return None
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    if lines[0] == "NoExtensionBias":
        return DEAD_END
    if "regex parse error:" in lines[0]:  # the pattern, a mark below it, and the reason
        return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return lines[0].split("failed to compile JSON schema: ")[-1][:300]
