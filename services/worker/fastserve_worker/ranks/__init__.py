"""Tensor-parallel ranks of one stage: processes that hold a share of each of its layers and obey the same orders.

Rank 0 is the stage as everybody else knows it. It hands every plan on to the others, which compute with it and swap
their share of the KV; what they hand in becomes part of its own reports.
"""
