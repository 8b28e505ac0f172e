"""GPU memory: one tree of leases, who owns them, and what is stored of that."""
