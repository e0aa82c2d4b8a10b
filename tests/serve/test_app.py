"""The application answers as the predictor does, and says no in a sentence."""

import asyncio
import base64
import io
import json
import os
import shutil
import struct
import threading
import weakref
import zlib

import pytest
from PIL import Image

import fedprotip
from fedprotip.serve import uploads
from fedprotip.serve.app import create_app
from fedprotip.serve.limits import Limits
from fedprotip.serve.source import Source
from tests.serve.asking import as_json, ask, form, living, picture
from tests.small import forged


@pytest.fixture(scope="module")
def source(made):
    return Source(made)


@pytest.fixture
def together(source):
    """Run a coroutine function with a living application; further arguments are those of `create_app`."""

    def go(work, chosen=source, **more):
        async def whole():
            async with living(create_app(chosen, **more)) as app:
                return await work(app)

        return asyncio.run(whole())

    return go


def test_forms_and_json_get_the_predictors_answers(together, source, tmp_path):
    files = [(f"{seed}.png", picture(seed, (11, 14))) for seed in range(3)]
    for name, data in files:
        (tmp_path / name).write_bytes(data)
    expected = fedprotip.load(source.folder).predict([tmp_path / name for name, _ in files])

    async def work(app):
        text = [base64.b64encode(data).decode() for _, data in files]
        text[1:] = [base64.encodebytes(files[1][1]).decode(), f"data:image/png;base64,{text[2]}"]
        return await ask(app, "/predict", **form(*files)), await ask(app, "/predict", **as_json({"images": text}))

    for reply in together(work):
        assert reply.status == 200
        for answer, told in zip(expected, reply.json["answers"], strict=True):
            assert told["label"] == answer.label
            assert told["task"] == answer.task
            assert told["probability"] == pytest.approx(answer.probability, abs=1e-5)
            assert told["classes"][0]["probability"] == pytest.approx(answer.probability, abs=1e-5)
            assert sum(task["probability"] for task in told["tasks"]) == pytest.approx(1, abs=1e-4)
            assert max(task["relevance"] for task in told["tasks"]) == pytest.approx(1)
            assert all(0 < task["similarity"] < 1.00001 for task in told["tasks"])


def test_a_turned_photograph_is_answered_as_its_file_is(together, source, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(picture(3, (8, 8))))
    image.save(tmp_path / "turned.png", exif=exif)
    expected = fedprotip.load(source.folder).predict(tmp_path / "turned.png")[0]
    opened = fedprotip.load(source.folder).predict(Image.open(tmp_path / "turned.png"))[0]
    reply = together(lambda app: ask(app, "/predict", **form(("t.png", (tmp_path / "turned.png").read_bytes()))))
    assert reply.json["answers"][0]["probability"] == pytest.approx(expected.probability, abs=1e-5)
    assert opened == expected


def test_requests_at_the_same_time_share_a_forward_pass(together, source):
    async def work(app):
        one = [await ask(app, "/predict", **form((str(seed), picture(seed)))) for seed in range(12)]
        many = await asyncio.gather(*(ask(app, "/predict", **form((str(s), picture(s)))) for s in range(12)))
        counted = await ask(app, "/metrics", method="GET")
        while b"fedprotip_batch_images_sum 24" not in counted.body:  # the thread counts a pass after its answers
            await asyncio.sleep(0.01)
            counted = await ask(app, "/metrics", method="GET")
        return one, many, counted

    one, many, metrics = together(work, limits=Limits(wait=0.05))
    for alone, beside in zip(one, many, strict=True):
        (expected,), (found,) = alone.json["answers"], beside.json["answers"]
        assert (found["name"], found["label"], found["task"]) == (expected["name"], expected["label"], expected["task"])
        assert found["probability"] == pytest.approx(expected["probability"], abs=1e-5)
    passes = int(next(line for line in metrics.body.decode().splitlines() if "batch_images_count" in line).split()[1])
    assert 13 <= passes < 20
    assert b'fedprotip_requests_total{path="/predict",status="200"} 24' in metrics.body


