"""How a message is pickled, so that processes of two releases read each other's.

Decides: `message`, on every value that is sent to another process by pickle. A reader takes the fields that it knows,
has the default of one that is missing, and ignores further ones. So a field is added at the end, with a default, and
none is ever removed, renamed or moved. A new class or a new member of an enum is sent only to who has asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

READER = "of_any_release"  # of a class of named tuples: makes one of the values that another release has sent


def message(cls: type[T]) -> type[T]:
    """Class decorator, of a NamedTuple or a frozen dataclass with slots."""
    made: Any = cls
    if is_dataclass(cls):
        read, write = _dataclass_state(cls)
        made.__setstate__ = read
        made.__getstate__ = write
    elif issubclass(cls, tuple):
        reader = _TupleReader(cls)
        setattr(cls, READER, staticmethod(reader.__call__))
        made.__reduce_ex__ = lambda self, _protocol: (reader, (cls, tuple(self)))
    else:
        raise TypeError(f"{cls.__name__} is no NamedTuple and no dataclass")
    return cls


class _TupleReader:
    """Makes named tuples of one class. In a pickle it is the class's `READER`.

    An earlier release has none there, and makes the tuple with all fields that were sent: those that it knows
    are where they were.
    """

    __slots__ = ("_cls", "_count")

    def __init__(self, cls: Any) -> None:
        self._cls = cls
        self._count = len(cls._fields)

    def __call__(self, _cls: type, values: tuple[Any, ...]) -> Any:
        if len(values) == self._count:
            return tuple.__new__(self._cls, values)
        return self._cls(*values[: self._count])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._cls, READER, tuple.__new__)


def _dataclass_state(cls: type) -> tuple[Callable[[Any, Sequence[Any]], None], Callable[[Any], list[Any]]]:
    """How a dataclass takes and gives its state: the values of its fields, in order."""
    if not cls.__dataclass_params__.frozen or "__slots__" not in vars(cls):  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__} is not frozen, or has no slots")
    known = fields(cls)
    names = [field.name for field in known]

    def read(value: Any, state: Sequence[Any]) -> None:
        for name, field_value in zip(names, state, strict=False):
            object.__setattr__(value, name, field_value)
        for field in known[len(state) :]:
            object.__setattr__(value, field.name, _default(cls, field))

    def write(value: Any) -> list[Any]:
        return [getattr(value, name) for name in names]

    return read, write


def _default(cls: type, field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"{cls.__name__} was sent without {field.name}, which has no default")
