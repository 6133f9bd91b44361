"""Paged attention, plugged into transformers' attention interface under its own name."""

from fastserve_worker.engine.attention.interface import ATTENTION_NAME

__all__ = ["ATTENTION_NAME"]
