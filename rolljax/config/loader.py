"""gin files and settings -> one checked tree of frozen dataclasses, once, whatever the thread.

Reads in the order things happen: `source.Bindings` reads files and settings into bindings; `_Build` hands the
winning ones to gin, which evaluates references, macros and scopes and calls `_Build.make` for every object; `make`
fills defaults, checks each value against its annotation (`check.fit`) and constructs; what nothing read is an
error; `Loaded` is what leaves.

Two rules are added to gin's. A binding applies to every object of its class, also to a field's default in the tree. A
list is taken for a tuple, and an int for a float, if the annotation says so.

Deliberately absent: coercion of strings, configurable functions, gin constants, and any gin state after `load`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rolljax.config import check, objects
from rolljax.config.classes import default, fields, is_config
from rolljax.config.files import find_config
from rolljax.config.loaded import Loaded
from rolljax.config.parser import gin
from rolljax.config.source import Binding, Bindings
from rolljax.config.values import Macro, Ref, leaves, map_leaves
from rolljax.errors import ConfigError, RolljaxError, boundary

T = TypeVar("T")


def load(
    files: Sequence[str | Path], settings: Sequence[str] | Mapping[str, object] = (), *, root: type[T]
) -> Loaded[T]:
    """Build `root()` from gin files, later ones over earlier ones, and settings over all files. One load at a time is
    under way in a process: gin keeps its bindings in the module; other threads wait.

    Args:
      files: gin files: paths, or names of files that come with rolljax (`quickstart`, `algorithms/topr`). An `include`
        is looked up in the folder of the file that has it, then as one of these.
      settings: 'name = value', or name -> value. A name is a macro, a selector as in the files, or any unambiguous
        shorter form (`Class.field`). A written value is a gin value, or a bare word or path, which is taken as a
        string; a value of a mapping is taken as it is, a frozen dataclass or a function too.
      root: the frozen dataclass the tree starts at.

    Raises:
      ConfigError: for whatever is wrong with files or settings, with file:line, value and remedy.
    """
    source = Bindings(root)
    for i, path in enumerate(files):
        source.read_file(find_config(str(path)), (i,))
    if isinstance(settings, Mapping):
        for name, given in settings.items():
            source.take_setting(name, given)
    else:
        for setting in settings:
            source.read_setting(setting)
    source.check_macros()
    build = _Build(source, str(files[-1]) if files else "")
    with _one_load:
        value = build.run()
    build.check_all_read()
    text = build.operative() if build.is_text() else objects.gin_text(value)
    return Loaded(value, check.flatten(value), text, build.where)


# ---- building through gin -------------------------------------------------------------------------------------------

_BASE = "an object that stands as a default"
_building: contextvars.ContextVar[_Build] = contextvars.ContextVar("the load that is under way")
_one_load = threading.Lock()


@functools.cache
def _registered(cls: Any) -> str:
    """gin's selector for `cls`. What gin calls is `_Build.make`, so that values are checked before construction."""

    def make(**bound: Any) -> Any:
        return _building.get().make(cls, bound)

    with gin.config.interactive_mode():  # a reloaded module brings a new class of an old name
        gin.external_configurable(make, name=cls.__qualname__, module=f"rolljax.config.loader.{cls.__module__}")
    return f"rolljax.config.loader.{check.full_name(cls)}"


