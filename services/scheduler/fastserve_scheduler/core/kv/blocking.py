"""Blocking: reactive swapping as the paper has it for a rival: a batch waits for its own copies, and the device idles.

It is here to be measured against.
"""

from fastserve_scheduler.core.kv.reactive import Reactive


class Blocking(Reactive):
    batch_waits = True
