"""One line for all routers: what a router and the quota actor say to each other, and both ends of it."""
