"""What a field of a document accepts, as pydantic models whose faults say what was given and what is accepted.

A ``Rule`` is one field's check with its words, which the documentation prints too. Models are strict: nothing is
converted, unknown fields are faults unless a model says otherwise, and every fault of a document is found at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from k3sim.errors import UserError
from k3sim.model.documents.document import Document, Fault, cut, is_text, shown
from k3sim.model.documents.lines import Keys
from k3sim.model.names import REMOVED, RENAMED

_MAX_LIST = 120
MOST_ENTRIES = 4096


class Record(BaseModel):
    """An object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: What its unknown fields may once have been called, a key of ``RENAMED`` and of ``REMOVED``.
    renamed: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _can_be_checked(cls, given: Any) -> Any:
        """Refuse what has more entries than any file needs, before each wrong one costs some kilobytes to say.

        Half a surrogate pair in a name is spelled out: pydantic would stop there, and look at no other field.
        """
        if isinstance(given, dict):
            if len(given) > MOST_ENTRIES:
                raise _custom(f"has {len(given)} fields, accepted: at most {MOST_ENTRIES}")
            for name, value in given.items():
                if isinstance(value, list | dict) and len(value) > MOST_ENTRIES and _is_checked_by_entry(cls, name):
                    raise _custom(f"has {len(value)} entries in {name}, accepted: at most {MOST_ENTRIES}")
            if not all(map(is_text, given)):
                return {name.encode("ascii", "backslashreplace").decode(): value for name, value in given.items()}
        return given


class OpenRecord(Record):
    """An object of which only some fields matter here; the others are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def _custom(says: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{says}", {"says": says})


def _is_checked_by_entry(model: type[BaseModel], name: str) -> bool:
    """Whether every entry of a field has a check of its own: not where a rule takes the whole, or nothing does."""
    known = model.model_fields.get(name)
    if known is None or any(isinstance(one, Rule) for one in known.metadata):
        return False
    bare = _bare(known.annotation)
    return get_origin(bare) in (list, dict) and Any not in get_args(bare)


class Refused(Exception):
    """A value that a rule does not take; the text, where there is one, says it in place of the rule."""


class Rule:
    """A field's check: it returns the value or raises ``Refused``; ``accepted`` are its words."""

    def __init__(self, accepted: str, check: Callable[[Any], Any]) -> None:
        self.accepted, self.check = accepted, check

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: Any) -> Any:
        try:
            return self.check(value)
        except Refused as refusal:
            says = str(refusal) or f"is {shown(value)}, accepted: {self.accepted}"
        except UserError as refusal:
            says = f"is refused: {refusal}"
        raise _custom(says)


# -- rules ------------------------------------------------------------------------------------------------------------


