"""Where the application runs: `local` is one instance on this machine, `node` one machine of a cluster."""