def test_groups_and_known_tasks(together, source):
    files = [(str(seed), picture(seed)) for seed in range(4)]

    async def work(app):
        return (
            await ask(app, "/predict", **form(*files, task=1)),
            await ask(app, "/predict", **form(*files, together="true")),
            await ask(app, "/predict", **form(*files, task=9)),
        )

    known, group, wrong = together(work)
    assert {answer["task"] for answer in known.json["answers"]} == {1}
    predictor = fedprotip.load(source.folder)
    images = [Image.open(io.BytesIO(data)) for _, data in files]
    assert [a["label"] for a in group.json["answers"]] == [a.label for a in predictor.predict(images, group=True)]
    assert (wrong.status, "counted from 0" in wrong.json["error"]) == (422, True)


def bomb(side=10_000):
    """A PNG of 100 megapixels, a few kilobytes long."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side * (side // 8 + 1)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def renamed(request, name):
    """The same form with its files under another name."""
    return request | {"body": request["body"].replace(b'name="images"', f'name="{name}"'.encode())}


def twice(request):
    """The same form with its last part repeated."""
    *_, last, end = request["body"].split(b"--edge")
    return request | {"body": request["body"].removesuffix(b"--edge" + end) + b"--edge" + last + b"--edge" + end}


def cut(request):
    return request | {"body": request["body"][:-40]}


TOO_MANY = form(*((str(number), picture()) for number in range(5)))
BAD = {
    "truncated JPEG": (form(("a.jpg", picture(0, (64, 64), "JPEG")[:200])), 422, "cannot be read"),
    "100 megapixels": (form(("big.png", bomb())), 422, "100,000,000 pixels"),
    "text": (form(("note.txt", b"hello")), 422, "unknown or damaged format"),
    "a program": (form(("p.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), 422, "unknown"),
    "empty file": (form(("a.png", b"")), 422, "empty"),
    "empty body": ({"headers": {"content-type": "multipart/form-data; boundary=edge"}}, 400, "no image"),
    "empty form": (form(), 400, "no image"),
    "no boundary": ({"headers": {"content-type": "multipart/form-data"}, "body": b"x"}, 400, "form"),
    "wrong type": ({"headers": {"content-type": "text/plain"}, "body": picture()}, 415, "multipart/form-data"),
    "no type": ({"body": picture()}, 415, "neither"),
    "a field for a file": (form(images="a.png"), 422, "must be files"),
    "too many": (TOO_MANY, 413, "more than 4 images, which are the most"),
    "another field": (form(("a", picture()), group="x"), 422, "'group' means nothing here; a request has images (the"),
    "files called otherwise": (renamed(form(("a", picture())), "file"), 422, "'file' means nothing here"),
    "a file for a field": (
        renamed(form(("a", picture())), "task"),
        422,
        "task is a number, counted from 0, not a file",
    ),
    "a field twice": (twice(form(("a", picture()), task=1)), 422, "task is given twice"),
    "a form that breaks off": (cut(form(("a", picture()), ("b", picture()))), 400, "ends before its last part"),
    "together": (form(("a", picture()), together="perhaps"), 422, "together is true or false, not 'perhaps'"),
    "task": (form(("a", picture()), task="-1"), 422, "task is a number, counted from 0, not '-1'"),
    "long task": (form(("a", picture()), task="9" * 5000), 422, "number"),
    "no JSON": (as_json(b"{"), 400, "not JSON"),
    "deep JSON": (as_json(b"[" * 100_000), 400, "not JSON"),
    "bytes": (as_json(b"\xff\xfe\x00"), 400, "not JSON"),
    "other JSON": (as_json([1]), 422, "must be a JSON object with images"),
    "unknown key": (as_json({"images": ["AA=="], "path": "/etc/passwd"}), 422, "'path' means nothing here"),
    "no images": (as_json({"images": []}), 422, "images must be a list of image files in base64, with one at least"),
    "nothing": (as_json({}), 422, "images must be a list"),
    "a number for an image": (as_json({"images": ["AA==", 7]}), 422, "Image 2 must be text"),
    "true for a task in JSON": (as_json({"images": ["AA=="], "task": True}), 422, "counted from 0, not 'True'"),
    "half a task in JSON": (as_json({"images": ["AA=="], "task": 1.5}), 422, "counted from 0, not '1.5'"),
    "a URL that is no base64": (as_json({"images": ["data:image/png,x"]}), 422, "Image 1 is a data: URL without"),
    "no base64": (as_json({"images": ["?"]}), 422, "base64"),
    "base64 of nothing": (as_json({"images": [""]}), 422, "empty"),
    "too many pixels together": (form(*((str(number), bomb(4000)) for number in range(4))), 413, "40,000,000 are the"),
    "a long name": (form(("a" * 100_000, picture())), 400, "form"),
    "an empty boundary": ({"headers": {"content-type": "multipart/form-data; boundary="}, "body": b"x"}, 400, "form"),
    "an odd boundary": ({"headers": {"content-type": "multipart/form-data; boundary=é"}, "body": b"x"}, 400, "form"),
    "a path": (form(("../../etc/passwd", picture())), 400, "send the name alone"),
    "a path of Windows": (form(("..\\\\..\\\\x", picture())), 400, "send the name alone"),
    "a path from the root": (form(("/etc/shadow", picture())), 400, "send the name alone"),
    "the folder above": (form(("..", picture())), 400, "send the name alone"),
    "a name with NUL": (form(("a\0.png", picture())), 400, ""),
    "too many in JSON": (as_json({"images": ["AA=="] * 5}), 413, "4 are the most"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence_and_the_server_lives(together, name):
    request, status, said = BAD[name]

    async def work(app):
        return await ask(app, "/predict", **request), await ask(app, "/predict", **form(("good.png", picture())))

    bad, good = together(work, limits=Limits(images=4, total=40_000_000))
    assert bad.status == status
    assert said in bad.json["error"]
    assert bad.json["error"].endswith(".")
    assert good.status == 200


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "%00", "..%2f..%2fetc%2fpasswd", "a..png"])
def test_names_of_files_are_only_words(together, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reply = together(lambda app: ask(app, "/predict", **form((name, picture()))))
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert not list(tmp_path.iterdir())


def test_large_images_are_decoded_and_fitted_one_at_a_time(together, monkeypatch):
    """Eight of 25 megapixels would else lie in memory at once."""
    real, made, alive = uploads.decode, [], []

    def decode(*arguments):
        alive.append(sum(one() is not None for one in made))
        image = real(*arguments)
        made.append(weakref.ref(image))
        return image

    monkeypatch.setattr(uploads, "decode", decode)
    files = [(str(seed), picture(seed, (64, 48))) for seed in range(6)]
    assert together(lambda app: ask(app, "/predict", **form(*files))).status == 200
    assert alive == [0] * 6


def test_fifty_megabytes_are_refused_and_never_held(together):
    parts = [bytes(10**6)] * 50
    reply = together(lambda app: ask(app, "/predict", chunks=parts, headers={"content-type": "application/json"}))
    assert reply.status == 413
    assert "16,000,000 bytes" in reply.json["error"]


def test_a_body_without_end_is_cut_off(together):
    reply = together(lambda app: ask(app, "/predict", chunks=[bytes(100)] * 100), limits=Limits(body=200))
    assert reply.status == 413


def test_whoever_sends_slowly_is_told_so(together):
    slow = {"chunks": [b"x"] * 100, "pause": 0.05}
    reply = together(lambda app: ask(app, "/predict", **slow), limits=Limits(seconds=0.2))
    assert (reply.status, "0.2 seconds" in reply.json["error"]) == (408, True)


def test_an_answer_that_takes_too_long_is_none(together, monkeypatch):
    monkeypatch.setattr("fedprotip.serve.batching.answer_all", lambda jobs: __import__("time").sleep(0.6))
    reply = together(lambda app: ask(app, "/predict", **form(("a", picture()))), limits=Limits(seconds=0.3))
    assert (reply.status, "try again" in reply.json["error"]) == (503, True)


def test_more_requests_than_may_be_inside_are_told_to_come_again(together, monkeypatch):
    from fedprotip.serve import batching

    real, go_on = batching.answer_all, threading.Event()
    monkeypatch.setattr(batching, "answer_all", lambda jobs: (go_on.wait(20), real(jobs)))

    async def work(app):
        asked = [asyncio.create_task(ask(app, "/predict", **form(("a", picture())))) for _ in range(2)]
        while app.inside < 2:
            await asyncio.sleep(0.01)
        refused = await ask(app, "/predict", **form(("a", picture())))
        looked = await ask(app, "/health", method="GET")
        go_on.set()
        return refused, looked, *await asyncio.gather(*asked)

    refused, looked, *answered = together(work, limits=Limits(concurrency=2))
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert (looked.status, [reply.status for reply in answered]) == (200, [200, 200])


def test_whoever_sends_slowly_holds_nobody_up(together):
    """Many times as many requests as may be inside have begun, and send nothing more."""

    async def work(app):
        stalled = [asyncio.create_task(ask(app, "/predict", chunks=[b"x", b"y"], pause=600)) for _ in range(40)]
        await asyncio.sleep(0.05)
        reply = await ask(app, "/predict", **form(("a", picture())))
        for one in stalled:
            one.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        return reply.status

    assert together(work, limits=Limits(concurrency=2)) == 200


def test_bodies_on_their_way_have_so_many_bytes_and_the_oldest_makes_room(together):
    async def work(app):
        def begun(*sizes):
            return asyncio.create_task(ask(app, "/predict", chunks=[bytes(size) for size in sizes], pause=0.2))

        oldest = begun(150, *[1] * 50)
        await asyncio.sleep(0.05)
        others = [begun(150, 40, 1) for _ in range(2)]
        replies = await asyncio.gather(oldest, *others)
        return [reply.status for reply in replies], replies[0].json["error"], app._arriving

    statuses, why, left = together(work, limits=Limits(body=200, arriving=2))
    assert statuses == [503, 415, 415]  # the others are read whole, and are neither a form nor JSON
    assert "try again" in why
    assert not left


def test_an_error_of_ours_is_told_and_the_next_request_answered(together, monkeypatch):
    from fedprotip.serve import batching

    real, calls = batching.answer_all, []

    def once(jobs):
        calls.append(1)
        if len(calls) == 1:
            raise fedprotip.RunError("something broke")
        real(jobs)

    monkeypatch.setattr(batching, "answer_all", once)

    async def work(app):
        return [await ask(app, "/predict", **form(("a", picture()))) for _ in range(2)]

    broken, good = together(work)
    assert (broken.status, broken.json) == (500, {"error": "something broke"})
    assert good.status == 200


def test_a_fault_of_ours_is_a_sentence_too(together, monkeypatch):
    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("fedprotip.serve.app.as_pixels", fail)
    reply = together(lambda app: ask(app, "/predict", **form(("a", picture())), raised=ZeroDivisionError))
    assert (reply.status, reply.json) == (500, {"error": "The server failed at this request."})


# Who may ask


def test_with_a_key_nobody_learns_anything_without_it(together):
    paths = {"/predict": "POST", "/reload": "POST", "/metrics": "GET", "/model": "GET", "/openapi.json": "GET"}

    async def work(app):
        async def status(path, method, **headers):
            return (await ask(app, path, method=method, headers=headers)).status

        none = [await status(path, method) for path, method in paths.items()]
        wrong = [await status(path, method, authorization="Bearer secre") for path, method in paths.items()]
        right = [await status(path, method, authorization="Bearer secret") for path, method in paths.items()]
        free = [await status(path, "GET") for path in ("/", "/health", "/page/page.js", "/docs")]
        return none, wrong, right, free

    none, wrong, right, free = together(work, key="secret")
    assert set(none) == set(wrong) == {401}
    assert right == [415, 200, 200, 200, 200]
    assert set(free) == {200}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example:8000"}, 421),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "model.example:443"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_ask(together, headers, status):
    request = form(("a", picture()))
    request["headers"] |= headers
    hosts = ("127.0.0.1", "localhost", "[::1]", "model.example")
    assert together(lambda app: ask(app, "/predict", **request), hosts=hosts).status == status


# The page and the documents


def test_nothing_of_the_page_comes_from_elsewhere(together):
    async def work(app):
        return [await ask(app, path, method="GET") for path in ("/", "/page/page.js", "/page/page.css", "/docs")]

    for reply in together(work):
        assert reply.status == 200
        text = reply.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text
        assert "innerHTML" not in text
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy


def test_every_path_is_documented(together):
    async def work(app):
        return await ask(app, "/openapi.json", method="GET"), await ask(app, "/docs", method="GET")

    schema, docs = together(work)
    assert set(schema.json["paths"]) == {"/predict", "/reload", "/model", "/health", "/metrics"}
    content = schema.json["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
    assert all(path in docs.body.decode() for path in schema.json["paths"])


@pytest.mark.parametrize(
    ("path", "status"), [("/nothing", 404), ("/page/../app.py", 404), ("/predict", 405), ("/health/", 404)]
)
def test_other_paths_are_a_sentence(together, path, status):
    reply = together(lambda app: ask(app, path, method="GET"))
    assert status != 405 or reply.headers["allow"] == "POST"
    assert reply.status == status
    assert reply.json["error"].endswith(".")


def test_health_can_be_asked_without_a_body(together):
    assert together(lambda app: ask(app, "/health", method="HEAD")).status == 200


# A newer run


def test_a_newer_run_takes_over_and_no_request_is_dropped(together, run, made):
    source = Source(run)
    first = source.now.predictor

    async def work(app):
        async def keep_asking():
            replies = []
            while len(replies) < 200 and not stop.is_set():
                replies.append((await ask(app, "/predict", **form(("a", picture())))).status)
            return replies

        stop = asyncio.Event()
        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        replace_run(made, run)
        fresh = await ask(app, "/reload")
        again = await ask(app, "/reload")
        stop.set()
        return await asyncio.gather(*asking), fresh.json, again.json

    statuses, fresh, again = together(work, chosen=source)
    assert {status for replies in statuses for status in replies} == {200}
    assert (fresh["reloaded"], again["reloaded"]) == (True, False)
    assert source.now.predictor is not first


def replace_run(made, run):
    """Another run in the same place, as a deployment does it: beside it first, then renamed."""
    fresh = shutil.copytree(made, run.with_name("fresh"))
    os.rename(run, run.with_name("old"))
    os.rename(fresh, run)
    os.utime(run / "manifest.json")


def test_a_run_that_is_not_ready_changes_nothing(together, run):
    source = Source(run)
    kept = source.now
    with forged(run) as manifest:
        manifest["status"] = "running"
    reply = together(lambda app: ask(app, "/reload"), chosen=source)
    assert source.now is kept
    assert not reply.json["reloaded"]
    assert "not finished" in reply.json["problem"]
    with forged(run) as manifest:
        manifest["status"] = "finished"
    assert source.refresh()
    assert source.problem == ""


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_was_on_its_way_is_tried_again(made, tmp_path, asked):
    """Its manifest has come before its tensors; then they come, at once or in parts, or somebody asks."""
    shutil.copytree(made, tmp_path / "old")
    os.utime(tmp_path / "old" / "manifest.json", (10**9, 10**9))
    source = Source(tmp_path)
    fresh = shutil.copytree(made, tmp_path / "fresh")
    times = os.stat(fresh / "model.safetensors")
    tensors = (fresh / "model.safetensors").read_bytes()
    (fresh / "model.safetensors").write_bytes(bytes(len(tensors)))
    os.utime(fresh / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not source.refresh(again=False)
    assert source.problem
    tries = []
    load, source._load = source._load, lambda mark: tries.append(mark) or load(mark)
    assert not source.refresh(again=False)
    assert tries == []  # nothing has changed
    (fresh / "model.safetensors").write_bytes(tensors)
    if asked:  # even if it cannot be seen that something has
        os.utime(fresh / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
        assert not source.refresh(again=False)
    assert source.refresh(again=asked)
    assert (source.now.name, source.problem) == ("fresh", "")


def test_the_server_looks_for_newer_runs_by_itself(together, run, made):
    source = Source(run)

    async def work(app):
        replace_run(made, run)
        for _ in range(200):
            if source.now.mark[1] == os.stat(run / "manifest.json").st_ino:
                return True
            await asyncio.sleep(0.05)
        return False

    assert together(work, chosen=source, every=0.05)


def test_of_a_folder_of_runs_the_newest_that_is_sound(tmp_path, made):
    for number, name in enumerate(("old", "new", "broken")):
        shutil.copytree(made, tmp_path / name)
        os.utime(tmp_path / name / "manifest.json", (10**9 + number, 10**9 + number))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    source = Source(tmp_path)
    assert source.now.name == "new"
    shutil.rmtree(tmp_path / "new")
    assert not source.refresh()
    assert source.now.name == "new"


def test_a_folder_without_a_run_is_a_sentence(tmp_path):
    with pytest.raises(fedprotip.UsageError):
        Source(tmp_path)
    with pytest.raises(fedprotip.UsageError):
        Source(tmp_path / "nowhere")


def test_answers_are_json_that_every_program_reads(together, made, monkeypatch):
    """A run that cannot tell what is unusual says null, not NaN."""
    source = Source(made)
    monkeypatch.setattr(
        "fedprotip.inference.answers.Inference.strangeness",
        lambda self, heard: float("nan") * heard.scores[heard.own][:, 0],
    )
    reply = together(lambda app: ask(app, "/predict", **form(("a", picture()))), chosen=source)
    assert json.loads(reply.body, parse_constant=lambda text: pytest.fail(text))["answers"][0]["unusual"] is None
