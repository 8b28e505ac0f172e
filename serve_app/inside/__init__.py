"""Calls from inside the cluster: by our own client (`serve_app.connect`) or by a plain Serve handle, without HTTP."""