class _Uncopied:
    """A function or class as a value; gin deep-copies what it hands out, and some functions cannot be."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.obj


def _for_gin(leaf: Any) -> Any:
    if isinstance(leaf, Macro):
        return gin.config.ConfigurableReference(f"{leaf.name}/gin.macro", True)
    if isinstance(leaf, Ref) and leaf.call:
        return gin.config.ConfigurableReference("/".join(filter(None, [leaf.scope, _registered(leaf.obj)])), True)
    if isinstance(leaf, Ref):
        return _Uncopied(leaf.obj)
    return leaf if objects.is_literal(leaf) else _Uncopied(leaf)


class _Build:
    """One run of gin over the live bindings, and the record of what was read."""

    def __init__(self, source: Bindings, last_file: str) -> None:
        self.source, self.last_file = source, last_file
        self.read: set[Binding] = set()  # bindings that an object met, and
        self.used: set[Binding] = set()  # those it took,
        self.shadows: dict[Binding, list[Binding]] = {}  # and the narrower ones it took instead
        self.scopes: dict[type, set[str]] = {}  # class -> scopes it was built in
        self.error: RolljaxError | None = None  # what `make` raised first

    def run(self) -> Any:
        """Build the root. gin is empty before and after."""
        live = self.source.live.values()
        refs = [ref.obj for b in live for ref in leaves(b.value, Ref) if ref.call]
        self.configurable = {self.source.root, *refs, *(b.cls for b in live if b.cls)}
        gin.clear_config()
        token = _building.set(self)
        try:
            for cls in self.configurable:
                _registered(cls)
            for b in live:
                key = (b.scope, _registered(b.cls), b.field) if b.cls else (b.field, "gin.macro", "value")
                gin.bind_parameter(key, map_leaves(b.value, _for_gin))
            gin.finalize()
            return gin.get_configurable(_registered(self.source.root))()
        except RecursionError:
            circle = "macros or @references refer to one another in a circle"
            raise ConfigError(circle, where=self.last_file, remedy="break the circle") from None
        except RolljaxError:  # gin raises a copy of what `make` raised, with lines of its own behind the message
            if self.error is None:
                raise
            raise self.error from self.error.__cause__
        finally:
            _building.reset(token)
            gin.clear_config()

    def make(self, cls: type, bound: dict[str, Any]) -> Any:
        """Called by gin with the bound values of one object, in the scope it is built in."""
        base = bound.pop(_BASE, None)
        scopes = gin.current_scope()
        self.scopes.setdefault(cls, set()).add("/".join(scopes))
        for name in bound:
            self._mark(cls, name, scopes)
        try:
            return self._construct(cls, {name: self._value(cls, name, bound, base) for name in fields(cls)})
        except ConfigError as e:
            origin = self.where(e.setting, scopes) or self.where(f"{cls.__name__}.{e.setting}", scopes)
            self.error = self.error or e.located_at(origin or self._asked_for(cls, "/".join(scopes)))
            raise
        except RolljaxError as e:  # what the class says of its data
            self.error = self.error or e
            raise

    def _value(self, cls: type, name: str, bound: dict[str, Any], base: Any) -> Any:
        """The value of one field: bound, or of the object that stands as a default, or the field's default."""
        field, setting = fields(cls)[name], f"{cls.__name__}.{name}"
        if name in bound:
            value = bound[name]
        else:
            value = default(field) if base is None else getattr(base, name)
            if value is dataclasses.MISSING:
                scope = "/".join(gin.current_scope())
                raise ConfigError(
                    "has no default and is not set",
                    setting=setting,
                    where=self._asked_for(cls, scope),
                    remedy=f"set it: {scope}{'/' * bool(scope)}{setting} = ...",
                )
            value = map_leaves(value, self._stand_in)
        try:
            return check.fit(value, check.hints(cls)[name])
        except check.Mismatch as e:
            standard = default(field) if name in bound else dataclasses.MISSING
            remedy = e.remedy or ("" if standard is dataclasses.MISSING else f"the default is {standard!r}")
            raise ConfigError(str(e), setting=setting, value=value, remedy=remedy) from None

    def _stand_in(self, leaf: Any) -> Any:
        """An object that stands as a default, built again with the bindings of its class over its own values."""
        cls: Any = type(leaf)
        if not is_config(cls):
            return leaf
        if cls in self.configurable:
            return gin.get_configurable(_registered(cls))(**{_BASE: leaf})
        return self.make(cls, {_BASE: leaf})

    def _construct(self, cls: type, values: dict[str, Any]) -> Any:
        """An object of a class. What its `__post_init__` raises is about its settings."""
        try:
            with boundary(ConfigError, "cannot be built"):
                return cls(**values)
        except ConfigError as e:
            if e.__cause__ is None or e.setting:  # raised by the class itself
                raise
            where = self._asked_for(cls, "/".join(gin.current_scope()))
            raise ConfigError(e.message, setting=cls.__name__, where=where) from e.__cause__

    # -- where things come from

    def _matches(self, cls: type, name: str, scopes: Sequence[str]) -> list[Binding]:
        """Bindings that apply in a scope, the widest first."""
        partial = ["/".join(scopes[:i]) for i in range(len(scopes) + 1)]
        return [self.source.live[cls, scope, name] for scope in partial if (cls, scope, name) in self.source.live]

    def _mark(self, cls: type, name: str, scopes: Sequence[str]) -> None:
        *wider, taken = self._matches(cls, name, scopes)
        self.read |= {*wider, taken}
        self.used.add(taken)
        for b in wider:
            self.shadows.setdefault(b, []).append(taken)

    def where(self, setting: str, scopes: Sequence[str] = ()) -> str:
        """Origin of "Class.field" or "Class": the binding that applies in `scopes`, else those in use, else default."""
        scope, _, path = setting.rpartition("/")
        path, _, field = path.rpartition(".")
        classes = [cls for cls in self.source.known() if f".{check.full_name(cls)}".endswith(f".{path or field}")]
        if classes and not path:
            return self._asked_for(classes[0], scope)
        classes = [cls for cls in classes if field in fields(cls)]
        scopes = scopes or [part for part in scope.split("/") if part]
        here = [b for cls in classes for b in self._matches(cls, field, scopes)[-1:] if scopes]
        bound = [b for b in self.source.live.values() if b.cls in classes and b.field == field]
        if found := here or [b for b in bound if b in self.used] or bound:
            return ", ".join(b.where for b in found)
        return f"default of {check.full_name(classes[0])}.{field}" if classes else ""

    def _asked_for(self, cls: type, scope: str) -> str:
        """Where an object of `cls` comes from: the reference that builds it, else its first binding."""
        refs = [
            (ref.scope != scope, b)
            for b in self.source.live.values()
            for ref in leaves(b.value, Ref)
            if ref.call and ref.obj is cls
        ]
        if refs:
            return min(refs, key=lambda pair: (pair[0], pair[1].order))[1].where
        if bound := [b for b in self.source.live.values() if b.cls is cls]:
            return bound[0].where
        return self.last_file if cls is self.source.root else f"default of {check.full_name(cls)}"

    # -- what was read

    def check_all_read(self) -> None:
        """Every live binding reached an object. One whose object a later file or setting took away is let pass."""
        for b in self.source.live.values():
            if b.cls and b not in (self.read if b.layer else self.used) and not self._taken_away(b):
                raise self._unread(b)
        mentioned, reached = self._macros(self.source.bindings), self._macros(self.used)
        for b in self.source.live.values():
            if not b.cls and b.field not in (mentioned if b.layer else reached):
                raise ConfigError(
                    f"sets nothing: no setting that is used reads %{b.field}",
                    setting=b.field,
                    value=b.value,
                    remedy="remove it, or read it: Class.field = %" + b.field,
                    where=b.where,
                )

    def _unread(self, b: Binding) -> ConfigError:
        scopes, cls = self.scopes.get(b.cls, set()), b.cls.__name__
        if b in self.shadows:
            taken = list(dict.fromkeys(self.shadows[b]))
            message = f"sets nothing: each {cls} takes its own: {', '.join(f'{s.name} ({s.where})' for s in taken)}"
            remedy = f"set {' and '.join(s.name for s in taken)}"
        elif scopes:
            message = f"sets nothing: no {cls} is built in scope '{b.scope}'"
            remedy = check.nearest(b.scope, [s or "(none)" for s in scopes], "scopes")
        else:
            message = f"sets nothing: no {cls} is built in this config"
            remedy = f"refer to it, as in Class.field = @{'.'.join(self._home(b.cls))}(), or remove it"
        return ConfigError(message, setting=b.name, value=b.value, remedy=remedy, where=b.where)

    def _taken_away(self, b: Binding) -> bool:
        """Whether a later file or setting overrode the value whose object `b` was written for."""
        later = [old for old, new in self.source.overridden if b.layer and b.order < new.order and b.layer != new.layer]
        return b.cls in self._classes_below(later)

    def _classes_below(self, value: Any) -> set[type]:
        """Classes of the objects that a value stands for, at any depth."""
        found: set[type] = set()
        todo = [value]
        while todo:
            for leaf in leaves(todo.pop(), object):
                if isinstance(leaf, Macro):
                    todo += [b.value for b in self.source.bindings if not b.cls and b.field == leaf.name]
                    continue
                cls = leaf.obj if isinstance(leaf, Ref) else type(leaf)
                if is_config(cls) and cls not in found:
                    found.add(cls)
                    todo += [b.value for b in self.source.bindings if b.cls is cls]
                    todo += [default(field) for field in fields(cls).values()]
        return found

    def _macros(self, bindings: Iterable[Binding]) -> set[str]:
        """Macros that bindings read, also through other macros."""
        found: set[str] = set()
        todo = [b.value for b in bindings]
        while todo:
            names = {macro.name for macro in leaves(todo.pop(), Macro)} - found
            found |= names
            todo += [self.source.live[None, "", name].value for name in names if (None, "", name) in self.source.live]
        return found

    # -- the operative file

    def is_text(self) -> bool:
        """Whether all values that were read can be written as they were given: none is an object of Python."""
        kept = (Ref, Macro)
        given = [leaf for b in self.read for leaf in leaves(b.value, object) if not isinstance(leaf, kept)]
        return all(map(objects.is_literal, given))

    def operative(self) -> str:
        """The bindings that were read and the imports they need, as one gin file."""
        bindings = sorted(self.read, key=lambda b: (*self._home(b.cls), b.scope, b.order))
        macros = [self.source.live[None, "", name] for name in sorted(self._macros(bindings))]
        refs = [ref.obj for b in (*macros, *bindings) for ref in leaves(b.value, Ref)]
        symbols = objects.symbols(self._home(obj)[0] for obj in (*refs, *(b.cls for b in bindings)))

        def selector(obj: Any) -> str:
            module, path = self._home(obj)
            return f"{symbols[module]}.{path}"

        def shown(value: Any) -> str:
            return repr(map_leaves(value, lambda leaf: _Shown(leaf, selector)))

        lines = [*objects.import_lines(symbols), ""]
        lines += [f"{b.field} = {shown(b.value)}" for b in macros] + [""] * bool(macros)
        for b in bindings:
            scope = f"{b.scope}/" if b.scope else ""
            lines.append(f"{scope}{selector(b.cls)}.{b.field} = {shown(b.value)}")
        return "\n".join(lines).rstrip() + "\n"

    def _home(self, obj: Any) -> tuple[str, str]:
        return self.source.homes.get(obj, (obj.__module__, obj.__qualname__))


class _Shown:
    """A leaf whose repr is gin text."""

    def __init__(self, leaf: Any, selector: Any) -> None:
        self.leaf, self.selector = leaf, selector

    def __repr__(self) -> str:
        if isinstance(self.leaf, Ref):
            return repr(dataclasses.replace(self.leaf, selector=self.selector(self.leaf.obj)))
        return objects.literal(self.leaf)
