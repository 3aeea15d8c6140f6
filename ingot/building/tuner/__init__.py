"""Measuring tile choices: ``tune`` for an engine, ``tune_model`` for a model that is being built."""

from ingot.building.tuner.tile_search import Dropped, TileChoice
from ingot.building.tuner.tuning import Tuning, tune, tune_model

__all__ = ["Dropped", "TileChoice", "Tuning", "tune", "tune_model"]
