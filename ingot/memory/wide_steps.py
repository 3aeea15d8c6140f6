"""Whether a GPU has room for wide steps: more tokens of prompts at once than a step beside streams may have.

setting = with_wide_steps(setting, capacity)
"""

from __future__ import annotations

from ingot.config.step_sizes import WIDE_STEP, WIDEST_STEP
from ingot.memory.ledger import Capacity, MemorySetting, ledger

_SHARE = 32  # of the cache's blocks that the activations of wide steps may take


def with_wide_steps(setting: MemorySetting, capacity: Capacity) -> MemorySetting:
    """The setting with a ``prompt_budget``: as given, else of ``WIDE_STEP`` token budgets where the ledger
    has room for them (``leaves_enough``). Models with an encoder have none unasked: their inputs bound a step
    anyway.
    """
    runtime = setting.runtime
    budget = min(WIDE_STEP * runtime.token_budget, WIDEST_STEP)
    if runtime.prompt_budget is not None or budget <= runtime.token_budget:
        return setting
    if setting.device != "cuda" or setting.model.encoder is not None:
        return setting
    wide = setting.replace(runtime=runtime.replace(prompt_budget=budget))
    enough = leaves_enough(setting, ledger(setting, capacity).blocks, ledger(wide, capacity).blocks)
    return wide if enough else setting


def leaves_enough(setting: MemorySetting, before: int, after: int) -> bool:
    """Whether wide steps leave the full cache, or most of a smaller one: ``before`` blocks without them,
    ``after`` with them.
    """
    if before >= setting.wanted_blocks or after < setting.blocks_per_request:
        return after >= before
    return _SHARE * after >= (_SHARE - 1) * before
