"""Ingot behind Triton Inference Server: the model repository (``repository.py``) and what runs in it."""
