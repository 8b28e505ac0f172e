"""`python -m serve_app.cluster.node`: what `deploy/node.sh` runs."""

import sys

from serve_app.cluster.node.commands import main

sys.exit(main(sys.argv[1:]))
