"""The machines of the application: `local` is one instance on this machine, `node` one machine of a cluster."""
