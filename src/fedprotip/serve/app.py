"""The application: FastAPI around a run. `create_app(Source("runs/mine"))` is an ASGI application of its own."""

import asyncio
import html
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from time import monotonic
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from torch import Tensor

from fedprotip.errors import FedprotipError, UsageError
from fedprotip.inference.pictures import as_pixels
from fedprotip.serve import uploads
from fedprotip.serve.batching import Batcher, Described, Job
from fedprotip.serve.gate import ASSETS, Gate
from fedprotip.serve.limits import Limits, Refused
from fedprotip.serve.metrics import Metrics
from fedprotip.serve.source import Served, Source

DECODERS = 2
"""Threads that decode images: each may hold a large one."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
PAGE = {"page.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}


class ClassChance(BaseModel):
    label: str
    probability: float | None


class TaskChance(BaseModel):
    name: str
    probability: float | None
    relevance: float | None = Field(
        description="How much of it lies in the subspace of this task, relative to the largest; null: there is none."
    )
    similarity: float | None = Field(
        description="How like that of this task its relevance to all tasks is, as a cosine; null: there is none."
    )


class AnswerRecord(BaseModel):
    """What is said about one image."""

    name: str = Field(description="Of its file, as it was sent.")
    label: str
    probability: float | None
    task: int = Field(description="Counted from 0.")
    task_name: str
    task_probability: float | None
    unusual: float | None = Field(description="Above 0.95 better say: unknown. null: the run cannot tell.")
    classes: list[ClassChance] = Field(description="The likeliest.")
    tasks: list[TaskChance]


class Reply(BaseModel):
    run: str
    answers: list[AnswerRecord]


class Sentence(BaseModel):
    error: str


class Service:
    """Everything that lives as long as the server: the run, the thread that answers, the counters."""

    def __init__(self, source: Source, limits: Limits, every: float = 0.0) -> None:
        self.source, self.limits, self.every = source, limits, every
        self.metrics = Metrics()
        self.batcher = Batcher(limits.batch, limits.wait, self.metrics.batch, limits.threads)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")

    async def predict(self, upload: uploads.Upload, until: float) -> tuple[Served, Described]:
        """The run that answered, and its answers."""
        served = self.source.now
        if upload.task is not None and upload.task >= len(served.predictor.plan.tasks):
            raise Refused(
                422, f"task = {upload.task}: this run has {len(served.predictor.plan.tasks)}, counted from 0."
            )
        try:
            async with asyncio.timeout(max(until - monotonic(), 0)):
                ready = await asyncio.get_running_loop().run_in_executor(self._decoders, self._prepared, served, upload)
                job = Job(served.predictor, ready, upload.together, upload.task)
                return served, await asyncio.wrap_future(self.batcher.submit(job))
        except TimeoutError:
            raise Refused(503, f"There was no answer within {self.limits.seconds:g} seconds; try again.") from None
        except UsageError as error:
            raise Refused(422, str(error)) from None

    def _prepared(self, served: Served, upload: uploads.Upload) -> Tensor:
        brought = partial(as_pixels, pixels=served.predictor.plan.pixels)
        return torch.cat(list(map(brought, uploads.pictures(upload.files, self.limits))))

    async def reload(self, again: bool = True) -> bool:
        """Look for a newer run; it takes over once it is loaded. `again`: also one that could not be loaded."""
        before = "" if again else self.source.problem
        fresh = await asyncio.get_running_loop().run_in_executor(self._loader, self.source.refresh, again)
        if fresh or self.source.problem != before:
            self.metrics.reload("loaded" if fresh else "failed")
        return fresh

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self.every)
            await self.reload(again=False)

    def close(self) -> None:
        self.batcher.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)


class Application(Gate):
    """FastAPI behind its gate, and the service that it asks."""

    def __init__(
        self, app: FastAPI, service: Service, key: str, hosts: Collection[str], known: Collection[str]
    ) -> None:
        super().__init__(app, service.limits, service.metrics, key, hosts, known)
        self.service = service


def create_app(
    source: Source,
    limits: Limits | None = None,
    key: str = "",
    hosts: Collection[str] = LOOPBACK,
    every: float = 0.0,
) -> Application:
    """The ASGI application.

    Args:
        key: what requests must bring; empty: nothing.
        hosts: names by which the server may be called, so that no page of another name reads its answers; empty: any.
        every: seconds between looks for a newer run; 0: only when asked.
    """
    service = Service(source, limits or Limits(), every)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch()) if every else None
        yield
        if watching:
            watching.cancel()
        service.close()

    app = FastAPI(
        title="fedprotip",
        version=version("fedprotip"),
        description="Answers of a run of federated continual learning.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    _add_answers(app, service)
    _add_page(app, bool(key))
    known = [route.path for route in app.routes if hasattr(route, "path")]
    gate = Application(app, service, key, hosts, known)

    @app.get("/metrics", summary="Counters, as Prometheus reads them.", response_class=PlainTextResponse)
    async def metrics() -> Response:
        gauges = {"requests_inside": gate.inside, "jobs_waiting": service.batcher.waiting()}
        return Response(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    return gate


def _add_answers(app: FastAPI, service: Service) -> None:
    image = {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "Image files."}
    form = {
        "type": "object",
        "required": ["images"],
        "properties": {"images": image, "together": {"type": "boolean"}, "task": {"type": "integer", "minimum": 0}},
    }
    body = {
        uploads.MULTIPART: {"schema": form},
        uploads.JSON: {"schema": uploads.Asked.model_json_schema()},
    }
    told: dict[int | str, dict[str, Any]] = {
        status: {"model": Sentence, "description": what}
        for status, what in {
            400: "not a request for answers",
            401: "the key is missing or wrong",
            408: "the request did not arrive in time",
            413: "too large, or too many images",
            415: "neither a form nor JSON",
            422: "an image or a value that cannot be used",
            503: "too many requests at once, or too slow",
        }.items()
    }

    @app.post(
        "/predict",
        summary="What the run says about images.",
        response_model=Reply,
        responses=told,
        openapi_extra={"requestBody": {"required": True, "content": body}},
    )
    async def predict(request: Request) -> JSONResponse:
        upload = await uploads.read(request, service.limits)
        served, answers = await service.predict(upload, request.scope["fedprotip.until"])
        named = [{"name": name, **answer} for (name, _), answer in zip(upload.files, answers, strict=True)]
        return JSONResponse({"run": served.name, "answers": named})

    @app.post("/reload", summary="Look for a newer run now.", responses={401: told[401]})
    async def reload() -> dict[str, Any]:
        fresh = await service.reload()
        return {"reloaded": fresh, "run": service.source.now.name, "problem": service.source.problem}

    @app.get("/model", summary="Which run answers, and what it knows.", responses={401: told[401]})
    async def model() -> dict[str, Any]:
        served, limits = service.source.now, service.limits
        plan = served.predictor.plan
        return {
            "run": served.name,
            "since": served.since,
            "classes": served.predictor.classes_,
            "tasks": [task.name for task in plan.tasks],
            "size": plan.pixels.given,
            "limits": {"body": limits.body, "pixels": limits.pixels, "images": limits.images},
        }

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": error.sentence}, error.status)

    @app.exception_handler(FedprotipError)
    async def failed(request: Request, error: FedprotipError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 500)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        """A fault of ours; the server writes down what it was."""
        return JSONResponse({"error": "The server failed at this request."}, 500)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        sentences = {404: "There is nothing here.", 405: "This cannot be asked in that way."}
        sentence = sentences.get(error.status_code, str(error.detail))
        return JSONResponse({"error": sentence}, error.status_code, error.headers)


def _add_page(app: FastAPI, locked: bool) -> None:
    folder = files("fedprotip") / "serve" / "page"
    index = (folder / "index.html").read_text(encoding="utf-8")
    assets = {name: (folder / name).read_bytes() for name in PAGE}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(index)

    @app.get(ASSETS + "{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return Response(assets[name], media_type=PAGE[name])

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(assets["icon.svg"], media_type=PAGE["icon.svg"])

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="Whether the server answers, and whether it needs a key.")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "key": locked}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_documentation(app.openapi()))


def _documentation(schema: dict[str, Any]) -> str:
    """A plain page of all paths; the whole of it is /openapi.json."""
    rows = [
        f"<tr><td><code>{html.escape(method.upper())} {html.escape(path)}</code></td>"
        f"<td>{html.escape(about.get('summary', ''))}</td>"
        f"<td>{html.escape(', '.join(about.get('responses', {})))}</td></tr>"
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    ]
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>fedprotip: API</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='stylesheet' href='/page/page.css'><main><h1>API</h1>"
        "<p>For programs: <a href='/openapi.json'>/openapi.json</a>. For people: <a href='/'>the page</a>.</p>"
        "<table class='plain'><thead><tr><th>request</th><th>what</th><th>answers with</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></main></html>"
    )
