"""Whether the core that is running is Python or was compiled to C (services/scheduler/compile.py)."""

from fastserve_scheduler.core import scheduler

COMPILED = not scheduler.__file__.endswith(".py")