def _check_text(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        raise Refused
    return value


TEXT = Rule("a text that is not empty", _check_text)


def _check_flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise Refused
    return value


FLAG = Rule("true or false", _check_flag)


def whole(least: int, most: int) -> Rule:
    """A whole number from ``least`` to ``most``."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused
        return value

    return Rule(f"a whole number from {least} to {most}", check)


def number(least: float, most: float, unit: str = "", accepted: str = "") -> Rule:
    """A finite number from ``least`` to ``most``, given as integer or float; it becomes a float."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Refused
        if not math.isfinite(value):
            raise Refused
        return float(value)

    return Rule(accepted or f"{least:g} to {most:g} {unit}".rstrip(), check)


def choice(names: Iterable[str], renamed: str = "", words: str = "") -> Rule:
    """One of some names; a near one is proposed, and of an old one (``RENAMED``) the new one said.

    ``words`` stand for the names where a page would have no room for them.
    """
    accepted = tuple(names)

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in accepted:
            now = RENAMED.get(renamed, {}).get(value) if isinstance(value, str) else None
            if now is not None:
                raise Refused(f"is {shown(value)}, which is called {now!r} now")
            raise Refused(f"is {shown(value)}{nearest(value, accepted)}, accepted: {listed(accepted)}")
        return value

    return Rule(words or listed(accepted), check)


def one_of(*values: Any) -> Rule:
    """One of some values, the type included: 1 is not true."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in values):
            raise Refused
        return value

    return Rule(" or ".join(map(shown, values)), check)


def pattern(expression: str, accepted: str) -> Rule:
    """A text that matches an expression from end to end."""

    def check(value: Any) -> Any:
        if not isinstance(value, str) or re.fullmatch(expression, value) is None:
            raise Refused
        return value

    return Rule(accepted, check)


def asking(accepted: str, ask: Callable[[str], Any]) -> Rule:
    """A text that ``ask`` takes; its UserError says why not."""

    def check(value: Any) -> Any:
        _check_text(value)
        ask(value)
        return value

    return Rule(accepted, check)


# -- faults -----------------------------------------------------------------------------------------------------------

AnyRecord = TypeVar("AnyRecord", bound=BaseModel)


def checked(document: Document, model: type[AnyRecord], at: Keys = ()) -> AnyRecord | None:
    """What stands under ``at``, read by ``model``; None where it has faults, which are then noted in ``document``."""
    value = document.value
    for key in at:
        value = value[key]
    try:
        return model.model_validate(value)
    except ValidationError as error:
        document.add(faults_of(error, model, at))
    return None


def faults_of(error: ValidationError, model: type[BaseModel], at: Keys) -> list[Fault]:
    """The faults that pydantic found, in the words of the rules; fields that one object lacks are one fault."""
    missing: dict[Keys, list[tuple[str, str]]] = {}
    found: list[Fault] = []
    renamed: dict[Keys, dict[str, str]] = {}
    removed: dict[Keys, list[str]] = {}
    for one in error.errors(include_url=False):
        keys: Keys = tuple(one["loc"])
        parent = model_at(model, keys[:-1]) if keys else None
        if one["type"] == "missing":
            missing.setdefault(keys[:-1], []).append((str(keys[-1]), _accepted_by(parent, str(keys[-1]))))
        elif one["type"] == "extra_forbidden":
            now = RENAMED.get(parent.renamed, {}).get(str(keys[-1])) if parent is not None else None
            if now is not None:
                renamed.setdefault(keys[:-1], {})[str(keys[-1])] = now
            elif parent is not None and str(keys[-1]) in REMOVED.get(parent.renamed, ()):
                removed.setdefault(keys[:-1], []).append(str(keys[-1]))
            else:
                names = tuple(parent.model_fields) if parent is not None else ()
                near = nearest(keys[-1], names) or f", accepted: {listed(names)}"
                found.append(Fault((*at, *keys), f"is unknown{near}"))
        else:
            found.append(Fault((*at, *keys), _says(one)))
    first: list[Fault] = []
    for keys, names_now in renamed.items():
        pairs = listed(f"{before} -> {now}" for before, now in names_now.items())
        first.append(Fault((*at, *keys), f"has fields that have other names now: {pairs}"))
    for keys, names_before in removed.items():
        says = f"has fields that no prediction depends on: {listed(names_before)}; take them out"
        first.append(Fault((*at, *keys), says))
    for keys, lacking in missing.items():
        known = set(renamed.get(keys, {}).values())
        lacks = [f"{name} ({accepted})" if 0 < len(accepted) <= 30 else name for name, accepted in lacking
                 if name not in known]  # fmt: skip
        if lacks:
            first.append(Fault((*at, *keys), f"lacks {listed(lacks)}"))
    return first + found


def _says(one: Mapping[str, Any]) -> str:
    if one["type"] == "rule":
        return str(one["ctx"]["says"])
    given = shown(one["input"])
    words = {
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
    }
    accepted = words.get(one["type"])
    if one["type"] == "too_short":
        least = one["ctx"]["min_length"]
        accepted = "a list that is not empty" if least == 1 else f"a list of {least} or more"
    elif one["type"] == "too_long":
        accepted = f"a list of at most {one['ctx']['max_length']}"
    return f"is {given}, accepted: {accepted or one['msg']}"


def model_at(model: Any, keys: Keys) -> type[Record] | None:
    """The model that reads what stands under ``keys``; None where none does."""
    for key in keys:
        model = _bare(model)
        if isinstance(model, type) and issubclass(model, BaseModel):
            known = model.model_fields.get(str(key))
            model = known.annotation if known is not None else None
        elif get_origin(model) in (list, tuple, dict):
            model = get_args(model)[-1 if get_origin(model) is dict else 0]
        else:
            return None
    model = _bare(model)
    return model if isinstance(model, type) and issubclass(model, Record) else None


def _bare(annotation: Any) -> Any:
    """An annotation without ``Annotated`` and ``| None``."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    inner = [one for one in get_args(annotation) if one is not type(None)]
    if type(None) in get_args(annotation) and len(inner) == 1:
        return _bare(inner[0])
    return annotation


def rules_of(annotation: Any, metadata: Sequence[Any] = ()) -> list[Rule]:
    """The rules of a field's annotation, those of a list's entries included."""
    found = [one for one in metadata if isinstance(one, Rule)]
    if get_origin(annotation) is Annotated:
        found += [one for one in get_args(annotation)[1:] if isinstance(one, Rule)]
    for inner in get_args(annotation):
        if inner is not type(None) and not isinstance(inner, Rule):
            found += rules_of(inner)
    return found


def _accepted_by(model: type[BaseModel] | None, name: str) -> str:
    if model is None or name not in model.model_fields:
        return ""
    rules = [one for one in model.model_fields[name].metadata if isinstance(one, Rule)]
    return rules[0].accepted if rules else ""


def nearest(given: Any, names: Sequence[str]) -> str:
    """`` (did you mean ...?)`` for a close name, else nothing."""
    found = get_close_matches(str(given)[:80].lower(), {one.lower(): one for one in names}, n=1, cutoff=0.6)
    return f" (did you mean {next(one for one in names if one.lower() == found[0])}?)" if found else ""


def listed(names: Iterable[str]) -> str:
    """Names in a line of at most 120 characters, and how many more there are."""
    names = list(names)
    whole = ", ".join(names)
    if len(whole) <= _MAX_LIST:
        return whole
    shown_names = [cut(names[0], _MAX_LIST)]
    for one in names[1:]:
        if len(", ".join([*shown_names, one])) > _MAX_LIST:
            break
        shown_names.append(one)
    return f"{', '.join(shown_names)} and {len(names) - len(shown_names)} more"


def type_words(field: FieldInfo) -> tuple[str, str]:
    """Type of a field in JSON's words, and what it accepts."""
    rules = [one for one in field.metadata if isinstance(one, Rule)] or rules_of(field.annotation)
    accepted = ", ".join(dict.fromkeys(one.accepted for one in rules))
    bare = _bare(field.annotation)
    words = {str: "string", int: "integer", float: "number", bool: "boolean", list: "list", dict: "object"}
    kind = words.get(get_origin(bare) or bare, "object")
    inner = model_at(bare, (0,)) if kind == "list" else None
    return kind, accepted or ("objects, below" if inner is not None else "an object, below")
