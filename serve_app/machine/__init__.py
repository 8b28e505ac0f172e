"""One machine of a cluster: its environment, its Ray, and what keeps both. `deploy/node.sh` is the way in."""
