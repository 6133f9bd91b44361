"""`python -m fastserve_common.supervised MODULE ARGS`: run MODULE as the child of a supervisor.

The tie to the supervisor is made before MODULE is imported: importing a large library takes seconds, in which a
supervisor that is killed would leave its child behind.
"""

import runpy
import sys

from fastserve_common.lifecycle import die_with_supervisor

if __name__ == "__main__":
    die_with_supervisor()
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
