"""`python -m fastserve_scheduler.simulate`."""

import sys

from fastserve_scheduler.simulate.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
