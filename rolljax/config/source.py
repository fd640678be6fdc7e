"""gin files and `--set` settings as bindings: every name resolved, every file:line kept. `config.py` is the only user.

The grammar is gin's own (`gin.config_parser`). Names mean what they mean under gin's dynamic registration: a file
sees the modules it imports itself. A setting sees the imports of all files, and may also name a class by the end of
its path (`Grpo.clip_high`) or by a full path that no file imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from gin import config_parser

from rolljax.config import check as check
from rolljax.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ref:
    """`@scope/module.Class()` or `@module.function` in a value; `obj` is what the selector names."""

    scope: str
    selector: str
    call: bool
    obj: Any = None

    def __repr__(self) -> str:
        return f"@{self.scope}{'/' * bool(self.scope)}{self.selector}{'()' * self.call}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name` in a value."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One `name = value` as read. `cls` is None for a macro; `field` is then the macro's name.

    `layer` is the file's place among the files (its includes extend it), `()` for a setting; `order` counts bindings.
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
class _Place:
    """Where a statement stands, and how names are resolved there."""

    where: str
    layer: tuple[int, ...]
    resolve: Callable[[str], Any]


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Ref:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Ref(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


# ---- helpers --------------------------------------------------------------------------------------------------------


def map_leaves(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to every leaf of its lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, fn) for item in value)
    if type(value) is dict:
        return {map_leaves(key, fn): map_leaves(item, fn) for key, item in value.items()}
    return fn(value)


def leaves(value: Any, kind: type[T]) -> list[T]:
    """The leaves of `value` that are of one class."""
    found: list[Any] = []
    map_leaves(value, found.append)
    return [leaf for leaf in found if isinstance(leaf, kind)]


def is_config(cls: Any) -> bool:
    """Whether `cls` is a frozen dataclass that its fields construct."""
    params = getattr(cls, "__dataclass_params__", None) if isinstance(cls, type) else None
    return params is not None and params.frozen and params.init


def fields(cls: type) -> dict[str, dataclasses.Field]:
    """The fields that can be set, by name."""
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def default(field: dataclasses.Field) -> Any:
    """The field's default, a fresh one from its factory, or `dataclasses.MISSING`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def default_classes(cls: type) -> list[type]:
    """Classes of the objects that stand in `cls` by default."""
    found = [type(leaf) for field in fields(cls).values() for leaf in leaves(default(field), object)]
    return [cls for cls in found if is_config(cls)]


def _mentioned_classes(cls: type) -> list[type]:
    return [c for tp in check.hints(cls).values() for c in check.classes_in(tp) if is_config(c)]


def _closure(start: Iterable[type], grow: Callable[[type], list[type]]) -> dict[type, None]:
    seen: dict[type, None] = {}
    todo = list(start)
    while todo:
        if (cls := todo.pop()) not in seen:
            seen[cls] = None
            todo += grow(cls)
    return seen


