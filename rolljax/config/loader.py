"""gin files, settings and objects -> one checked tree of frozen dataclasses.

Reads in the order things happen: `source.Bindings` reads files and settings into bindings; `_Build` makes the objects,
from the root down: it takes the winning binding of each field, follows its references and macros, fills defaults,
checks each value against its annotation (`check.fit`) and constructs. A binding that nothing read is an error. The
result is a `Loaded`.

Scopes are gin's: `@scope/Class()` builds in that scope, a reference without a scope in the scope that contains it, a
macro's value in the scope of its name. A binding applies in its scope and all inner scopes. Every reference builds a
new object. Two rules are added: a binding applies to every object of its class, also to a field's default in the tree;
a list is taken for a tuple, and an int for a float, if the annotation requires it.

Deliberately absent: coercion of strings, configurable functions, gin constants, and any state outside of one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from rolljax.config import check, objects
from rolljax.config.classes import default, fields, is_config
from rolljax.config.files import find_config
from rolljax.config.parser import Macro, Ref, leaves, map_leaves
from rolljax.config.resolved import flatten
from rolljax.config.source import Binding, Bindings
from rolljax.errors import ConfigError, boundary

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """A config, built and checked.

    Attributes: value: the root object.
    """

    value: T
    resolved: dict[str, object]
    """Dotted path -> JSON-able value for every field of the tree, defaults included; `<path>.__class__` names each
    dataclass, `phases[0].steps` is a field of an item."""
    operative: str
    """One gin file with the imports and bindings that were read; loading it gives an equal `value`. Where objects were
    given (`config.objects`), the file is written from these."""
    where: Callable[[str], str] = dataclasses.field(repr=False, compare=False)
    """Origin of a setting ("Class.field"): file:line, --set text, or default."""

    def locate(self, error: ConfigError) -> ConfigError:
        """Return the error with `where` filled from its `setting` ("Class.field"): file:line, --set text, or
        default."""
        return error.located_at(self.where(error.setting))


def load(
    files: Sequence[str | Path], settings: Sequence[str] | Mapping[str, object] = (), *, root: type[T]
) -> Loaded[T]:
    """Build `root()` from gin files, later ones over earlier ones, and settings over all files.

    Args:
      files: gin files: paths, or names of files that come with rolljax (`quickstart`, `algorithms/topr`). An `include`
        is looked up in the folder of the file that has it, then as one of these.
      settings: 'name = value', or name -> value. A name is a macro, a selector as in the files, or any unambiguous
        shorter form (`Class.field`). A written value is a gin value, or a bare word or path, which is taken as a
        string; a value of a mapping is taken as it is, a frozen dataclass or a function too.
      root: the frozen dataclass the tree starts at.

    Raises:
      ConfigError: anything is wrong with files or settings; the error has file:line, value and remedy.
    """
    source = Bindings(root)
    for i, path in enumerate(files):
        source.read_file(find_config(str(path)), (i,))
    source.take_settings(settings)
    return _Build(source, str(files[-1]) if files else "").loaded()


def given(root: T, settings: Mapping[str, object] | None = None) -> Loaded[T]:
    """Return a tree of frozen dataclasses, built in Python, as a config, with settings over its fields.

    Values that do not fit their annotations are refused. Lists become tuples and ints floats if the annotation requires
    it, as in a gin file. An object without changes stays the same object.

    Args:
      settings: `Class.field` -> value: for every object of that class in the tree, as in a gin file without scopes.

    Raises:
      ConfigError: a value does not fit, or no object of the tree has a setting.
    """
    source = Bindings(type(root), root)
    source.take_settings(settings or {})
    return _Build(source, "").loaded()


class _Build:
    """Builds one tree of objects from bindings, and records which bindings were read."""

    def __init__(self, source: Bindings, last_file: str) -> None:
        self.source, self.last_file = source, last_file
        self.read: set[Binding] = set()  # bindings that an object met, and
        self.used: set[Binding] = set()  # those it took,
        self.shadows: dict[Binding, list[Binding]] = {}  # and the narrower ones it took instead
        self.scopes: dict[type, set[str]] = {}  # class -> scopes it was built in
        self.followed: list[tuple[Binding, str | None]] = []  # bindings whose values are being built, outermost first

    def loaded(self) -> Loaded[Any]:
        """Build the root and check that every binding was read."""
        self.source.check_macros()
        value = self._object(self.source.root, "", self.source.given)
        self._check_all_read()
        text = self._operative() if self._is_text() else objects.gin_text(value)
        return Loaded(value, flatten(value), text, self.where)

    def _object(self, cls: type, scope: str | None, base: Any = None) -> Any:
        """Build an object of a class, or return `base` if nothing would change.

        Args:
          scope: where it is built; None: no binding applies.
          base: the object that has the values of the fields that nothing binds; None: the fields' defaults.
        """
        if scope is not None:
            self.scopes.setdefault(cls, set()).add(scope)
        try:
            values = {name: self._value(cls, name, scope, base) for name in fields(cls)}
            if base is not None and all(_is_same(value, getattr(base, name)) for name, value in values.items()):
                return base
            with boundary(ConfigError, "cannot be built"):
                return cls(**values)
        except ConfigError as e:
            if scope is None:  # the binding that holds the object says where it comes from
                raise
            if e.__cause__ is not None and not e.setting:  # another error than the class's own
                e.setting = cls.__name__
                e.located_at(self._asked_for(cls, scope))
            origin = self.where(e.setting, scope) or self.where(f"{cls.__name__}.{e.setting}", scope)
            e.located_at(origin or self._asked_for(cls, scope))
            raise

    def _value(self, cls: type, name: str, scope: str | None, base: Any) -> Any:
        """Return the value of one field: bound, or of the default object, or the field's default."""
        field, setting = fields(cls)[name], f"{cls.__name__}.{name}"
        bound = self._matches(cls, name, scope)
        if bound:
            self._mark(bound)
            value = self._followed(bound[-1], scope)
        else:
            value = default(field) if base is None else getattr(base, name)
            if value is dataclasses.MISSING:
                raise ConfigError(
                    "has no default and is not set",
                    setting=setting,
                    where=self._asked_for(cls, scope or ""),
                    remedy=f"set it: {scope or ''}{'/' * bool(scope)}{setting} = ...",
                )
            value = map_leaves(value, lambda leaf: self._object(type(leaf), scope, leaf) if _is_object(leaf) else leaf)
        try:
            return check.fit(value, check.hints(cls)[name])
        except check.Mismatch as e:
            standard = default(field) if bound else dataclasses.MISSING
            remedy = e.remedy or ("" if standard is dataclasses.MISSING else f"the default is {standard!r}")
            raise ConfigError(str(e), setting=setting, value=value, remedy=remedy) from None

    def _followed(self, binding: Binding, scope: str | None) -> Any:
        """Return the value of a binding in a scope, with its references to objects and macros resolved."""
        if (binding, scope) in self.followed:
            names = [b.name for b, _ in self.followed[self.followed.index((binding, scope)) :]]
            raise ConfigError(
                f"refers to itself in a circle: {' -> '.join([*names, binding.name])}",
                setting=binding.name,
                where=binding.where,
                remedy="break the circle",
            )
        self.followed.append((binding, scope))
        try:
            return map_leaves(binding.value, lambda leaf: self._leaf(leaf, scope))
        except ConfigError as e:
            e.located_at(binding.where)
            raise
        finally:
            self.followed.pop()

    def _leaf(self, leaf: Any, scope: str | None) -> Any:
        if isinstance(leaf, Macro):
            return self._followed(self.source.live[None, "", leaf.name], leaf.name)
        if isinstance(leaf, Ref):
            return self._object(leaf.obj, leaf.scope or scope) if leaf.call else leaf.obj
        return self._object(type(leaf), None, leaf) if _is_object(leaf) else leaf

    # -- where things come from

    def _matches(self, cls: type, name: str, scope: str | None) -> list[Binding]:
        """Return the bindings that apply in a scope, the widest first."""
        if scope is None:
            return []
        around = [scope[:i] for i, c in enumerate(scope) if c == "/"]
        found = [self.source.live.get((cls, part, name)) for part in dict.fromkeys(["", *around, scope])]
        return [b for b in found if b]

    def _mark(self, bound: list[Binding]) -> None:
        *wider, taken = bound
        self.read |= {*bound}
        self.used.add(taken)
        for b in wider:
            self.shadows.setdefault(b, []).append(taken)

    def where(self, setting: str, scope: str = "") -> str:
        """Return the origin of "Class.field" or "Class": the binding that applies in `scope`, else the bindings in use,
        else default."""
        within, _, path = setting.rpartition("/")
        path, _, field = path.rpartition(".")
        classes = [cls for cls in self.source.known() if f".{check.full_name(cls)}".endswith(f".{path or field}")]
        if classes and not path:
            return self._asked_for(classes[0], within)
        classes = [cls for cls in classes if field in fields(cls)]
        scope = scope or within
        here = [b for cls in classes for b in self._matches(cls, field, scope)[-1:] if scope]
        bound = [b for b in self.source.live.values() if b.cls in classes and b.field == field]
        if found := here or [b for b in bound if b in self.used] or bound:
            return ", ".join(b.where for b in found)
        return self._default(f"{check.full_name(classes[0])}.{field}") if classes else ""

    def _default(self, what: str) -> str:
        return f"default of {what}" if self.source.given is None else ""

    def _asked_for(self, cls: type, scope: str) -> str:
        """Return where an object of `cls` comes from: the reference that builds it, else its first binding."""
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
        return self.last_file if cls is self.source.root else self._default(check.full_name(cls))

    # -- what was read

    def _check_all_read(self) -> None:
        """Check that every live binding reached an object. Bindings whose object a later file or setting removed are
        exempt."""
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
        """Return whether a later file or setting overrode the value with the object for which `b` was written."""
        later = [old for old, new in self.source.overridden if b.layer and b.order < new.order and b.layer != new.layer]
        return b.cls in self._classes_below(later)

    def _classes_below(self, value: Any) -> set[type]:
        """Return the classes of the objects in a value, at any depth."""
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
        """Return the macros that bindings read, also through other macros."""
        found: set[str] = set()
        todo = [b.value for b in bindings]
        while todo:
            names = {macro.name for macro in leaves(todo.pop(), Macro)} - found
            found |= names
            todo += [self.source.live[None, "", name].value for name in names if (None, "", name) in self.source.live]
        return found

    # -- the operative file

    def _is_text(self) -> bool:
        """Return whether all values that were read can be written as given: none is a Python object."""
        if self.source.given is not None:
            return False
        kept = (Ref, Macro)
        given = [leaf for b in self.read for leaf in leaves(b.value, object) if not isinstance(leaf, kept)]
        return all(map(objects.is_literal, given))

    def _operative(self) -> str:
        """Return the bindings that were read and the imports they need, as one gin file."""
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


def _is_object(leaf: object) -> bool:
    return is_config(type(leaf))


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values hold identical leaves."""
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    return a is b
