"""Is what an engine is granted what it needs? Shallow models of real shapes, started and loaded on the CPU.

Decides: nothing; it measures `serve_app.engine.start.memory_size` against real engines.
In: shapes. Out: a table, and as its last line one JSON object.
Never: starts two engines at once.
"""
