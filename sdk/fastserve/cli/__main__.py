import sys

from fastserve.cli.main import main

sys.exit(main())
