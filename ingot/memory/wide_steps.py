"""Whether a GPU has room for wide steps: more tokens of prompts at once than a step beside streams may have.

setting = with_wide_steps(setting, capacity)
"""

from __future__ import annotations

from ingot.config.decoder_config import DecoderConfig
from ingot.config.step_sizes import WIDE_STEP, WIDEST_STEP
from ingot.memory.ledger import Capacity, MemorySetting, ledger

# Of a layer: with fewer a GPU is done with 8192 rows before the host has launched the next one (0.75 ms),
# and usual steps, which have graphs, are no slower.
_LEAST_WEIGHTS = 32 << 20
_SHARE = 32  # of the cache's blocks that the activations of wide steps may take


def with_wide_steps(setting: MemorySetting, capacity: Capacity) -> MemorySetting:
    """The setting with a ``prompt_budget``: as given, else of ``WIDE_STEP`` token budgets where the ledger
    has room for them (``leaves_enough``). Models with an encoder have none unasked, as their inputs bound a
    step anyway, nor have those of small layers.
    """
    runtime = setting.runtime
    budget = min(WIDE_STEP * runtime.token_budget, WIDEST_STEP)
    if runtime.prompt_budget is not None or budget <= runtime.token_budget:
        return setting
    if setting.device != "cuda" or setting.model.encoder is not None or not _keeps_busy(setting.model):
        return setting
    wide = setting.replace(runtime=runtime.replace(prompt_budget=budget))
    enough = leaves_enough(setting, ledger(setting, capacity).blocks, ledger(wide, capacity).blocks)
    return wide if enough else setting


def _keeps_busy(model: DecoderConfig) -> bool:
    """Whether a wide step of a layer takes a GPU longer than its launches take the host."""
    inputs = 2 * model.q_size + 2 * model.kv_size + (3 if model.gated else 2) * model.intermediate_size
    return model.hidden_size * inputs >= _LEAST_WEIGHTS


def leaves_enough(setting: MemorySetting, before: int, after: int) -> bool:
    """Whether wide steps leave the full cache, or most of a smaller one: ``before`` blocks without them,
    ``after`` with them.
    """
    if before >= setting.wanted_blocks or after < setting.blocks_per_request:
        return after >= before
    return _SHARE * after >= (_SHARE - 1) * before
