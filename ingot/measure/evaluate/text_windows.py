"""Running text cut into windows that a model can take.

Owns which tokens a window computes and which of them it counts. Knows no model and no text.

    for window in windows(len(ids), size=1024, stride=512): ids[window.begin : window.end]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.errors import ConfigError


@dataclass(frozen=True)
class TextWindow:
    """Tokens ``begin`` to ``end`` are computed, ``first`` to ``end`` counted: each has those before it in the
    window as context.
    """

    begin: int
    first: int
    end: int

    @property
    def counted(self) -> slice:
        """Where the counted tokens stand among the window's log-likelihoods, which begin with its second
        token.
        """
        return slice(self.first - self.begin - 1, self.end - self.begin - 1)


def windows(num_tokens: int, size: int, stride: int) -> Iterator[TextWindow]:
    """Windows of ``size`` tokens, each ``stride`` further; of each only the tokens that no window before it
    had count.

    With a stride below the size every token but the text's first counts once. With both equal the windows
    are apart, and the first token of each has no context and does not count.

    Raises:
        ConfigError: the stride is not 1 to ``size``, or ``size`` is below 2.
    """
    if size < 2:
        raise ConfigError("a window needs at least two tokens", seen=size, field="window")
    if not 1 <= stride <= size:
        raise ConfigError("the stride is out of range", seen=stride, allowed=f"1 to {size}", field="stride")
    done = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + size, num_tokens)
        first = max(done, begin + 1)
        if first < end:
            yield TextWindow(begin, first, end)
        done = end
        if end == num_tokens:
            return
