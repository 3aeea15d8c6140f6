"""Why two lists of token ids differ."""

from __future__ import annotations

from ingot.measure.align.first_divergence import Divergence, Finding

STAGES = ("prompt", "ids", "greedy")


def explain_ids(divergence: Divergence) -> list[Finding]:
    """Findings of a stage whose outputs are ids [T]; ``before`` and ``after`` are shares of unequal ids."""
    ours, theirs = divergence.got.flatten().tolist(), divergence.expected.flatten().tolist()
    if ours == theirs:
        return []
    longest = max(len(ours), len(theirs))
    before = (longest - sum(a == b for a, b in zip(ours, theirs, strict=False))) / longest
    explained = _greedy(ours, theirs) if divergence.stage == "greedy" else _prompt(ours, theirs)
    return [] if explained is None else [Finding(explained[0], before, 0.0, explained[1])]


def _prompt(ours: list[int], theirs: list[int]) -> tuple[str, str] | None:
    if ours and ours[1:] == theirs:
        twice = len(ours) > 1 and ours[0] == ours[1]
        what = "a second" if twice else "a"
        text = f"the prompt begins with {what} token {ours[0]} that the original does not put there"
        return "bos_extra", f"{text}; without it the ids are equal"
    if theirs and theirs[1:] == ours:
        text = f"the prompt lacks the token {theirs[0]} (bos) with which the original begins"
        return "bos_missing", f"{text}; with it the ids are equal"
    if len(ours) == len(theirs) and ours[1:] == theirs[1:]:
        text = f"the prompt begins with token {ours[0]}, the original's with {theirs[0]}"
        return "bos_other", f"{text}; everything after it is equal"
    if ours and ours[:-1] == theirs:
        return "eos_extra", f"the prompt ends with a token {ours[-1]} that the original does not put there"
    if theirs and theirs[:-1] == ours:
        return "eos_missing", f"the prompt lacks the token {theirs[-1]} with which the original ends"
    short, long = sorted((ours, theirs), key=len)
    extra = len(long) - len(short)
    if not short or not extra:
        return None
    says = "lacks" if long is theirs else "has"
    tail = "that the original has" if long is theirs else "that the original does not have"
    kind = "missing" if long is theirs else "extra"
    if long[extra:] == short:
        text = f"the prompt {says} {extra} tokens at its beginning {tail}: {long[:extra][:8]}"
        return f"prefix_{kind}", text
    if long[: len(short)] == short:
        return f"suffix_{kind}", f"the prompt {says} {extra} tokens at its end {tail}: {long[-extra:][:8]}"
    return None


def _greedy(ours: list[int], theirs: list[int]) -> tuple[str, str] | None:
    if len(ours) > len(theirs) and ours[: len(theirs)] == theirs:
        last = f"token {theirs[-1]}" if theirs else "the first token"
        following = ours[len(theirs)]
        text = (
            f"generation ran on after {len(theirs)} tokens, where the original stops: {last} (the last of "
            f"both) or token {following} (the next one) is not in the engine's stop set"
        )
        return "stop_ids", f"{text}; up to there the ids are equal"
    if len(theirs) > len(ours) and theirs[: len(ours)] == ours:
        following = theirs[len(ours)]
        text = (
            f"generation stops after {len(ours)} tokens, where the original goes on: token {following} ends "
            "a text for the engine and not for the original"
        )
        return "stop_ids", f"{text}; up to there the ids are equal"
    return None
