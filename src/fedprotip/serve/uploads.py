"""What a request brings: images as files of a form, or as JSON."""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message

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
IMAGES = "images"
WANTED = {"together": "true or false", "task": "a number, counted from 0"}
"""What else a request may have."""


class Asked(BaseModel):
    """The body of `POST /predict` as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)
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
        problem = error.errors(include_url=False)[0]
        raise Refused(422, _wrong(problem["loc"], problem["input"])) from None
    except (ValueError, RecursionError):
        raise Refused(400, "The body is not JSON.") from None
    files = []
    for place, text in enumerate(asked.images, 1):
        if text.startswith("data:"):  # as browsers write it
            text = text.partition(";base64,")[2]
            if not text:
                raise Refused(422, f"Image {place} is a data: URL without ;base64, and a file after it.")
        try:
            files.append(("", base64.b64decode("".join(text.split()), validate=True)))  # `base64` breaks lines
        except (binascii.Error, ValueError):
            raise Refused(422, f"Image {place} is not base64.") from None
    return Upload(files, asked.together, asked.task)


def _wrong(where: Sequence[str | int], given: object) -> str:
    """What is wrong with a part of a request, in a sentence."""
    if not where:
        return "The body must be a JSON object with images, and maybe together and task."
    name = str(where[0])
    if len(where) > 1:
        return f"Image {int(where[1]) + 1} must be text: its file in base64."
    if name == IMAGES:
        return "images must be a list of image files in base64, with one at least."
    if name not in WANTED:
        return f"{shortened(name, 80)!r} means nothing here; a request has images (the files), together and task."
    return f"{name} is {WANTED[name]}, not {shortened(str(given), 40)!r}."


async def _of_form(request: Request, limits: Limits) -> Upload:
    body = await request.body()  # which the form is then read from
    try:
        async with request.form(max_files=limits.images, max_fields=8, max_part_size=limits.body) as form:
            given = form.multi_items()
            files = [(part.filename or "", await part.read()) for _, part in given if isinstance(part, UploadFile)]
    except HTTPException as error:
        if str(error.detail).startswith("Too many files"):
            raise Refused(413, f"The request has more than {limits.images} images, which are the most.") from None
        raise Refused(400, f"The form cannot be read: {shortened(str(error.detail)).rstrip('.')}.") from None
    except (ValueError, LookupError) as error:  # the parser's own, and whatever an odd boundary or header leads to
        told = shortened(str(error)).rstrip(".") or type(error).__name__
        raise Refused(400, f"The form cannot be read: {told}.") from None
    if body and _end(request.headers["content-type"]) not in body:
        raise Refused(400, "The form ends before its last part does; send it again.")
    return Upload(files, *_fields(given))


def _fields(given: Iterable[tuple[str, UploadFile | str]]) -> tuple[bool, int | None]:
    """What a form says beside its images; a part that cannot be is refused and named."""
    fields: dict[str, str] = {}
    for name, part in given:
        if name not in (IMAGES, *WANTED):
            raise Refused(422, _wrong([name], part))
        if (name == IMAGES) != isinstance(part, UploadFile):
            wanted = "must be files, each with a name" if name == IMAGES else f"is {WANTED[name]}, not a file"
            raise Refused(422, f"{name} {wanted}.")
        if name in fields:
            raise Refused(422, f"{name} is given twice; send it once.")
        if isinstance(part, str):
            fields[name] = part
    together, task = fields.get("together", "").lower(), fields.get("task", "")
    if together not in ("", "true", "false", "1", "0"):
        raise Refused(422, _wrong(["together"], together))
    if task and not (task.isdecimal() and len(task) < 10):
        raise Refused(422, _wrong(["task"], task))
    return together in ("true", "1"), int(task) if task else None


def _end(kind: str) -> bytes:
    """What stands behind the last part of a form of this content type."""
    header = Message()
    header["content-type"] = kind
    return f"--{header.get_boundary('')}--".encode("latin-1", "replace")
