"""gin files and `--set` settings as bindings: every name resolved, every file:line kept.

Names mean what they mean under gin's dynamic registration: a file sees the modules it imports itself. A setting sees
the imports of all files, and may also name a class by the end of its path (`Grpo.clip_high`) or by a full path that no
file imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from rolljax.config import check
from rolljax.config.classes import (
    check_class,
    closure,
    default,
    default_classes,
    fields,
    import_module,
    is_config,
    mentioned_classes,
    modules_near,
    names_beside,
    objects_below,
    shipped_beside,
)
from rolljax.config.files import include_path, read
from rolljax.config.foreign import foreign
from rolljax.config.parser import Macro, Ref, leaves, map_leaves, setting_value, statements
from rolljax.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One `name = value` as read. `cls` is None for a macro; `field` is then the macro's name.

    `layer` is the index of the file among the files, extended by its includes; `()` for a setting. `order` counts
    bindings.
    """

    scope: str
    cls: Any
    field: str
    value: Any
    where: str
    layer: tuple[int, ...]
    order: int

    @property
    def name(self) -> str:
        return f"{self.scope}{'/' * bool(self.scope)}{self.cls.__name__}.{self.field}" if self.cls else self.field


@dataclasses.dataclass(frozen=True)
class _Context:
    """The position of a statement, and the imports that resolve its names."""

    where: str
    layer: tuple[int, ...]
    """Index of the file among the files, extended by its includes; `()` for a setting."""
    resolve: Callable[[str], Any]


