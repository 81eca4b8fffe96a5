"""From the bytes of a body to a checked request struct.

Everything wrong with the JSON or its types ends in one InvalidRequestError with the path as `param`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from jaxserve.apis.schema.unknown import unknown_inside
from jaxserve.apis.schema.unsupported import NO_OPS, UNSUPPORTED, is_neutral
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.checks import invalid_field, refuse

T = TypeVar("T", bound=msgspec.Struct)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