def _text(path: str, asked_at: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("does not exist", setting=path, remedy=_files_near(path), where=asked_at) from None
    except IsADirectoryError:
        remedy = _files_near(str(Path(path, "x.gin")))
        raise ConfigError("is a folder, not a gin file", setting=path, remedy=remedy, where=asked_at) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot be read: {e}", setting=path, where=asked_at) from None


def _statements(text: str, path: str) -> Iterator[Any]:
    """gin's own parser; its errors as ours."""
    parser = None
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
        yield from parser
    except (SyntaxError, tokenize.TokenError) as e:
        if isinstance(e, SyntaxError):
            message, line = e.msg, e.lineno or 1
            remedy = "a line is `module.Class.field = value` or `name = value`"
        else:  # the end of the file inside brackets or quotes: name the last line that has something
            message, line = e.args[0], parser.current_token.start[0] if parser else e.args[1][0]
            remedy = "a bracket or quote is open"
        _, _, word = message.partition("Failed to parse token ")
        remedy = f"text goes in quotes: {word}" if word else remedy
        message = f"cannot read the value {word}" if word else f"syntax error: {message.strip()}"
        lines = [*text.splitlines(), ""]
        written = lines[min(line, len(lines)) - 1].strip()
        raise ConfigError(message, value=written, remedy=remedy, where=f"{path}:{line}") from None


def _setting_value(text: str, where: str) -> Any:
    """A gin value; a bare word or path is a string."""
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        found = list(config_parser.ConfigParser(f"value = {text}", _Delegate()))
        if len(found) == 1:
            return found[0].value
    if text[0] in "@%[({'\"":
        raise ConfigError("cannot read the value", value=text, remedy="is a quote or bracket missing?", where=where)
    return text


def _import(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name and f"{module}.".startswith(f"{e.name}."):
            raise ConfigError(
                f"cannot be imported: there is no module '{e.name}'",
                setting=module,
                remedy=_modules_near(e.name),
                where=where,
            ) from None
        broken: Exception = e
    except Exception as e:  # noqa: BLE001 - a user's module may raise anything while it is imported
        broken = e
    message = f"was found, but importing it failed: {type(broken).__name__}: {broken}"
    raise ConfigError(message, setting=module, remedy=f"run: python -c 'import {module}'", where=where) from broken


def _modules_near(module: str) -> str:
    parent, _, last = module.rpartition(".")
    beside = pkgutil.iter_modules(getattr(importlib.import_module(parent), "__path__", [])) if parent else []
    remedy = check.nearest(last, [m.name for m in beside], f"modules in {parent}")
    return remedy or "check the spelling, and that it is installed or its folder is in PYTHONPATH"


# ---- the reader -----------------------------------------------------------------------------------------------------


class Source:
    """What files and settings bind.

    Attributes:
      bindings: all, in the order read.
      live: (class, scope, field) -> the binding that won; (None, "", name) for a macro.
      overridden: each binding with the value it replaced (an earlier binding's, or the field's default).
      homes: class or function -> (module, path in it), as the files name it.
    """

    def __init__(self, root: type) -> None:
        self.root = root
        self.bindings: list[Binding] = []
        self.live: dict[tuple[Any, str, str], Binding] = {}
        self.overridden: list[tuple[Any, Binding]] = []
        self.homes: dict[Any, tuple[str, str]] = {}
        self._symbols: dict[str, ModuleType] = {}  # of all files, for settings
        _check_class(root, check.full_name(root), "load(root=)")

    def read_file(self, path: str, layer: tuple[int, ...], asked_at: str = "", inside: tuple[str, ...] = ()) -> None:
        """Read one file and what it includes; every name is resolved at its own line."""
        if path in inside:
            raise ConfigError("includes itself", setting=path, where=asked_at, remedy="remove one of the includes")
        symbols: dict[str, ModuleType] = {}
        includes = 0
        for statement in _statements(_text(path, asked_at), path):
            where = f"{path}:{statement.location.line_num}"
            if isinstance(statement, config_parser.ImportStatement):
                self._import_symbol(statement, symbols, where)
            elif isinstance(statement, config_parser.IncludeStatement):
                includes += 1
                target = _include_path(path, statement.filename)
                self.read_file(target, (*layer, includes), where, (*inside, path))
            elif isinstance(statement, config_parser.BindingStatement):
                place = _Place(where, layer, functools.partial(self._resolve, symbols=symbols, where=where))
                self._bind(place, statement.scope, statement.selector, statement.arg_name, statement.value)

    def read_setting(self, text: str) -> None:
        """Read one `--set 'name = value'`."""
        where = f"--set '{text}'"
        name, _, written = (part.strip() for part in text.partition("="))
        if not (name and written):
            raise ConfigError(
                "is not of the form 'name = value'", setting=f"--set '{text}'", remedy="--set 'Class.field = value'"
            )
        place = _Place(where, (), functools.partial(self._find, where=where))
        scope, _, selector = name.rpartition("/")
        selector, _, field = selector.rpartition(".")
        if (None, "", name) in self.live:
            scope, selector, field = "", name, ""
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
        self._bind(place, scope, selector, field, _setting_value(written, where))

    def check_macros(self) -> None:
        """Every %name is defined, and every %gin.REQUIRED was set."""
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
        """Classes a setting may name by the end of their path; True for those the files use or that are defaults."""
        used = [b.cls for b in self.bindings if b.cls]
        used += [ref.obj for b in self.bindings for ref in leaves(b.value, Ref) if is_config(ref.obj)]
        in_tree = _closure([self.root, *used], default_classes)
        imported = [c for module in self._symbols.values() for c in vars(module).values() if is_config(c)]
        return {cls: cls in in_tree for cls in _closure([*in_tree, *imported], _mentioned_classes)}

    def nameable(self) -> list[type]:
        """The known classes that stand in the tree of settings, or that some setting takes."""
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
        module = _import(statement.module, where)
        if not (statement.is_from or statement.alias):
            module = importlib.import_module(statement.module.partition(".")[0])
        symbols[statement.bound_name()] = self._symbols[statement.bound_name()] = module

    def _resolve(self, selector: str, symbols: Mapping[str, ModuleType], where: str) -> Any:
        """What `module.Class` names in a file with these imports."""
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
        """The class or function at `path` in `module`; its home is remembered for the operative file."""
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
        """What a setting's selector names: as in a file, the end of a known class's path, or a full path."""
        first, *rest = selector.split(".")
        known = self.known()
        found = {cls: None for cls in known if f".{check.full_name(cls)}".endswith(f".{selector}")}
        if first in self._symbols and rest:
            with contextlib.suppress(ConfigError):
                found[self._attribute(self._symbols[first], rest, selector, where)] = None
        if len(found) > 1:  # prefer what is in use over what is only imported
            found = {cls: None for cls in found if known.get(cls)} or found
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
        remedy = f"{check.nearest(name, names, 'classes')}; others by their path: module.Class"
        raise ConfigError(
            "is not a class of this config" + (f", and there is no module '{first}'" if rest else ""),
            setting=selector,
            where=where,
            remedy=remedy if check.near(name, names) or not rest else _modules_near(first),
        )

    def _import_path(self, selector: str, where: str) -> Any:
        """`package.module.Class`, importing the longest part that is a module."""
        first, *path = selector.split(".")
        module = _import(first, where)
        while len(path) > 1 and hasattr(module, "__path__"):
            if not importlib.util.find_spec(f"{module.__name__}.{path[0]}"):
                break
            module, path = _import(f"{module.__name__}.{path[0]}", where), path[1:]
        if len(path) > 1 and not hasattr(module, path[0]):
            missing = f"{module.__name__}.{path[0]}"
            raise ConfigError(
                f"names nothing: there is no module '{missing}'",
                setting=selector,
                where=where,
                remedy=_modules_near(missing),
            )
        return self._attribute(module, path, selector, where)

    # -- bindings

    def _bind(self, place: _Place, scope: str, selector: str, field: str, value: Any) -> None:
        """Add one binding; without a field it is a macro of the name `selector`."""
        cls = place.resolve(selector) if field else None
        if cls is None:
            scope, field = "", f"{scope}/{selector}" if scope else selector
        else:
            _check_class(cls, selector, place.where)
            if field not in fields(cls):
                raise ConfigError(
                    f"is not a field of {cls.__name__}",
                    setting=f"{selector}.{field}",
                    value=value,
                    remedy=check.nearest(field, fields(cls), "fields"),
                    where=place.where,
                )
        value = map_leaves(value, functools.partial(self._resolved, place=place))
        binding = Binding(scope, cls, field, value, place.where, place.layer, len(self.bindings))
        old = self.live.get((cls, scope, field))
        if old and place.layer and place.layer[: len(old.layer)] == old.layer:
            raise ConfigError(
                f"is already set at {old.where}",
                setting=binding.name,
                value=value,
                where=place.where,
                remedy="keep one of the two lines" if old.layer == place.layer else "put the include above that line",
            )
        replaced = old.value if old else default(fields(cls)[field]) if cls else None
        self.overridden.append((replaced, binding))
        self.bindings.append(binding)
        self.live[cls, scope, field] = binding

    def _resolved(self, leaf: Any, place: _Place) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        ref = dataclasses.replace(leaf, obj=place.resolve(leaf.selector))
        if ref.call:
            _check_class(ref.obj, ref.selector, place.where)
        elif ref.scope:
            raise ConfigError(
                "has a scope but is not called", setting=repr(ref), remedy=f"write {ref!r}()", where=place.where
            )
        return ref


def _check_class(cls: Any, selector: str, where: str) -> None:
    if not is_config(cls):
        remedy = "set fields of a frozen dataclass; @module.Class() builds one, @module.function names a function"
        if isinstance(cls, type):
            remedy = f"put @dataclasses.dataclass(frozen=True) on {cls.__name__}"
        raise ConfigError("is not a frozen dataclass", setting=selector, remedy=remedy, where=where)


def _files_near(path: str) -> str:
    """The gin file that was meant by one that is not there: beside it, or of rolljax's own; else what there is."""
    folder, name = Path(path).parent, Path(path).stem
    beside = {p.stem: p.name for p in folder.glob("*.gin")}
    shipped = _shipped()
    if near := check.near(name, beside):
        return f"did you mean '{folder / beside[near]}'?"
    if near := check.near(path.removeprefix("configs/").removesuffix(".gin"), shipped) or check.near(name, shipped):
        return f"did you mean '{near}', which comes with rolljax?"
    here = f"gin files in {folder}: {', '.join(sorted(beside.values()))}; " if beside else ""
    return f"{here}those that come with rolljax: {', '.join(n for n in shipped if '/' not in n)}"


def _shipped() -> list[str]:
    """Names of the configs that come with rolljax."""
    found = {p.relative_to(folder).with_suffix("").as_posix() for folder in _CONFIGS for p in folder.rglob("*.gin")}
    return sorted(found)


_CONFIGS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
"""Where they are: in the installed package, in a checkout."""


def _include_path(path: str, name: str) -> str:
    """Beside the file that includes it; else as `find_config` finds it."""
    beside = Path(path).parent / name
    found = find_config(name)
    return found if Path(found).is_file() and not beside.is_file() else str(beside)


def find_config(name: str) -> str:
    """A gin file as the user named it: a path, or the name of one that comes with rolljax (`quickstart`,
    `algorithms/tis`)."""
    if Path(name).exists() and not Path(name).is_dir():
        return name
    inside = Path(name.removeprefix("configs/").removesuffix(".gin") + ".gin")
    for folder in _CONFIGS:
        if not inside.is_absolute() and ".." not in inside.parts and (folder / inside).is_file():
            return str(folder / inside)
    return name
