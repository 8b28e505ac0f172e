"""`python -m serve_app.machine`: what `deploy/node.sh` runs."""

import sys

from serve_app.machine.commands import main

sys.exit(main(sys.argv[1:]))
