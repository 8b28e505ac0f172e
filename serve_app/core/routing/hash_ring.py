"""A consistent-hash ring: the preference order of replicas for a key, equal in all routers that know the same names.

Invariant: a key's preference order among the remaining replicas does not change when others are added or removed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator

POINTS_PER_REPLICA = 128  # the replicas' shares of the keys then differ by 9% (1 / sqrt(128))
_POINT_BYTES = 8
_DIGEST_BYTES = 64  # the longest digest of blake2b: eight points per call
_POINTS_PER_DIGEST = _DIGEST_BYTES // _POINT_BYTES


class HashRing:
    """Names and their points. `add` and `remove` pass over all points once; finding a key's point is O(log points)."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Add a name; a present name changes nothing."""
        if name not in self._names:
            self._names.add(name)
            self._points += [(point, name) for point in _points_of(name)]
            self._points.sort()  # two sorted runs: one pass

    def remove(self, name: str) -> None:
        """Remove a name; an absent name changes nothing."""
        if name in self._names:
            self._names.remove(name)
            self._points = [entry for entry in self._points if entry[1] != name]

    def walk(self, key: str) -> Iterator[str]:
        """The names at all points, once around from the key's point: the key's home first, with repeated names."""
        points = self._points
        start = bisect_left(points, (_hash(key), ""))
        for index in range(start, start + len(points)):
            yield points[index % len(points)][1]


def _hash(key: str) -> int:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_POINT_BYTES, person=b"key")
    return int.from_bytes(digest.digest())


def _points_of(name: str) -> list[int]:
    found = []
    for number in range(POINTS_PER_REPLICA // _POINTS_PER_DIGEST):
        data = f"{number}\0{name}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"point").digest()
        cuts = range(0, _DIGEST_BYTES, _POINT_BYTES)
        found += [int.from_bytes(digest[cut : cut + _POINT_BYTES]) for cut in cuts]
    return sorted(found)
