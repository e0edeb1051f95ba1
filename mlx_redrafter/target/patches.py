"""Replaces functions of MLX and mlx-lm, and modules of a model, while one thread builds a forward.

This is the only module that does so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import mlx.nn as nn

P = ParamSpec("P")
T = TypeVar("T")

MODEL_LOCK = threading.RLock()
"""Held while a forward is built, and by what looks at a model's modules: a forward replaces some of
them meanwhile.
"""


def with_model_lock(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called with `MODEL_LOCK` held."""

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with MODEL_LOCK:
            return function(*args, **kwargs)

    return locked


class Slot(NamedTuple):
    """The place of a function or module.

    Attributes:
        container: the names of a Python module (`vars(mx)`), a module of a model, or a list.
        name: its key or index there. Items are replaced, as setting attributes of a model's module
            would reorder its parameters.
    """

    container: Any
    name: Any

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.container[self.name]


Replacement = tuple[Slot, Callable[..., Any]]
"""(the place of a function or module, what is called instead: with the original first, then the
arguments of the call).
"""


@contextmanager
def replace_functions(replacements: Sequence[Replacement]) -> Iterator[None]:
    """In this context calls from this thread go to the replacements; those of other threads do not.

    Contexts nest: the original in an inner one is the replacement of the outer one. Everything is
    restored at the end, also after an exception.
    """
    thread = threading.get_ident()
    originals = []

    def redirect(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                return call(original, *args, **kwargs)
            return original(*args, **kwargs)

        return Wrapper(original, dispatch) if isinstance(original, nn.Module) else dispatch

    with MODEL_LOCK:
        try:
            for slot, call in replacements:
                originals.append((slot, slot.value))
                slot.container[slot.name] = redirect(slot.value, call)
            yield
        finally:
            for slot, original in reversed(originals):
                slot.container[slot.name] = original


class Wrapper(nn.Module):
    """A module that looks like another one, and calls a function instead."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Its module's class, as some models check the class of a layer."""
        return type(self["module"]) if "module" in self else Wrapper

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        return getattr(self["module"], name) if "module" in self else super().__getattr__(name)
