"""One machine of a cluster: its Ray node and the process that supervises it.

Decides: how a node is started, when its head is started again, and what is cleaned up after it.
In: the commands of `deploy/node.sh`. Out: a running Ray node, exit statuses.
Never: decides what is served; `serve-app deploy` does.
"""
