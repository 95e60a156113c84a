"""Frozen dataclasses to JSON and back, with field checks and a JSON schema, all read from the type annotations.

A spec class states its fields once; this module derives from that statement the check on construction, the encoding,
the decoding and the published schema, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from carpus.runtime.errors import BundleError

__all__ = ["check_fields", "decode", "encode", "json_schema"]

T = TypeVar("T")


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(cls: Any) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(hint))
    if _is_union(hint):
        return " or ".join(_describe(part) for part in get_args(hint))
    if origin is tuple:
        args = get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {_describe(args[0])}"
        return f"a list of {len(args)} items ({', '.join(_describe(part) for part in args)})"
    if origin is not None and issubclass(origin, Mapping):
        return f"an object of {_describe(get_args(hint)[1])}"
    if hint is type(None):
        return "null"
    return {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}.get(
        hint, hint.__name__
    )


def _fail(where: str, value: Any, hint: Any) -> BundleError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return BundleError(f"{where}: expected {_describe(hint)}, got {shown}")


def _check(value: Any, hint: Any, where: str) -> None:
    origin = get_origin(hint)
    if origin is Literal:
        ok = value in get_args(hint) and type(value) in {type(choice) for choice in get_args(hint)}
    elif _is_union(hint):
        ok = any(_matches(value, part, where) for part in get_args(hint))
    elif origin is tuple:
        args = get_args(hint)
        if not isinstance(value, tuple):
            raise _fail(where, value, hint)
        parts = (args[0],) * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(parts) != len(value):
            raise _fail(where, value, hint)
        for index, (item, part) in enumerate(zip(value, parts, strict=True)):
            _check(item, part, f"{where}[{index}]")
        return
    elif origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _fail(where, value, hint)
        for key, item in value.items():
            if not isinstance(key, str):
                raise BundleError(f"{where}: expected string keys, got {key!r}")
            _check(item, get_args(hint)[1], f"{where}.{key}")
        return
    elif hint is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    elif hint is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    else:
        ok = isinstance(value, hint)
    if not ok:
        raise _fail(where, value, hint)


def _matches(value: Any, hint: Any, where: str) -> bool:
    try:
        _check(value, hint, where)
    except BundleError:
        return False
    return True


def check_fields(obj: Any) -> None:
    """Check every field of a dataclass instance against its annotation.

    Args:
        obj: the instance; call this first in ``__post_init__``.

    Raises:
        BundleError: a field has the wrong type, is not among the choices, or is not finite.
    """
    hints = _hints(type(obj))
    for field in dataclasses.fields(obj):
        _check(getattr(obj, field.name), hints[field.name], f"{type(obj).__name__}.{field.name}")


def encode(obj: Any) -> Any:
    """Turn a spec (or any value found in one) into plain JSON types; tuples become lists."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: encode(getattr(obj, field.name)) for field in dataclasses.fields(obj)}
    if isinstance(obj, Mapping):
        return {key: encode(value) for key, value in obj.items()}
    if isinstance(obj, (tuple, list)):
        return [encode(value) for value in obj]
    return obj


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Build a spec from plain JSON types.

    Args:
        cls: a spec dataclass.
        data: what ``json.load`` returned.
        where: path of this value in its file, put in front of messages.

    Raises:
        BundleError: a field is missing, unknown or of the wrong type; the message gives its path.
    """
    where = where or cls.__name__
    if not isinstance(data, Mapping):
        raise BundleError(f"{where}: expected an object, got {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise BundleError(f"{where}: unknown field {unknown[0]!r}; the fields are {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode_value(_hints(cls)[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise BundleError(f"{where}: field {name!r} is missing")
    return cls(**values)


def _decode_value(hint: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return decode(hint, data, where)  # type: ignore[arg-type]
    if _is_union(hint):
        if data is None and type(None) in get_args(hint):
            return None
        specs = [part for part in get_args(hint) if dataclasses.is_dataclass(part)]
        if specs:
            return decode(specs[0], data, where)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(data, (list, tuple)):
            raise _fail(where, data, hint)
        args = get_args(hint)
        parts = (args[0],) * len(data) if len(args) == 2 and args[1] is Ellipsis else args
        if len(parts) != len(data):
            raise _fail(where, data, hint)
        value: Any = tuple(
            _decode_value(part, item, f"{where}[{index}]")
            for index, (item, part) in enumerate(zip(data, parts, strict=True))
        )
    else:
        value = data
    _check(value, hint, where)
    return value


def json_schema(cls: type, *, title: str, schema_id: str) -> dict[str, Any]:
    """Derive the JSON schema (draft 2020-12) of a spec dataclass and of every spec inside it."""
    definitions: dict[str, Any] = {}
    root = _schema_of_class(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": schema_id,
        "title": title,
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema_of_class(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    required = []
    properties = {}
    for field in dataclasses.fields(cls):
        properties[field.name] = _schema_of(_hints(cls)[field.name], definitions)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    summary = (cls.__doc__ or "").strip().split("\n")[0]
    return {
        "description": summary,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin = get_origin(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        name = hint.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _schema_of_class(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if _is_union(hint):
        return {"anyOf": [_schema_of(part, definitions) for part in get_args(hint)]}
    if origin is tuple:
        args = get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": _schema_of(args[0], definitions)}
        items = [_schema_of(part, definitions) for part in args]
        return {"type": "array", "prefixItems": items, "minItems": len(args), "maxItems": len(args)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(get_args(hint)[1], definitions)}
    names = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
    return {"type": names[hint]}
