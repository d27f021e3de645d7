"""Locks that a forked child finds free, whatever the threads of its parent were at.

A fork copies one thread, and every lock as it is: no thread of the child would ever let go of a lock that
another thread of the parent held.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Generic, Self, TypeVar, overload

Made = TypeVar("Made")


def in_child(renew: Callable[[], object]) -> None:
    """Calls `renew` in each forked child before anything else runs there; does nothing without forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


# Held while a module is imported when it is first needed: Python's own lock of it would stay held in a child.
loading = threading.RLock()
_across: list[AbstractContextManager[Any]] = [loading]  # outermost first: one may be taken inside the former
_taken: list[AbstractContextManager[Any]] = []


def held_across_forks(lock: AbstractContextManager[Any]) -> None:
    """Makes each fork wait for a lock of foreign code: the child finds the state behind it whole."""
    _across.append(lock)


def _take_all() -> None:
    for lock in _across:  # and whatever is added meanwhile
        lock.__enter__()
        _taken.append(lock)


def _leave_all() -> None:
    while _taken:
        _taken.pop().__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_leave_all, after_in_child=_leave_all)


class Late:
    """A module by its name: it is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        with loading:
            return getattr(import_module(self._name), name)


class Lock:
    """A reentrant lock for `with`; a forked child has a new one in its place."""

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Forgets who holds it."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


in_child(_renew_all)


class cached_property(Generic[Made]):  # noqa: N801 - named as the one of functools
    """An attribute that is made when it is first read.

    Until Python 3.12 the one of functools holds a lock while it makes a value, one for all objects of the
    class. This one has none: two threads that read at once both make the value, and one of the two stays.
    """

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type) -> Made: ...

    def __get__(self, owner: object | None, kind: type) -> Made | Self:
        if owner is None:
            return self
        made: Made = vars(owner).setdefault(self._name, self._make(owner))
        return made