class Bindings:
    """All bindings of files and settings.

    Attributes:
      bindings: all, in the order read.
      live: (class, scope, field) -> the binding that won; (None, "", name) for a macro.
      overridden: each binding with the value it replaced (an earlier binding's, or the field's default).
      homes: class or function -> (module, path in it), as the files name it.
    """

    def __init__(self, root: type, given: object = None) -> None:
        """Read nothing yet. `given` is an object of class `root` that the settings are for, if there is one."""
        self.root = root
        self.given = given
        self.bindings: list[Binding] = []
        self.live: dict[tuple[Any, str, str], Binding] = {}
        self.overridden: list[tuple[Any, Binding]] = []
        self.homes: dict[Any, tuple[str, str]] = {}
        self._symbols: dict[str, ModuleType] = {}  # of all files, for settings
        check_class(root, check.full_name(root), "load(root=)")

    def read_file(self, path: str, layer: tuple[int, ...], included_at: str = "", inside: tuple[str, ...] = ()) -> None:
        """Read one file and its includes; every name is resolved at its own line."""
        if path in inside:
            raise ConfigError("includes itself", setting=path, where=included_at, remedy="remove one of the includes")
        symbols: dict[str, ModuleType] = {}
        includes = 0
        for statement in statements(read(path, included_at), path):
            where = f"{path}:{statement.location.line_num}"
            kind = type(statement).__name__
            if kind == "ImportStatement":
                self._import_symbol(statement, symbols, where)
            elif kind == "IncludeStatement":
                includes += 1
                target = include_path(path, statement.filename)
                self.read_file(target, (*layer, includes), where, (*inside, path))
            elif kind == "BindingStatement":
                context = _Context(where, layer, functools.partial(self._resolve, symbols=symbols, where=where))
                self._bind(context, statement.scope, statement.selector, statement.arg_name, statement.value)

    def take_settings(self, settings: Sequence[str] | Mapping[str, object]) -> None:
        """Take settings: texts as of `--set`, or a mapping whose values are Python's."""
        if not isinstance(settings, Mapping):
            for text in settings:
                self._read_setting(text)
            return
        for name, value in settings.items():
            self._set(name.strip(), value, f"set={{{name!r}: ...}}")

    def _read_setting(self, text: str) -> None:
        """Read one `--set 'name = value'`."""
        where = f"--set '{text}'"
        name, _, written = (part.strip() for part in text.partition("="))
        if not (name and written):
            raise ConfigError(
                "is not of the form 'name = value'", setting=f"--set '{text}'", remedy="--set 'Class.field = value'"
            )
        self._set(name, setting_value(written, where), where)

    def _set(self, name: str, value: Any, where: str) -> None:
        context = _Context(where, (), functools.partial(self._find, where=where))
        scope, _, selector = name.rpartition("/")
        selector, _, field = selector.rpartition(".")
        if (None, "", name) in self.live:
            scope, selector, field = "", name, ""
        elif error := self._foreign(name, selector, field, where):
            raise error
        elif not selector:
            macros = [b.field for b in self.live.values() if not b.cls]
            holders = [f"{c.__name__}.{name}" for c in self.nameable() if name in fields(c)]
            raise ConfigError(
                "is neither a macro of these files nor Class.field",
                setting=name,
                where=where,
                remedy=check.nearest(holders[0] if holders else name, [*macros, *holders], "names")
                or "write Class.field",
            )
        self._bind(context, scope, selector, field, value)

    def _foreign(self, name: str, selector: str, field: str, where: str) -> ConfigError | None:
        """Return the error for a setting with another framework's name that is no field of this config."""
        error = foreign(name, {f for cls in self.nameable() for f in fields(cls)}, where)
        with contextlib.suppress(ConfigError):
            if error and selector and field in fields(self._find(selector, where)):
                return None
        return error

    def check_macros(self) -> None:
        """Check that every %name is defined, and that every %gin.REQUIRED was set."""
        macros = [b.field for b in self.live.values() if not b.cls]
        for b in self.bindings:
            for macro in leaves(b.value, Macro):
                if macro.name != "gin.REQUIRED" and macro.name not in macros:
                    raise ConfigError(
                        f"reads %{macro.name}, which is not defined",
                        setting=b.name,
                        where=b.where,
                        remedy=check.nearest(macro.name, macros, "macros") or "define it",
                    )
                if macro.name == "gin.REQUIRED" and b in self.live.values():
                    raise ConfigError(
                        "is required and not set", setting=b.name, where=b.where, remedy=f"--set '{b.name} = value'"
                    )

    def known(self) -> dict[type, bool]:
        """Return the classes that a setting may name by the end of their path; True for classes in files and
        defaults."""
        used = [b.cls for b in self.bindings if b.cls]
        used += [ref.obj for b in self.bindings for ref in leaves(b.value, Ref) if is_config(ref.obj)]
        in_tree = closure([self.root, *used, *map(type, objects_below(self.given))], default_classes)
        imported = [c for module in self._symbols.values() for c in vars(module).values() if is_config(c)]
        return {cls: cls in in_tree for cls in closure([*in_tree, *imported], mentioned_classes)}

    def nameable(self) -> list[type]:
        """Return the known classes in the tree of settings, and the classes that a setting takes."""
        known = self.known()
        found, more = set[type](), {cls for cls, used in known.items() if used}
        while more:
            found |= more
            wanted = tuple({c for cls in more for tp in check.hints(cls).values() for c in check.classes_in(tp)})
            more = {cls for cls in known if issubclass(cls, wanted) and not inspect.isabstract(cls)} - found
        return sorted(found, key=lambda cls: cls.__name__)

    # -- names

    def _import_symbol(self, statement: Any, symbols: dict[str, ModuleType], where: str) -> None:
        if statement.module.startswith("__gin__."):
            if statement.module != "__gin__.dynamic_registration":
                raise ConfigError("is not a feature of gin", setting=statement.module, where=where)
            return
        module = import_module(statement.module, where)
        if not (statement.is_from or statement.alias):
            module = importlib.import_module(statement.module.partition(".")[0])
        symbols[statement.bound_name()] = self._symbols[statement.bound_name()] = module

    def _resolve(self, selector: str, symbols: Mapping[str, ModuleType], where: str) -> Any:
        """Return the object that `module.Class` names in a file with these imports."""
        first, *rest = selector.split(".")
        if first not in symbols:
            homes = {name: vars(module) for name, module in symbols.items()}
            full = [f"write {name}.{first}" for name, inside in homes.items() if first in inside and not rest]
            remedy = full[0] if full else check.nearest(first, symbols, "imported")
            remedy += f"{'; ' * bool(remedy)}or add `from package import {first}`" * (not full)
            raise ConfigError(
                f"names nothing: '{first}' is not imported in this file", setting=selector, where=where, remedy=remedy
            )
        return self._attribute(symbols[first], rest, selector, where)

    def _attribute(self, module: ModuleType, path: list[str], selector: str, where: str) -> Any:
        """Return the class or function at `path` in `module`; remember its module for the operative file."""
        obj, inner = module, path
        for i, part in enumerate(path):
            if not hasattr(obj, part):
                holder = getattr(obj, "__name__", repr(obj))
                names = [n for n, v in getattr(obj, "__dict__", {}).items() if getattr(v, "__module__", "") == holder]
                remedy = check.nearest(part, names, f"in {holder}")
                if holder == "__main__":
                    remedy = (
                        f"put it into a module, mine.py, and write mine.{part}; __main__ is the script that runs now"
                    )
                raise ConfigError(
                    f"names nothing: there is no '{part}' in {holder}", setting=selector, where=where, remedy=remedy
                )
            obj = getattr(obj, part)
            if isinstance(obj, ModuleType):
                module, inner = obj, path[i + 1 :]
        if not callable(obj):
            raise ConfigError(
                "is not a class or function",
                setting=selector,
                where=where,
                remedy="name a class of the module: module.Class",
            )
        self.homes.setdefault(obj, (module.__name__, ".".join(inner)))
        return obj

    def _find(self, selector: str, where: str) -> Any:
        """Return the object that a selector names, as in a file: by the end of the path of a known class, or of an
        object in the same modules of rolljax, or by a full path."""
        first, *rest = selector.split(".")
        known = self.known()
        found = {cls: None for cls in known if f".{check.full_name(cls)}".endswith(f".{selector}")}
        if first in self._symbols and rest:
            with contextlib.suppress(ConfigError):
                found[self._attribute(self._symbols[first], rest, selector, where)] = None
        if len(found) > 1:  # prefer classes in use over classes that are only imported
            found = {cls: None for cls in found if known.get(cls)} or found
        if not found and not (first in self._symbols and rest):
            found = dict.fromkeys(shipped_beside(known, selector))
        if len(found) > 1:
            full = ", ".join(sorted(map(check.full_name, found)))
            raise ConfigError("is ambiguous", setting=selector, remedy=f"write one of: {full}", where=where)
        if found:
            return next(iter(found))
        if rest and self._symbols.get(first, ModuleType(first)).__name__ != first:
            return self._resolve(selector, self._symbols, where)  # raises, naming what the module has
        if rest and (first in sys.modules or importlib.util.find_spec(first)):
            return self._import_path(selector, where)
        name, names = selector.rpartition(".")[2], [cls.__name__ for cls in self.nameable()]
        if not rest and (meant := check.near(name, {*names, *names_beside(known)})):
            names.append(meant)
        remedy = f"{check.nearest(name, names, 'classes')}; others by their path: module.Class"
        raise ConfigError(
            "is not a class of this config" + (f", and there is no module '{first}'" if rest else ""),
            setting=selector,
            where=where,
            remedy=remedy if check.near(name, names) or not rest else modules_near(first),
        )

    def _import_path(self, selector: str, where: str) -> Any:
        """Import `package.module.Class`, importing the longest part that is a module."""
        first, *path = selector.split(".")
        module = import_module(first, where)
        while len(path) > 1 and hasattr(module, "__path__"):
            if not importlib.util.find_spec(f"{module.__name__}.{path[0]}"):
                break
            module, path = import_module(f"{module.__name__}.{path[0]}", where), path[1:]
        if len(path) > 1 and not hasattr(module, path[0]):
            missing = f"{module.__name__}.{path[0]}"
            raise ConfigError(
                f"names nothing: there is no module '{missing}'",
                setting=selector,
                where=where,
                remedy=modules_near(missing),
            )
        return self._attribute(module, path, selector, where)

    # -- bindings

    def _bind(self, context: _Context, scope: str, selector: str, field: str, value: Any) -> None:
        """Add one binding; without a field it is a macro of the name `selector`."""
        cls = context.resolve(selector) if field else None
        if cls is None:
            scope, field = "", f"{scope}/{selector}" if scope else selector
        else:
            check_class(cls, selector, context.where)
            if field not in fields(cls):
                raise ConfigError(
                    f"is not a field of {cls.__name__}",
                    setting=f"{selector}.{field}",
                    value=value,
                    remedy=check.nearest(field, fields(cls), "fields"),
                    where=context.where,
                )
        value = map_leaves(value, functools.partial(self._resolved, context=context))
        binding = Binding(scope, cls, field, value, context.where, context.layer, len(self.bindings))
        old = self.live.get((cls, scope, field))
        if old and context.layer and context.layer[: len(old.layer)] == old.layer:
            raise ConfigError(
                f"is already set at {old.where}",
                setting=binding.name,
                value=value,
                where=context.where,
                remedy="keep one of the two lines" if old.layer == context.layer else "put the include above that line",
            )
        replaced = old.value if old else default(fields(cls)[field]) if cls else None
        self.overridden.append((replaced, binding))
        self.bindings.append(binding)
        self.live[cls, scope, field] = binding

    def _resolved(self, leaf: Any, context: _Context) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        ref = dataclasses.replace(leaf, obj=context.resolve(leaf.selector))
        if ref.call:
            check_class(ref.obj, ref.selector, context.where)
        elif ref.scope:
            raise ConfigError(
                "has a scope but is not called", setting=repr(ref), remedy=f"write {ref!r}()", where=context.where
            )
        return ref
