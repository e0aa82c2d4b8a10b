"""What a request brings: images as files of a form, or as JSON."""

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fedprotip.errors import UsageError, shortened
from fedprotip.serve.limits import FORMATS, Limits, Refused
from fedprotip.stream.images import decode

MULTIPART, JSON = "multipart/form-data", "application/json"
SEPARATORS = ("/", "\\", "\0")
"""What no name of a file has, but a path."""


class Asked(BaseModel):
    """The body of `POST /predict` as JSON."""

    model_config = ConfigDict(extra="forbid")
    images: list[str] = Field(min_length=1, description="Image files in base64, or as data: URLs.")
    together: bool = Field(False, description="The images came together: one task for all, unless they tell otherwise.")
    task: int | None = Field(None, ge=0, description="Their task, counted from 0, if it is known.")


@dataclass(frozen=True)
class Upload:
    """The files of one request."""

    files: list[tuple[str, bytes]]  # what each is called in answers, and its bytes
    together: bool = False
    task: int | None = None


async def read(request: Request, limits: Limits) -> Upload:
    """The files of a request, as they came; what is none is refused with a sentence."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == JSON:
        upload = _of_json(await request.body())
    elif kind == MULTIPART:
        upload = await _of_form(request, limits)
    else:
        raise Refused(415, f"Send images as {MULTIPART}, or as {JSON}; this is {shortened(kind, 50) or 'neither'}.")
    if not upload.files:
        raise Refused(400, "There is no image in the request; the files of a form are called images.")
    if len(upload.files) > limits.images:
        raise Refused(413, f"The request has {len(upload.files)} images, and {limits.images} are the most.")
    for place, (name, _) in enumerate(upload.files, 1):
        if name in (".", "..") or any(part in name for part in SEPARATORS):
            raise Refused(400, f"Image {place} ({shortened(name, 80)!r}) has a path for a name; send the name alone.")
    return upload


def pictures(files: Sequence[tuple[str, bytes]], limits: Limits) -> Iterator[Image]:
    """Decoded images, one at a time: each may be large. The first that is none refuses the request and is named."""
    seen = 0
    for place, (name, data) in enumerate(files, 1):
        who = f"Image {place} ({shortened(name, 80)})" if name else f"Image {place}"
        if not data:
            raise Refused(422, f"{who} is empty.")
        try:
            image = decode(data, FORMATS, limits.pixels)
        except UsageError as error:
            raise Refused(422, f"{who}: {error}.") from None
        seen += image.width * image.height
        if seen > limits.total:
            raise Refused(413, f"{who}: with it there are {seen:,} pixels, and {limits.total:,} are the most at once.")
        yield image
        del image  # before the next one is decoded


def _of_json(body: bytes) -> Upload:
    try:
        asked = Asked.model_validate(json.loads(body))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the body"
        raise Refused(422, f"{where}: {problem['msg']}.") from None
    except (ValueError, RecursionError):
        raise Refused(400, "The body is not JSON.") from None
    files = []
    for place, text in enumerate(asked.images, 1):
        if text.startswith("data:"):  # as browsers write it
            text = text.partition(";base64,")[2]
        try:
            files.append(("", base64.b64decode("".join(text.split()), validate=True)))  # `base64` breaks lines
        except (binascii.Error, ValueError):
            raise Refused(422, f"Image {place} is not base64.") from None
    return Upload(files, asked.together, asked.task)


async def _of_form(request: Request, limits: Limits) -> Upload:
    try:
        async with request.form(max_files=limits.images, max_fields=8, max_part_size=limits.body) as form:
            parts = form.getlist("images")
            files = [(part.filename or "", await part.read()) for part in parts if isinstance(part, UploadFile)]
            together, task = form.get("together", ""), form.get("task", "")
    except HTTPException as error:
        raise Refused(400, f"The form cannot be read: {shortened(str(error.detail)).rstrip('.')}.") from None
    except (ValueError, LookupError) as error:  # the parser's own, and whatever an odd boundary or header leads to
        told = shortened(str(error)).rstrip(".") or type(error).__name__
        raise Refused(400, f"The form cannot be read: {told}.") from None
    if len(files) < len(parts):
        raise Refused(422, "images must be files, each with a name.")
    if str(together).lower() not in ("", "true", "false", "1", "0"):
        raise Refused(422, "together is true or false.")
    if task and not (str(task).isdecimal() and len(str(task)) < 10):
        raise Refused(422, "task is a number, counted from 0.")
    return Upload(files, str(together).lower() in ("true", "1"), int(str(task)) if task else None)
