"""Classes of other packages, named ``MODULE:CLASS`` or by an entry point, and checked before they are used.

A class receives the values that its constructor's parameters name, from those that are offered for its kind. Every
fault is a `ConfigError` that names the flag, the class, and what is missing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from headrace.config import ConfigError
from headrace.config.errors import suggestion

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Port:
    """A kind of class that can be plugged in.

    ``flag`` is the option that names one, ``group`` its group of entry points, ``protocol`` the methods that it must
    have, and ``built_in`` the names that need no plug-in.
    """

    flag: str
    group: str
    protocol: type
    built_in: Collection[str]


def find_class(port: Port, name: str) -> type:
    """The class that ``name`` refers to; its methods are compatible with ``port.protocol``.

    Raises:
        ConfigError: there is no such class, or it is not compatible.
    """
    option = f"{port.flag} {name}"
    target = name
    if ":" not in name:
        known = {each.name: each.value for each in entry_points(group=port.group)}
        if name not in known:
            choices = [*port.built_in, *sorted(known)]
            raise ConfigError(
                f"{option}: expected one of {', '.join(choices)}, or MODULE:CLASS{suggestion(name, choices)}"
            )
        target = known[name]
    found = _import(option, *target.split(":", 1))
    if not isinstance(found, type):
        raise ConfigError(f"{option}: expected a class, but it is a {type(found).__name__}")
    for fault in _faults(found, port.protocol):
        raise ConfigError(f"{option}: {fault}")
    return found


def make_plugin(port: Port, name: str, **offered: Any) -> Any:
    """An instance of the class that ``name`` refers to, made with the ``offered`` values that its constructor names.

    Raises:
        ConfigError: as `find_class`, or the constructor failed.
    """
    kind, option = find_class(port, name), f"{port.flag} {name}"
    parameters = inspect.signature(kind).parameters.values()
    given = {each.name: offered[each.name] for each in parameters if each.name in offered}
    for each in parameters:
        required = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if required and (each.name not in given or each.kind not in _BY_NAME):
            available = ", ".join(offered) or "nothing"
            raise ConfigError(
                f"{option}: the constructor requires {each.name!r}, which is not offered (offered: {available})"
            )
    try:
        made = kind(**given)
    except Exception as error:
        raise ConfigError(f"{option}: the constructor failed: {type(error).__name__}: {error}") from error
    for attribute in inspect.get_annotations(port.protocol):
        if not hasattr(made, attribute):
            raise ConfigError(f"{option}: the attribute {attribute!r} is missing")
    return made


def by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which classes are replaced by their names.

    Raises:
        ConfigError: as `name_of`.
    """
    return {key: name_of(value) if isinstance(value, type) else value for key, value in given.items()}


def name_of(kind: type) -> str:
    """The name under which `find_class` finds a class again.

    Raises:
        ConfigError: the class is defined inside a function.
    """
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"{kind.__qualname__}: a class defined inside a function cannot be found by its name"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _import(option: str, module: str, path: str) -> Any:
    """The object at ``path`` of a module, which may be in the working directory."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that it hides no installed package
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{option}: there is no module {error.name!r} among the installed packages or in {here}"
            ) from None
        raise ConfigError(f"{option}: importing {module} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"{option}: importing {module} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            classes = [name for name, each in vars(found).items() if isinstance(each, type)]
            raise ConfigError(f"{option}: {module} has no class {path!r}{suggestion(part, classes)}")
        found = getattr(found, part)
    return found


def _faults(kind: type, protocol: type) -> Iterator[str]:
    """The faults of a class compared with the methods of a protocol."""
    for name, method in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        wanted = list(inspect.signature(method).parameters)
        shown = f"{name}({', '.join(wanted[1:])})"
        own = getattr(kind, name, None)
        if not callable(own):
            yield f"the method {shown} is missing"
            continue
        if isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod):
            wanted = wanted[1:]
        try:
            signature = inspect.signature(own)
            signature.bind(*wanted)
        except (TypeError, ValueError):
            yield f"the method must accept {shown}, but it is {name}{signature}"
            continue
        if inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(own):
            yield f"the method {shown} must be 'async def'"
