"""Paged attention, plugged into transformers' attention interface under its own name."""
