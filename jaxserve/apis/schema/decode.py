"""From the bytes of a body to a checked request struct.

Everything wrong with the JSON or its types ends in one InvalidRequestError with the path as `param`.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from jaxserve.apis.schema.choices import choices_at
from jaxserve.apis.schema.limits import MAX_ECHOED_CHARS
from jaxserve.apis.schema.unknown import unknown_inside
from jaxserve.apis.schema.unsupported import NO_OPS, UNSUPPORTED, is_neutral, refuse
from jaxserve.errors import InvalidRequestError, invalid

T = TypeVar("T", bound=msgspec.Struct)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r"^(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_WORD = re.compile(r"^Invalid enum value '(?P<word>.*)'$", re.DOTALL)
_INDEX = re.compile(r"\[\d+\]")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")


def decode_request(struct: type[T], body: bytes) -> tuple[T, list[str]]:
    """Decode and check `body`; also returns the paths of unknown fields, which are ignored.

    Raises InvalidRequestError for malformed JSON, wrong types and missing fields, and
    UnsupportedParameterError for a known field that asks for something we do not do.
    """
    try:
        body.decode()
        fields = _FIELDS.decode(body)
        request = msgspec.json.decode(body, type=struct)
        return request, [*_unknown_fields(struct, fields), *unknown_inside(struct, fields)]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8 at byte {error.start}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct=struct) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def invalid_field(
    text: str, value: object = msgspec.UNSET, struct: type[msgspec.Struct] | None = None
) -> InvalidRequestError:
    """An error from msgspec's text; with `value` given, the text repeats it (bounded).

    struct: what was decoded; its words are named where another one was sent.
    """
    match = _PATH.match(text)
    assert match is not None, "the pattern matches any text"
    reason, path = match["reason"], match["path"] or ""
    absent = _MISSING.match(reason)
    if absent:
        path = f"{path}.{absent['field']}" if path else absent["field"]
        return missing(path)
    wrong = _WORD.match(reason)
    choices = choices_at(struct, _INDEX.sub("[...]", path)) if wrong and struct is not None else ()
    if wrong and choices:
        return invalid(path, f"must be one of {', '.join(map(repr, choices))}, got {shorten(wrong['word'])}")
    got = "" if value is msgspec.UNSET else f", got {shorten(value)}"
    if not path:
        return InvalidRequestError(f"Invalid body: {reason}{got}.")
    return invalid(path, f"{reason}{got}")


def missing(param: str) -> InvalidRequestError:
    """The error that names a field without which there is nothing to do."""
    return InvalidRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def shorten(value: object) -> str:
    """A client's value for an error text, cut after `MAX_ECHOED_CHARS` characters."""
    try:
        text = repr(value)
    except ValueError:
        return "a huge integer"
    return text if len(text) <= MAX_ECHOED_CHARS else text[:MAX_ECHOED_CHARS] + "..."


def _unknown_fields(struct: type[msgspec.Struct], fields: dict[str, msgspec.Raw]) -> list[str]:
    unknown = []
    for name, raw in fields.items():
        if name in struct.__struct_encode_fields__ or name in NO_OPS:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif not is_neutral(name, msgspec.json.decode(raw)):
            raise refuse(name)
    return unknown
