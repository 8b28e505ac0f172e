"""No engine replica of these tests ends the process of the tests."""

from tests.fakes.engine_exit import ended

__all__ = ["ended"]
